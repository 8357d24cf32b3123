"""Somebody who asks a WSGI app what became of an operation. What he is told, ``flows/status`` says; nothing is run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from semel.core.commands import NameScope
from semel.core.status import mounted_path
from semel.door import RequestView
from semel.exchange import Performs
from semel.flows.status import status
from semel.wsgi.environ import path_of
from semel.wsgi.exchange import Exchange


class StatusExchange(Exchange):
    """One request for the state of an operation, and the answer to it."""

    def tell(self, name: str) -> Iterable[bytes]:
        """Answer for the operation *name*."""
        path = mounted_path(self._head.mount, self.guard.status_path) or ""
        answer = self.conduct(status(self._head, name, self._policy, path)).answer
        self._start(answer)
        return [] if self._head.method == "HEAD" else [answer.body or b""]

    def name_scope(self, _command: NameScope) -> object:
        """Ask the application whose request this is. A server that is about to stop still knows what it did."""
        return self.guard.scope(RequestView.of(self._head, path_of(self._environ), self._environ))

    performs: ClassVar[Performs] = {**Exchange.performs, NameScope: name_scope}

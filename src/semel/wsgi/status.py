"""Requests to the status URLs of a WSGI app. ``flows/status`` decides on the answer."""

from __future__ import annotations

from collections.abc import Iterable

from semel.core.status import mounted_path
from semel.flows.status import status
from semel.guard.running import interrupted_by_death
from semel.wsgi.ports import RequestPorts


class StatusPorts(RequestPorts):
    """One request for the state of an operation, and the answer to it."""

    def state_of(self, name: str) -> Iterable[bytes]:
        """Answer for the operation *name*."""
        path = mounted_path(self._head.mount, self.guard.status_path) or ""
        answer = self.conduct(status, self._head, name, self._policy, path).answer
        self._start(answer)
        return [] if self._head.method == "HEAD" else [answer.body or b""]

    async def principal(self) -> object:
        """Ask the application for the user of this request. A server that is about to stop still answers this."""
        with interrupted_by_death():
            return self._named()

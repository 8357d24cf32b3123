"""What ``semel doctor`` has found, beside the pages: it is asked now and then, and no page waits for it.

What operations and messages wait for, the pages show themselves; the doctor's words on that are left out here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from semel.core.value import value
from semel.doctor import Report, examine
from semel.doctor.model import Kind
from semel.stores.forks import start_afresh_in_children

_logger = logging.getLogger("semel.console")

#: A set-up changes seldom, and an examination asks some fifty questions.
SECONDS_BETWEEN = 300.0


@value
class Found:
    """Something that is wrong."""

    #: ``error`` or ``warning``.
    severity: str
    #: Of the check, for ``semel doctor explain``.
    name: str
    evidence: str
    #: What to type.
    mend: str


class Examination:
    """Examines one store, in a thread of its own, when it is asked and the last time was long ago."""

    def __init__(
        self,
        url: str,
        ask: Callable[[str], Report] = examine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Examine the store at *url*."""
        self._url = url
        self._ask = ask
        self._clock = clock
        self._found: tuple[Found, ...] | None = None
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have begun nothing: in a forked child, the thread that examines does not exist."""
        self._mutex = threading.Lock()
        self._began: float | None = None

    def __call__(self) -> tuple[Found, ...] | None:
        """Return what was found the last time, the worst first; None: that was never, or is not over yet."""
        with self._mutex:
            now = self._clock()
            if self._began is None or now - self._began >= SECONDS_BETWEEN:
                self._began = now
                threading.Thread(target=self._examine, name="semel-examination", daemon=True).start()
            return self._found

    def _examine(self) -> None:
        try:
            report = self._ask(self._url)
        except Exception:  # the page goes without
            _logger.exception("The doctor failed.")
            return
        found = [
            Found(each.check.severity, each.check.name, each.evidence, each.mend)
            for each in report.findings
            if each.is_wrong and each.check.kind is not Kind.STORE
        ]
        self._found = tuple(sorted(found, key=lambda each: (each.severity, each.name)))

"""The counts of report mode, for programs and operators. They are of one process; the log has all processes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from semel.core.events import Happening, Reported, ReportFailed
from semel.core.outcome import OUTCOMES
from semel.errors import StoreUnavailable
from semel.telemetry.stream import tell

#: Paths come from clients, which may send any number of them.
MAX_ROUTES = 500
OTHER_ROUTES = "other"

#: A store that is down fails every request; one line a minute is enough.
TELL_AGAIN_SECONDS = 60.0
#: How long a store that failed is not asked again. A store that does not answer would delay every request otherwise.
REST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted up to one moment."""

    #: By outcome, in all.
    total: Mapping[str, int]
    #: The same by endpoint, such as ``POST /orders/*``.
    routes: Mapping[str, Mapping[str, int]]

    def __str__(self) -> str:
        """Show it as a table: an outcome a line, endpoint by endpoint."""
        lines = [
            (route, outcome, str(counts[outcome]))
            for route, counts in sorted(self.routes.items())
            for outcome in OUTCOMES
            if outcome in counts
        ]
        width = max((len(route) for route, _, _ in lines), default=0)
        return "\n".join(f"{route:<{width}}  {outcome:<13}  {count:>6}" for route, outcome, count in lines)


class Tally:
    """Counts what report mode reports, and logs all events. It may be used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start from zero; *clock* counts seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self._silent_until: dict[str, float] = {}
        self._rests_until = float("-inf")

    def tell(self, happening: Happening) -> None:
        """Count *happening* if it is a report, and log it; equal failures are logged once per interval."""
        if isinstance(happening, Reported):
            self._count(happening)
        if isinstance(happening, ReportFailed) and not self._is_news(happening):
            return
        tell(happening)

    def snapshot(self) -> Counts:
        """Return the counts so far. The returned value does not change later."""
        with self._lock:
            routes: dict[str, dict[str, int]] = {route: {**counts} for route, counts in self._counts.items()}
        total: Counter[str] = Counter()
        for counts in routes.values():
            total.update(counts)
        frozen = {route: MappingProxyType(counts) for route, counts in routes.items()}
        return Counts(MappingProxyType(dict(total)), MappingProxyType(frozen))

    def check_store(self) -> None:
        """Raise if the store failed a moment ago: in report mode it is not asked again yet."""
        if self._clock() < self._rests_until:
            raise StoreUnavailable("The store failed a moment ago, and is not asked again yet.")

    def store_answered(self) -> None:
        """A store that was too slow has answered: it may be asked again."""
        self._rests_until = float("-inf")

    def _count(self, happening: Reported) -> None:
        with self._lock:
            route = happening.endpoint or happening.route
            if route not in self._counts and len(self._counts) >= MAX_ROUTES:
                route = OTHER_ROUTES
            self._counts.setdefault(route, Counter())[happening.outcome] += 1

    def _is_news(self, happening: ReportFailed) -> bool:
        now = self._clock()
        with self._lock:
            if happening.fault == "store" and now >= self._rests_until:
                self._rests_until = now + REST_SECONDS
            if now < self._silent_until.get(happening.fault, now):
                return False
            self._silent_until[happening.fault] = now + TELL_AGAIN_SECONDS
            return True

"""Which services run beside an application, and how often. It runs none of them.

A service that is to run everywhere is added to ``Plan.services``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from semel.core.inbox import INBOX_RETENTION
from semel.core.upkeep import MAX_ATTEMPTS, MAX_BATCH
from semel.errors import ConfigurationError
from semel.flows.upkeep import AUDIT_RETENTION
from semel.stores import AsyncStore, Store
from semel.stores.dialect import keeps_messages
from semel.work.backlog import CONCURRENCY, SharedBacklog
from semel.work.completer import Completer, Finish
from semel.work.inbox_reaper import InboxReaper
from semel.work.reaper import REAP_INTERVAL, Reaper
from semel.work.service import Report, StoreService
from semel.work.sweeper import SWEEP_INTERVAL, Sweeper

S = TypeVar("S", bound=Store | AsyncStore)

_SPELLED = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What can be set, for each of them."""

    sweep_every: timedelta = SWEEP_INTERVAL
    reap_every: timedelta = REAP_INTERVAL
    audit_retention: timedelta | None = AUDIT_RETENTION
    #: How long the receipts of handled messages are kept: the longest ``retention`` of any inbox on the store.
    inbox_retention: timedelta = INBOX_RETENTION
    batch: int = MAX_BATCH
    #: How many operations are run at once.
    concurrency: int = CONCURRENCY
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        number: object = self.concurrency  # what an application gave
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigurationError(f"concurrency is how many operations are run at once, 1 or more, not {number!r}.")

    def services(
        self, store: S, finish: Finish | None = None, backlog: SharedBacklog[S] | None = None
    ) -> list[StoreService[S, Report]]:
        """Return the services of *store*; with an application's *finish*, also those that run what is in *backlog*."""
        upkeep: list[StoreService[S, Report]] = [
            Sweeper(store, interval=self.sweep_every, has_completer=finish is not None),
            Reaper(store, interval=self.reap_every, audit_retention=self.audit_retention, batch=self.batch),
        ]
        if keeps_messages(store):
            kept = self.inbox_retention
            upkeep.append(InboxReaper(store, interval=self.reap_every, retention=kept, batch=self.batch))
        if finish is None:
            return upkeep
        completers = (
            Completer(store, finish, backlog=backlog, max_attempts=self.max_attempts) for _ in range(self.concurrency)
        )
        return [*upkeep, *completers]


def duration(text: str) -> timedelta:
    """Return what *text* says, as people type it (``90d``, ``10s``); it must be longer than nothing."""
    match = _SPELLED.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise ConfigurationError(f"{text!r} is not a duration. Write it as 10s, 15m, 12h or 90d.")
    return int(match[1]) * _UNITS[match[2]]

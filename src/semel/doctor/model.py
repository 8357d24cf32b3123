"""The words of an examination: check, judgement, finding, report, limits. Nothing is looked at here.

A check has two parts. *look* asks a server, a file or an application, and returns values; *judge* is a pure function of
those values. So what can't be had on one machine, such as another vendor's server, is still judged in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from semel.core.outbox import UNSENT_AFTER

J = TypeVar("J", bound="Callable[[Any, Limits], Judgement]")

MEBIBYTE = 1024 * 1024


class Verdict(StrEnum):
    """What a check has come to."""

    OK = "ok"
    WRONG = "wrong"
    CANNOT_TELL = "cannot tell"


class Severity(StrEnum):
    """How bad it is when a check finds something wrong."""

    #: Operations can be lost, run twice, or not run at all.
    ERROR = "error"
    #: It works, and will be slow, unsafe in an accident, or in need of a person.
    WARNING = "warning"


class Kind(StrEnum):
    """What a check looks at."""

    POSTGRES = "postgres"
    REDIS = "redis"
    SQLITE = "sqlite"
    MEMORY = "memory"
    #: The records of any store.
    STORE = "store"
    APP = "app"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the values mean: the verdict, and the values themselves in a sentence or two."""

    verdict: Verdict
    evidence: str
    #: A command for these very values, where the check's own is not precise enough.
    mend: str | None = None


def ok(evidence: str) -> Judgement:
    """Nothing is wrong."""
    return Judgement(Verdict.OK, evidence)


def wrong(evidence: str, mend: str | None = None) -> Judgement:
    """It is not as it should be."""
    return Judgement(Verdict.WRONG, evidence, mend)


def cannot_tell(reason: str) -> Judgement:
    """What was seen does not decide it."""
    return Judgement(Verdict.CANNOT_TELL, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something is wrong. Each has its reason beside it."""

    #: How long one check may take. More, and a person would wonder whether the program hangs.
    seconds: float = 5.0
    #: So much longer a driver has to say by itself that the time is up: it says more about it.
    grace: float = 1.0
    #: A statement of Semel's takes at most ten seconds, and vacuum removes nothing that the oldest one could see.
    oldest_transaction: timedelta = timedelta(minutes=10)
    #: A transaction of two phases is committed within moments, or forgotten.
    prepared_transaction: timedelta = timedelta(minutes=10)
    #: WAL that a slot without a reader keeps. It grows until the disk is full.
    slot_bytes: int = 1024 * MEBIBYTE
    #: Of the rows at which autovacuum should have begun, and below how many it makes no difference.
    dead_rows_factor: float = 2.0
    dead_rows: int = 10_000
    #: How many times as large a table is as its rows need, and below which size it makes no difference.
    bloat_factor: float = 3.0
    bloat_bytes: int = 16 * MEBIBYTE
    #: A share of all connections, of the memory.
    connections: float = 0.8
    memory: float = 0.8
    #: The server stops taking writes at two thousand million.
    wraparound: int = 1_000_000_000
    #: Logs of two machines are hard to read side by side when they differ by more.
    clock: timedelta = timedelta(seconds=5)
    #: A healthy file can keep growing for a while.
    free_bytes: int = 512 * MEBIBYTE
    #: SQLite starts its log anew at 4 MB, unless a reader holds it back.
    wal_bytes: int = 64 * MEBIBYTE
    #: A worker looks every second for what was accepted, a relay every second for what is ready.
    accepted: timedelta = timedelta(minutes=1)
    outbox: timedelta = UNSENT_AFTER
    #: A retry or the sweeper takes a key over within seconds of its lease.
    stuck: timedelta = timedelta(minutes=5)
    #: The reaper looks every minute. Records past their retention cost room, and nothing else.
    expired: timedelta = timedelta(hours=1)
    #: The sweeper moves the watermark every few seconds, where one runs.
    watermark: timedelta = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that can be wrong."""

    name: str
    kind: Kind
    #: What it belongs to, for people: ``PostgreSQL: tables``.
    subject: str
    #: The fact that holds when all is well.
    title: str
    why: str
    #: What to type, or to change, when it is wrong.
    mend: str
    #: A page below docs/.
    page: str
    severity: Severity
    look: Callable[[Any], Any]
    judge: Callable[[Any, Limits], Judgement]
    #: Checks that must not be wrong, or this one is skipped.
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has come to."""

    check: Check
    verdict: Verdict
    #: The values that were seen, or the reason why it can't be told.
    evidence: str
    #: What to type here.
    mend: str
    #: Whether it was not tried, because of what another check has found.
    is_skipped: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether something is wrong."""
        return self.verdict is Verdict.WRONG


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that an examination has found."""

    #: What was examined, without a password.
    where: str
    findings: tuple[Finding, ...]

    def count(self, verdict: Verdict) -> int:
        """Return how many checks have come to *verdict*."""
        return sum(each.verdict is verdict for each in self.findings)

    def worst(self, at_least: Severity) -> Verdict:
        """Return the verdict on all checks that are *at_least* so severe."""
        counted = {each.verdict for each in self.findings if _counts(each.check.severity, at_least)}
        for verdict in (Verdict.WRONG, Verdict.CANNOT_TELL):
            if verdict in counted:
                return verdict
        return Verdict.OK


def _counts(severity: Severity, at_least: Severity) -> bool:
    return severity is Severity.ERROR or at_least is Severity.WARNING


@dataclass(slots=True)
class Group:
    """Checks on one subject, added to by a decorator on the function that judges."""

    kind: Kind
    subject: str
    page: str
    after: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)

    def check(
        self,
        name: str,
        severity: Severity,
        *,
        title: str,
        why: str,
        mend: str,
        look: Callable[[Any], Any],
        after: tuple[str, ...] | None = None,
        page: str | None = None,
    ) -> Callable[[J], J]:
        """Add a check that the decorated function judges. It is called after its *kind*: ``postgres-fsync``."""

        def add(judge: J) -> J:
            self.checks.append(
                Check(
                    name=f"{self.kind}-{name}",
                    kind=self.kind,
                    subject=self.subject,
                    title=title,
                    why=why,
                    mend=mend,
                    page=page or self.page,
                    severity=severity,
                    look=look,
                    judge=judge,
                    after=self.after if after is None else after,
                )
            )
            return judge

        return add

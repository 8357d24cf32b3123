"""Cleaning up: sweeping after dead workers, reaping what is past retention, and what operators say of the rest.

Any number of processes may do all of this at once. Every write compares attempt and token, and the second one
changes nothing and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Generic, TypeVar, assert_never

from semel.core.commands import (
    Command,
    Discard,
    FindStuck,
    Note,
    Park,
    Reap,
    Reaped,
    ReapTrail,
    Resolution,
    RotateAnswers,
    Rotated,
    Survey,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.events import StoreSurveyed, Swept, SweptUnknown
from semel.core.key import SHORT_LENGTH, digest_of
from semel.core.message import Answer
from semel.core.operator import granted
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Hold, Record, Stuck
from semel.core.recovery import Begun, Done, read_back
from semel.core.upkeep import MAX_BATCH, Free, Hand, ParkIt, next_batch, sweeping
from semel.core.value import value
from semel.errors import Abandoned, StoreError
from semel.flows.ports import Ports

T = TypeVar("T", Reaped, int)

#: One run ends even where records expire as fast as they are reaped: a million at a time.
MAX_ROUNDS = 1000

#: A graph need not tell a thousand from more: both are trouble, and counting takes time.
MAX_SURVEYED = 1000

#: The trail outlives what it is about: a question about a payment comes up within a quarter of a year.
AUDIT_RETENTION = timedelta(days=90)

#: What people see of an operation that never ended. No client does: it is stored past its retention.
ABANDONED = refused(Abandoned(), Policy())


@value
class SweepReport:
    """What came of one run of the sweeper."""

    freed: int = 0
    parked: int = 0
    #: Left to the completer.
    left: int = 0
    #: Why the run ended early, if it did.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        return f"swept: {self.freed} freed, {self.parked} parked, {self.left} left to the completer" + _why(self.error)

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.freed or self.parked or self.error)


@value
class ReapReport:
    """What came of one run of the reaper."""

    deleted: int = 0
    stripped: int = 0
    #: Neither ended nor held when they expired.
    abandoned: int = 0
    #: Lines of the audit trail that were deleted.
    audit_lines: int = 0
    #: Partitions of large answers that were made ahead, and that were dropped; answers that were deleted from none.
    partitions_made: int = 0
    partitions_dropped: int = 0
    answers: int = 0
    #: Why partitions are not made or dropped, and what to run.
    trouble: str | None = None
    #: The batch that the store could bear: the next run begins with it.
    batch: int = MAX_BATCH
    #: Why the run ended early, if it did.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        counts = f"{self.deleted} deleted, {self.stripped} stripped, {self.abandoned} abandoned"
        return f"reaped: {counts}, {self.audit_lines} audit lines deleted{self._partitions}" + _why(self.error)

    @property
    def _partitions(self) -> str:
        said = f", {self.partitions_made} partitions made, {self.partitions_dropped} dropped" if self._turned else ""
        said += f", {self.answers} answers deleted" if self.answers else ""
        return said + (f"; {self.trouble}" if self.trouble else "")

    @property
    def _turned(self) -> int:
        return self.partitions_made + self.partitions_dropped

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        done = self.deleted + self.stripped + self.abandoned + self.audit_lines + self._turned + self.answers
        return not (done or self.error)


async def sweep(ports: Ports, limit: int = MAX_BATCH, *, has_completer: bool = False) -> SweepReport:
    """Free the keys of dead workers, or park those that may not run again, *limit* at a time until none is left."""
    freed = parked = 0
    left: set[Hold] = set()
    try:
        for _ in range(MAX_ROUNDS):
            # Those that are left to the completer are found again, and must not hide the others.
            wanted = limit + len(left)
            found = await ports.ask(FindStuck(wanted))
            for stuck in found:
                match sweeping(stuck, has_completer=has_completer):
                    case Free():
                        freed += await _free(ports, stuck)
                    case ParkIt(reason):
                        parked += await _park(ports, stuck, reason)
                    case Hand():
                        left.add(stuck.hold)
                    case never:  # pragma: no cover - mypy proves that nothing is left
                        assert_never(never)
            if len(found) < wanted:
                break
    except StoreError as error:
        return SweepReport(freed, parked, len(left), error)
    return SweepReport(freed, parked, len(left))


@value
class SurveyReport:
    """What came of one look at what is in the store."""

    survey: StoreSurveyed | None = None
    #: Why there is none, if there is none.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        return "surveyed the store" if self.error is None else f"could not survey the store: {self.error}"

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to tell in a log: gauges show it."""
        return self.error is None


async def survey(ports: Ports, limit: int = MAX_SURVEYED) -> SurveyReport:
    """Count what is in the store, each up to *limit*."""
    try:
        seen = await ports.ask(Survey(limit, with_messages=True))
    except StoreError as error:
        return SurveyReport(error=error)
    return SurveyReport(seen.gauges)


async def reap(
    ports: Ports,
    batch: int = MAX_BATCH,
    audit_retention: timedelta | None = AUDIT_RETENTION,
    *,
    largest: int = MAX_BATCH,
) -> ReapReport:
    """Clear away what is past retention, beginning with *batch* records at a time, then the old lines of the trail."""
    keys = await _in_batches(ports, lambda size: Reap(size, ABANDONED), batch, largest)
    lines: _Batches[int] = _Batches((), keys.size, keys.error)
    if audit_retention is not None and keys.error is None:
        lines = await _in_batches(ports, lambda size: ReapTrail(size, audit_retention), keys.size, largest)
    return ReapReport(
        deleted=sum(each.deleted for each in keys.outcomes),
        stripped=sum(each.stripped for each in keys.outcomes),
        abandoned=sum(each.failed for each in keys.outcomes),
        audit_lines=sum(lines.outcomes),
        batch=lines.size,
        error=lines.error,
    )


async def rotate(ports: Ports, report: ReapReport) -> ReapReport:
    """Make partitions of large answers ahead, and drop those of days that are over; return *report* with that."""
    if report.error is not None:
        return report
    done = Rotated()
    try:
        for _ in range(MAX_ROUNDS):
            step = await ports.ask(RotateAnswers(report.batch))
            done = Rotated(
                done.made + step.made, done.dropped + step.dropped, done.deleted + step.deleted, step.trouble
            )
            if not step.total:
                break
    except StoreError as error:
        return replace(report, error=error)
    return replace(
        report,
        partitions_made=done.made,
        partitions_dropped=done.dropped,
        answers=done.deleted,
        trouble=done.trouble,
    )


async def release(ports: Ports, hold: Hold) -> Verdict:
    """Forget an operation that has not ended, whatever it did: a retry runs it again from its beginning."""
    return await ports.ask(Discard(hold))


async def resolve_applied(ports: Ports, record: Record, result: Any, answer: Answer | None = None) -> Verdict:
    """Let a parked operation go on after its unknown effect, which returned *result*; or end it with that result, or
    with *answer*.
    """
    hold, progress = hold_of(record), read_back(record.steps)
    if progress.unknown is None:
        verdict = await ports.ask(Resolution(hold, answer or granted(result)))
    else:
        verdict = await ports.ask(Unpark(hold, progress.plus(Done("effect", progress.unknown.name, result))))
    await _say(ports, verdict, hold, "applied", progress.unknown)
    return verdict


async def resolve_not_applied(ports: Ports, record: Record) -> Verdict:
    """Let a parked operation go on as if its last effect had not been begun; forget one that has done nothing else.

    Steps that are done stay done. Without any, a record that must not be run twice would be stuck for ever. But
    one that was accepted is never forgotten: a worker runs it from its beginning.
    """
    hold, progress = hold_of(record), read_back(record.steps)
    rest = progress.without_unknown()
    verdict = await ports.ask(Unpark(hold, rest) if rest.steps or record.is_accepted else Discard(hold))
    await _say(ports, verdict, hold, "not applied", progress.unknown)
    return verdict


def hold_of(record: Record) -> Hold:
    """Return the hold that a write has to show to change *record* as it was read."""
    return Hold(record.scope, record.key, record.attempt, record.token)


async def _free(ports: Ports, stuck: Stuck) -> bool:
    if (await ports.ask(Sweep(stuck.hold))) is Verdict.FENCED:
        return False
    ports.tell(Swept(_short(stuck.hold), stuck.hold.attempt, stuck.silent_for.total_seconds()))
    return True


async def _park(ports: Ports, stuck: Stuck, reason: str) -> bool:
    if (await ports.ask(Park(stuck.hold, if_silent=True, reason=reason))) is Verdict.FENCED:
        return False
    ports.tell(SweptUnknown(_short(stuck.hold), stuck.hold.attempt))
    return True


async def _say(ports: Ports, verdict: Verdict, hold: Hold, event: str, step: Begun | None) -> None:
    """Add to the trail what the operator said; that something changed, and by whom, is in it already."""
    if verdict is Verdict.DONE:
        await ports.ask(Note(hold, event, step.name if step else None))


def _short(hold: Hold) -> str:
    # Not Key(...).short(): a key that could not be built is no reason to leave its record stuck.
    return digest_of(hold.key)[:SHORT_LENGTH]


def _why(error: StoreError | None) -> str:
    return f"; then it ended: {error}" if error else ""


@value
class _Batches(Generic[T]):
    """What came of each batch, how large the next may be, and why there was none, where the store objected."""

    outcomes: tuple[T, ...]
    size: int
    error: StoreError | None = None


async def _in_batches(ports: Ports, command: Callable[[int], Command[T]], size: int, largest: int) -> _Batches[T]:
    """Repeat *command* until a batch is not full. One that is too much for the store is made smaller."""
    outcomes: list[T] = []
    for _ in range(MAX_ROUNDS):
        error = None
        try:
            outcomes.append(await ports.ask(command(size)))
        except StoreError as objection:
            error = objection
        wanted, following = size, next_batch(size, error, largest)
        if following is None:
            return _Batches(tuple(outcomes), size, error)
        size = following
        if error is None and _touched(outcomes[-1]) < wanted:
            break
    return _Batches(tuple(outcomes), size)


def _touched(outcome: Reaped | int) -> int:
    return outcome.total if isinstance(outcome, Reaped) else outcome

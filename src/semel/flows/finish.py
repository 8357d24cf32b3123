"""Finishing what no client came back for: the stored request is run again, on from its recovery point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from semel.core.commands import Again, Claim, FindStuck, FinishOne, Flow, Park, TakeOver, Tell, Verdict
from semel.core.events import FinishedAbandoned, GaveUpAbandoned, TookOver
from semel.core.key import Key
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Stuck
from semel.core.upkeep import MAX_ATTEMPTS, ParkIt, Run, Wait, finishing
from semel.errors import Refusal, StoreError
from semel.flows.handle import progress_of, run_handler
from semel.flows.reply import Reply, Send

#: Those whose time has not come yet are among them, and must not hide the others.
MAX_OPERATIONS = 1000

FOR_WANT_OF_CREDENTIALS = frozenset({401, 403, 407})


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What came of one run of the completer."""

    finished: int = 0
    #: Run, and not finished by it: they are tried again later.
    failed: int = 0
    #: Tried too often, or not to be run again: an operator has to say.
    parked: int = 0
    #: Not their time yet.
    waiting: int = 0
    #: Why the run ended early, if it did.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        why = f"; ended early: {self.error}" if self.error else ""
        return (
            f"completed: {self.finished} finished, {self.failed} failed, {self.parked} parked, "
            f"{self.waiting} waiting{why}"
        )

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.finished or self.failed or self.parked or self.error)


def finish_abandoned(*, limit: int = MAX_OPERATIONS, max_attempts: int = MAX_ATTEMPTS) -> Flow[FinishReport]:
    """Finish the operations that are stuck, whose request was kept, and whose time has come."""
    finished = failed = parked = waiting = 0
    try:
        for stuck in (yield from FindStuck(limit, with_request=True, with_nobodys=True)):
            match finishing(stuck, max_attempts):
                case Wait():
                    waiting += 1
                case ParkIt():
                    parked += yield from _park(stuck)
                case Run():
                    status = yield from FinishOne(stuck)
                    if status is None:
                        failed += 1
                    else:
                        finished += 1
                        yield from Tell(FinishedAbandoned(_short(stuck), stuck.hold.attempt + 1, status))
                case never:  # pragma: no cover - mypy proves that nothing is left
                    assert_never(never)
    except StoreError as error:
        return FinishReport(finished, failed, parked, waiting, error)
    return FinishReport(finished, failed, parked, waiting)


def finish(stuck: Stuck, policy: Policy, token: bytes) -> Flow[Reply | None]:
    """Take one abandoned operation over and run its handler; None: somebody else was quicker."""
    hold = stuck.hold
    claim = Claim(hold.scope, hold.key, token, b"", policy.lease, policy.retention)
    try:
        got = yield from TakeOver(claim, hold, is_abandoned=True)
        if isinstance(got, Again):
            return None
        key = Key(hold.key)
        yield from Tell(TookOver(key.short(), got.attempt))
        # The credentials were not stored, so a refusal for want of them says nothing of the operation.
        policy = replace(policy, keep=frozenset(policy.keep) - FOR_WANT_OF_CREDENTIALS)
        return (yield from run_handler(key, got, (yield from progress_of(got)), policy))
    except Refusal as refusal:
        return Send(refused(refusal, policy))


def _park(stuck: Stuck) -> Flow[int]:
    if (yield from Park(stuck.hold, if_silent=True)) is Verdict.FENCED:
        return 0
    yield from Tell(GaveUpAbandoned(_short(stuck), stuck.hold.attempt))
    return 1


def _short(stuck: Stuck) -> str:
    return Key(stuck.hold.key).short()

"""Running stored requests: of what was accepted, and of what no client came back for, on from its recovery point."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from semel.core.commands import Again, Claim, FindStuck, FinishOne, Flow, Park, TakeOver, Tell, Verdict
from semel.core.events import FinishedAbandoned, FinishedAccepted, GaveUpAbandoned, TookOver
from semel.core.key import Key
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Hold, Stuck
from semel.core.recovery import Progress
from semel.core.upkeep import MAX_ATTEMPTS, ParkIt, Run, finishing
from semel.core.value import value
from semel.errors import Refusal, StoreError
from semel.flows.handle import progress_of, run_handler
from semel.flows.reply import Reply, Send

#: That one look finds: far more than are run before the next.
MAX_OPERATIONS = 1000

FOR_WANT_OF_CREDENTIALS = frozenset({401, 403, 407})
#: All that says more than "not now".
FINAL_WITHOUT_CLIENT = frozenset(range(200, 500)) - {408, 421, 425, 429}


@value
class FinishReport:
    """What came of one run of the completer."""

    finished: int = 0
    #: Run, and not finished by it: they are tried again later.
    failed: int = 0
    #: Tried too often, or not to be run again: an operator has to say.
    parked: int = 0
    #: Why the run ended early, if it did.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        why = f"; ended early: {self.error}" if self.error else ""
        return f"completed: {self.finished} finished, {self.failed} failed, {self.parked} parked{why}"

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.finished or self.failed or self.parked or self.error)


def finish_abandoned(*, limit: int = MAX_OPERATIONS, max_attempts: int = MAX_ATTEMPTS) -> Flow[FinishReport]:
    """Finish the operations that nobody works on, whose request was kept, and whose time has come: of each scope the
    oldest first, and scopes in turn.
    """
    finished = failed = parked = 0
    wanted = FindStuck(limit, with_request=True, with_nobodys=True, with_pending=True, only_due=True)
    try:
        for stuck in (yield from wanted):
            match finishing(stuck, max_attempts):
                case ParkIt(reason):
                    parked += yield from _park(stuck, reason)
                case Run():
                    status = yield from FinishOne(stuck)
                    if isinstance(status, int):
                        finished += 1
                        yield from Tell(_ended(stuck, status))
                    elif status is None:
                        failed += 1
                case never:  # pragma: no cover - mypy proves that nothing is left
                    assert_never(never)
    except StoreError as error:
        return FinishReport(finished, failed, parked, error)
    return FinishReport(finished, failed, parked)


def finish(stuck: Stuck, policy: Policy, token: bytes) -> Flow[Reply | None]:
    """Take one abandoned operation over and run its handler; None: somebody else was quicker."""
    hold = stuck.hold
    claim = Claim(hold.scope, hold.key, token, b"", policy.lease, policy.retention)
    try:
        got = yield from TakeOver(claim, hold, is_abandoned=True)
        if isinstance(got, Again):
            return None
        if got.attempt > 1:
            yield from Tell(TookOver(_short(stuck), got.attempt))
        progress = yield from progress_of(got)
    except Refusal as refusal:
        return Send(refused(refusal, policy))
    return (yield from run_stored(stuck, got, progress, policy))


def run_stored(stuck: Stuck, hold: Hold, progress: Progress, policy: Policy) -> Flow[Reply]:
    """Run the handler of an operation that was taken over; its first command is ``RunHandler``.

    Where only the handler's own route knows its policy, it is begun by another, and this once more by that one.
    """
    # The credentials were not stored, so a refusal for want of them says nothing of the operation. Of one that was
    # accepted, any other refusal is its end: there is no client whose retry would bring another.
    keep = FINAL_WITHOUT_CLIENT if stuck.is_accepted else frozenset(policy.keep)
    policy = replace(policy, keep=keep - FOR_WANT_OF_CREDENTIALS)
    try:
        return (yield from run_handler(Key(hold.key), hold, progress, policy, is_accepted=stuck.is_accepted))
    except Refusal as refusal:
        return Send(refused(refusal, policy))


def _park(stuck: Stuck, reason: str) -> Flow[int]:
    if (yield from Park(stuck.hold, if_silent=True, reason=reason)) is Verdict.FENCED:
        return 0
    yield from Tell(GaveUpAbandoned(_short(stuck), stuck.hold.attempt))
    return 1


def _ended(stuck: Stuck, status: int) -> FinishedAccepted | FinishedAbandoned:
    attempt = stuck.hold.attempt + (0 if stuck.is_pending else 1)
    return (FinishedAccepted if stuck.is_accepted else FinishedAbandoned)(_short(stuck), attempt, status)


def _short(stuck: Stuck) -> str:
    return Key(stuck.hold.key).short()

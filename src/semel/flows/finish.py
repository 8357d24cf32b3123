"""Running stored requests: of what was accepted, and of what no client came back for, on from its recovery point."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from semel.core.commands import Again, Claim, FindStuck, Park, TakeOver, Verdict
from semel.core.events import FinishedAbandoned, FinishedAccepted, GaveUpAbandoned, NotLoggedIn, TookOver
from semel.core.handler import Answered, RunHandler
from semel.core.key import Key
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Hold, Stuck
from semel.core.recovery import Progress
from semel.core.upkeep import MAX_ATTEMPTS, ParkIt, Run, finishing
from semel.core.value import value
from semel.errors import Refusal, StoreError
from semel.flows.handle import end, progress_of
from semel.flows.ports import CompleterPorts, Ports, StoredPorts
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


async def finish_abandoned(
    ports: CompleterPorts, *, limit: int = MAX_OPERATIONS, max_attempts: int = MAX_ATTEMPTS
) -> FinishReport:
    """Finish the operations that no worker has, that have a stored request, and that are due: of each scope the
    oldest first, and scopes in turn.
    """
    finished = failed = parked = 0
    wanted = FindStuck(limit, with_request=True, with_no_token=True, with_pending=True, only_due=True)
    try:
        for stuck in await ports.find_stuck(wanted):
            match finishing(stuck, max_attempts):
                case ParkIt(reason):
                    parked += await _park(ports, stuck, reason)
                case Run():
                    status = await ports.finish_one(stuck)
                    if isinstance(status, int):
                        finished += 1
                        ports.tell(_ended(stuck, status))
                    elif status is None:
                        failed += 1
                case never:  # pragma: no cover - mypy proves that nothing is left
                    assert_never(never)
    except StoreError as error:
        return FinishReport(finished, failed, parked, error)
    return FinishReport(finished, failed, parked)


async def finish(ports: StoredPorts, stuck: Stuck, policy: Policy, token: bytes) -> Reply | None:
    """Take one abandoned operation over and run its handler; None: another worker was quicker."""
    hold = stuck.hold
    if ports.is_kept(hold):
        return None
    claim = Claim(hold.scope, hold.key, token, b"", policy.lease, policy.retention)
    try:
        got = await ports.take_over(TakeOver(claim, hold, is_abandoned=True))
        if isinstance(got, Again):
            return None
        if got.attempt > 1:
            ports.tell(TookOver(_short(stuck), got.attempt))
        progress = await progress_of(ports, got)
    except Refusal as refusal:
        return Send(refused(refusal, policy))
    return await _run_stored(ports, stuck, got, progress, policy)


async def _run_stored(ports: StoredPorts, stuck: Stuck, hold: Hold, progress: Progress, policy: Policy) -> Reply:
    """Run the handler of an operation that was taken over.

    However long the answer to one that was accepted takes, it is held back until it is whole: there is no client to
    send it to as it comes, and the one that asks for it later is to get it.
    """
    time = None if stuck.is_accepted else policy.max_response_time
    run = RunHandler(hold, policy.lease, policy.max_response_body, progress, max_response_time=time)
    try:
        ending = await ports.run_handler(run)
        if isinstance(ending, Answered) and ending.answer.status in FOR_WANT_OF_CREDENTIALS:
            ports.tell(NotLoggedIn(_short(stuck), hold.attempt, ending.answer.status))
        policy = ports.route_policy() or policy
        # The credentials were not stored, so a refusal for want of them says nothing of the operation. Of one that was
        # accepted, any other refusal is its end: there is no client to retry it.
        keep = FINAL_WITHOUT_CLIENT if stuck.is_accepted else frozenset(policy.keep)
        policy = replace(policy, keep=keep - FOR_WANT_OF_CREDENTIALS)
        return await end(ports, Key(hold.key), hold, ending, policy, is_accepted=stuck.is_accepted)
    except Refusal as refusal:
        return Send(refused(refusal, policy))


async def _park(ports: Ports, stuck: Stuck, reason: str) -> int:
    if (await ports.ask(Park(stuck.hold, if_silent=True, reason=reason))) is Verdict.FENCED:
        return 0
    ports.tell(GaveUpAbandoned(_short(stuck), stuck.hold.attempt))
    return 1


def _ended(stuck: Stuck, status: int) -> FinishedAccepted | FinishedAbandoned:
    attempt = stuck.hold.attempt + (0 if stuck.is_pending else 1)
    return (FinishedAccepted if stuck.is_accepted else FinishedAbandoned)(_short(stuck), attempt, status)


def _short(stuck: Stuck) -> str:
    return Key(stuck.hold.key).short()

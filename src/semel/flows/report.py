"""Report mode: what would have become of a request is found out and told. What becomes of it is the application's own.

Keys are claimed and ended as usual, under scopes of their own, so that duplicates are known for what they are. Nothing
of this may change an answer: whatever fails here is told, and the handler runs.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Literal, assert_never

from semel.core.commands import Again, Claim, Complete, Now, Release, TakeOver
from semel.core.decision import Accepted, Busy, Refuse, Replay, Run, decide
from semel.core.events import Reported, ReportFailed
from semel.core.fingerprint import is_same_request
from semel.core.handler import Streaming
from semel.core.message import Head, request_of
from semel.core.outcome import Outcome, outcome_of, route_of
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.replay import Keep, judge
from semel.core.scope import reported
from semel.errors import InProgress, Interrupted, KeyExpired, Refusal, StoreError
from semel.flows.guard import CLAIM_TRIES, claim_on
from semel.flows.handle import release
from semel.flows.identify import Asked, identify
from semel.flows.ports import GuardPorts
from semel.flows.reply import Done, Reply


async def report(ports: GuardPorts, head: Head, policy: Policy, token: bytes) -> Reply:
    """Let one request through as it is, and tell what would have become of it. *token* is as for ``serve``."""
    asked: Asked | None = None
    hold: Hold | None = None
    outcome: Outcome = "keyless"
    try:
        asked = await identify(ports, head, policy)
        if asked is not None:
            hold, outcome = await _look(ports, asked, token)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the application's included, it changes no answer
        outcome = _judged(ports, asked, error)
    try:
        status = await ports.run_unguarded(hold, policy.lease if hold else None)
    finally:
        # Only now, since a framework knows the route once it has run it.
        ports.tell(Reported(_short(asked), outcome, route_of(head.method, head.path), _endpoint(ports)))
    if hold is not None:
        await _end(ports, asked, hold, status, policy)
    return Done()


async def _look(ports: GuardPorts, asked: Asked, token: bytes) -> tuple[Hold | None, Outcome]:
    """Claim the key, or find out what is there; the outcomes that are refusals are raised."""
    policy = asked.policy
    claim = claim_on(asked, token, request=request_of(asked.subject.method, asked.subject.path))
    # What is left of it must not show up as work: not as an unknown outcome, and not for a completer.
    claim = replace(claim, scope=reported(claim.scope), on_crash="rerun", after_retention="delete", request=None)
    try:
        for _ in range(CLAIM_TRIES):
            seen = await ports.claim(claim)
            got = (await _decide(ports, seen, claim, asked)) if isinstance(seen, Found) else seen
            if got == "replay":
                return None, got
            if isinstance(got, Hold):
                await _refuse_late(ports, asked, got)
                return got, "new" if got.attempt == 1 else "rerun"
    except Interrupted:
        # Nothing has run: the next request is to find the key as this one did.
        await release(ports, Hold(claim.scope, claim.key, 0, token), policy)
        raise
    raise InProgress


async def _decide(ports: GuardPorts, found: Found, claim: Claim, asked: Asked) -> Hold | Outcome | Again:
    """Decide about a key that was there before this request, as it would be decided if that counted."""
    seen = Hold(claim.scope, claim.key, found.attempt, found.token)
    if found.token == claim.token:
        # The reply to this very claim was lost on its way.
        return seen
    is_same = is_same_request(asked.policy.fingerprint, found.fingerprint, claim.fingerprint, asked.subject)
    match decide(found, asked.policy, is_same_request=is_same):
        case Replay():
            return "replay"
        case Refuse(refusal):
            raise refusal
        case Busy() | Accepted():
            raise InProgress
        case Run():
            return await ports.take_over(TakeOver(claim, seen))
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


async def _refuse_late(ports: GuardPorts, asked: Asked, hold: Hold) -> None:
    key, policy = asked.key, asked.policy
    if policy.late == "refuse" and key.made_at is not None and key.is_late((await ports.ask(Now())), policy.retention):
        await release(ports, hold, policy)
        raise KeyExpired


def _judged(ports: GuardPorts, asked: Asked | None, error: Exception) -> Outcome:
    """Name what would have become of a request that ended in *error*; tell of what is a mistake in any case."""
    outcome = outcome_of(error) if isinstance(error, Refusal) else "failed"
    if outcome == "failed":
        fault: Literal["store", "application"] = "store" if isinstance(error, StoreError) else "application"
        ports.tell(ReportFailed(_short(asked), fault, str(error) or type(error).__name__))
    return outcome


async def _end(ports: GuardPorts, asked: Asked | None, hold: Hold, status: int | None, policy: Policy) -> None:
    """Let the record say how the handler ended. No answer is kept: it has been sent as it came."""
    verdict = judge(Streaming(status or HTTPStatus.INTERNAL_SERVER_ERROR, ()), policy)
    try:
        await ports.ask(Complete(hold, verdict.event, verdict.answer) if isinstance(verdict, Keep) else Release(hold))
    except Exception as error:  # noqa: BLE001 - whatever it is, the answer has left
        _judged(ports, asked, error)


def _endpoint(ports: GuardPorts) -> str | None:
    try:
        return ports.endpoint()
    except Exception:  # noqa: BLE001 - what a framework has of its route is the framework's, and the answer has left
        return None


def _short(asked: Asked | None) -> str | None:
    return asked.key.short() if asked else None

"""Report mode: what would have become of a request is found out and told. What becomes of it is the application's own.

Keys are claimed and ended as usual, under scopes of their own, so that duplicates are known for what they are. Nothing
of this may change an answer: whatever fails here is told, and the handler runs.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Literal, assert_never

from semel.core.commands import Again, Claim, Complete, Flow, Now, Release, RunUnguarded, Streaming, TakeOver, Tell
from semel.core.decision import Accepted, Busy, Refuse, Replay, Run, decide
from semel.core.events import Reported, ReportFailed
from semel.core.fingerprint import is_same_request
from semel.core.message import Head
from semel.core.outcome import Outcome, outcome_of, route_of
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.replay import Keep, judge
from semel.core.scope import reported
from semel.errors import InProgress, Interrupted, KeyExpired, Refusal, StoreError
from semel.flows.guard import CLAIM_TRIES, claim_on
from semel.flows.handle import release
from semel.flows.identify import Asked, identify
from semel.flows.reply import Done, Reply


def report(head: Head, policy: Policy, token: bytes) -> Flow[Reply]:
    """Let one request through as it is, and tell what would have become of it. *token* is as for ``serve``."""
    asked: Asked | None = None
    hold: Hold | None = None
    outcome: Outcome = "keyless"
    try:
        asked = yield from identify(head, policy)
        if asked is not None:
            hold, outcome = yield from _look(asked, token)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the application's included, it changes no answer
        outcome = yield from _judged(asked, error)
    yield from Tell(Reported(_short(asked), outcome, route_of(head.method, head.path)))
    status = yield from RunUnguarded(hold, policy.lease if hold else None)
    if hold is not None:
        yield from _end(asked, hold, status, policy)
    return Done()


def _look(asked: Asked, token: bytes) -> Flow[tuple[Hold | None, Outcome]]:
    """Claim the key, or find out what is there; the outcomes that are refusals are raised."""
    policy = asked.policy
    claim = claim_on(asked.key, asked.scope, asked.subject, policy, token=token, principal=asked.principal)
    # Nobody may be bothered with what is left of it: no operator with unknown outcomes, no completer with requests.
    claim = replace(claim, scope=reported(claim.scope), on_crash="rerun", after_retention="delete", request=None)
    try:
        for _ in range(CLAIM_TRIES):
            seen = yield from claim
            got = (yield from _decide(seen, claim, asked)) if isinstance(seen, Found) else seen
            if got == "replay":
                return None, got
            if isinstance(got, Hold):
                yield from _refuse_late(asked, got)
                return got, "new" if got.attempt == 1 else "rerun"
    except Interrupted:
        # Nothing has run: the next request is to find the key as this one did.
        yield from release(Hold(claim.scope, claim.key, 0, token), policy)
        raise
    raise InProgress


def _decide(found: Found, claim: Claim, asked: Asked) -> Flow[Hold | Outcome | Again]:
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
            return (yield from TakeOver(claim, seen))
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _refuse_late(asked: Asked, hold: Hold) -> Flow[None]:
    key, policy = asked.key, asked.policy
    if policy.late == "refuse" and key.made_at is not None and key.is_late((yield from Now()), policy.retention):
        yield from release(hold, policy)
        raise KeyExpired


def _judged(asked: Asked | None, error: Exception) -> Flow[Outcome]:
    """Name what would have become of a request that ended in *error*; tell of what nobody could have meant."""
    outcome = outcome_of(error) if isinstance(error, Refusal) else "failed"
    if outcome == "failed":
        whose: Literal["store", "application"] = "store" if isinstance(error, StoreError) else "application"
        yield from Tell(ReportFailed(_short(asked), whose, str(error) or type(error).__name__))
    return outcome


def _end(asked: Asked | None, hold: Hold, status: int | None, policy: Policy) -> Flow[None]:
    """Let the record say how the handler ended. No answer is kept: it has been sent, and nobody held it."""
    verdict = judge(Streaming(status or HTTPStatus.INTERNAL_SERVER_ERROR, ()), policy)
    try:
        yield from Complete(hold, verdict.event, verdict.answer) if isinstance(verdict, Keep) else Release(hold)
    except Exception as error:  # noqa: BLE001 - whatever it is, the answer has left
        yield from _judged(asked, error)


def _short(asked: Asked | None) -> str | None:
    return asked.key.short() if asked else None

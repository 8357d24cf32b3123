"""One guarded request, from its headers to its answer. The order of I/O is the promise, so it is written here once.

Read ``yield from X`` as: ask the world to do X, and here is its answer. Between any two of them the process may die.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_never

from semel.core.commands import (
    Again,
    Answered,
    Claim,
    Complete,
    Flow,
    NameScope,
    Now,
    Pause,
    Raised,
    ReadBody,
    Release,
    RunHandler,
    Streaming,
    TakeOver,
    Tell,
    Verdict,
)
from semel.core.decision import RETRY_AFTER_SECONDS, Refuse, Replay, Run, decide
from semel.core.events import Fenced, NotKept, NotStored, PersonalKey, StoreFailed, TookOver
from semel.core.fingerprint import Subject
from semel.core.key import Key, find
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Found, Hold
from semel.core.replay import Free, Keep, judge, replayed
from semel.core.scope import scoped
from semel.core.state import Event
from semel.errors import (
    AnswerNotStored,
    BodyTooLarge,
    InProgress,
    Interrupted,
    KeyExpired,
    KeyMissing,
    NoEffect,
    Refusal,
    StoreError,
    StoreUnavailable,
)

#: How often a claim looks again when rivals keep moving the record under its eyes.
CLAIM_TRIES = 5
#: The handler has run, and only its answer is missing: worth trying for as long as a fail-over of a pooler takes.
COMPLETE_PAUSES = (timedelta(milliseconds=50), timedelta(milliseconds=250), timedelta(seconds=1))
STORE_RETRY_AFTER_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Send:
    """Send this answer."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class PassOn:
    """Let the handler's own answer through: as it streams, or (for a request without a key) untouched."""


@dataclass(frozen=True, slots=True)
class Reraise:
    """Let the handler's exception through, after *answer* where there is one."""

    error: Exception
    answer: Answer | None


Reply = Send | PassOn | Reraise


def serve(head: Head, policy: Policy, token: bytes) -> Flow[Reply]:
    """Guard one request. *token* is random and names this attempt alone."""
    try:
        key = find(head.headers, policy.header_names, strict=policy.strict, max_length=policy.max_key_length)
        if key is None:
            if policy.required:
                raise KeyMissing
            return PassOn()
        if key.personal:
            yield from Tell(PersonalKey(key.short()))
        scope = scoped((yield from NameScope()), head, policy)
        body = yield from ReadBody(policy.max_request_body)
        if body is None:
            raise BodyTooLarge(f"The request body is larger than {policy.max_request_body} bytes.")
        subject = Subject(head.method, head.path, head.query, head.headers, body)
        got = yield from _claim(key, scope, subject, policy, token)
        if isinstance(got, Answer):
            return Send(got)
        return (yield from _run(key, got, policy))
    except StoreError as error:
        error.retry_after = STORE_RETRY_AFTER_SECONDS
        return Send(refused(error, policy))
    except Refusal as refusal:
        return Send(refused(refusal, policy))


def _claim(key: Key, scope: str, subject: Subject, policy: Policy, token: bytes) -> Flow[Hold | Answer]:
    """Get hold of the key, or the answer to give instead."""
    fingerprint = policy.fingerprint.of(subject) if policy.fingerprint else b""
    claim = Claim(scope, key.value, token, fingerprint, policy.lease, policy.retention)
    by_token = Hold(scope, key.value, 0, token)
    is_held = False
    try:
        for _ in range(CLAIM_TRIES):
            seen = yield from claim
            got = (yield from _judge(seen, claim, subject, policy)) if isinstance(seen, Found) else seen
            if isinstance(got, Hold):
                is_held = True
                yield from _refuse_late(key, got, policy)
            if not isinstance(got, Again):
                return got
    except Interrupted:
        # Nothing has run: let the next request have the key at once, whether or not the claim got through.
        yield from _release(by_token)
        raise
    except StoreError as error:
        yield from Tell(StoreFailed(key.short(), str(error)))
        if is_held or (isinstance(error, StoreUnavailable) and error.was_sent):
            yield from _release(by_token)
        raise
    # Rivals were quicker each time; or the replies were lost, and the key is ours without our knowing.
    yield from _release(by_token)
    raise InProgress(retry_after=RETRY_AFTER_SECONDS)


def _judge(found: Found, claim: Claim, subject: Subject, policy: Policy) -> Flow[Hold | Answer | Again]:
    """Decide about a key that was there before this request."""
    if found.token == claim.token:
        # The reply to this very claim was lost on its way: the record bears our token.
        return Hold(claim.scope, claim.key, found.attempt, found.token)
    recipe = policy.fingerprint
    is_same = recipe is None or recipe.matches(found.fingerprint, claim.fingerprint, subject)
    match decide(found, policy, is_same_request=is_same):
        case Replay(answer):
            return replayed(answer, policy)
        case Refuse(refusal):
            raise refusal
        case Run():
            seen = Hold(claim.scope, claim.key, found.attempt, found.token)
            got = yield from TakeOver(claim, seen)
            if isinstance(got, Hold) and not found.is_expired:
                yield from Tell(TookOver(Key(claim.key).short(), got.attempt))
            return got
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _refuse_late(key: Key, hold: Hold, policy: Policy) -> Flow[None]:
    """Refuse a key that tells its own age and is past retention: its record may have been reaped, its effect not."""
    if policy.late != "refuse" or key.made_at is None:
        return
    now = yield from Now()
    if key.made_at < now - policy.retention:
        yield from _release(hold)
        raise KeyExpired


def _run(key: Key, hold: Hold, policy: Policy) -> Flow[Reply]:
    """Run the handler, store its answer, and only then let the answer go."""
    ending = yield from RunHandler(hold, policy.lease, policy.max_response_body)
    verdict = judge(ending, policy)
    match verdict:
        case Free():
            yield from _release(hold)
        case Keep(event, answer):
            if isinstance(ending, Streaming):
                yield from Tell(NotKept(key.short(), ending.status))
            if (yield from _complete(key, hold, event, answer)) is Verdict.FENCED:
                # Whoever took over runs the operation now, or has; a retry will get that answer.
                yield from Tell(Fenced(key.short(), hold.attempt))
                raise InProgress(retry_after=RETRY_AFTER_SECONDS)
        case unheard:  # pragma: no cover - mypy proves that nothing is left
            assert_never(unheard)
    match ending:
        case Answered(answer):
            return Send(answer)
        case Streaming():
            return PassOn()
        case Raised(error):
            if isinstance(error, NoEffect) and isinstance(verdict, Free):
                return Send(refused(NoEffect(error.detail, retry_after=RETRY_AFTER_SECONDS), policy))
            return Reraise(error, verdict.answer if isinstance(verdict, Keep) else None)
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _complete(key: Key, hold: Hold, event: Event, answer: Answer) -> Flow[Verdict]:
    """Store the answer, patiently: the handler has run. If it can't be done the key is kept, never freed."""
    for pause in (*COMPLETE_PAUSES, None):
        try:
            return (yield from Complete(hold, event, answer))
        except StoreError as error:
            if pause is None:
                yield from Tell(NotStored(key.short(), hold.attempt, str(error)))
                raise AnswerNotStored from error
            yield from Pause(pause)
    raise AssertionError  # pragma: no cover - the last round returned or raised


def _release(hold: Hold) -> Flow[None]:
    """Free the key if the store can be reached; otherwise its lease will."""
    try:
        yield from Release(hold)
    except StoreError:
        return

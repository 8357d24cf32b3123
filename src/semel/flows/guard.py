"""One operation whose key is known, from its claim to its end. The order of I/O is the promise, so it is written here
once, for whatever comes in by any door.

What comes after the claim is in ``handle.py``, and in ``atomic.py`` where claim and ending are one transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from semel.core.commands import Again, Announce, Claim, Flow, Look, Now, TakeOver, Tell
from semel.core.decision import RETRY_AFTER_SECONDS, Accepted, Busy, Refuse, Replay, Run, decide
from semel.core.events import StoreFailed, TookOver
from semel.core.fingerprint import Subject, fingerprint_of, is_same_request
from semel.core.key import Key
from semel.core.message import Answer, Head, Request, request_of
from semel.core.policy import Policy
from semel.core.preference import Preferences, preferences_of
from semel.core.record import Found, Hold
from semel.core.recovery import Progress
from semel.core.replay import replayed
from semel.core.state import State
from semel.core.status import not_ended
from semel.core.value import value
from semel.errors import InProgress, Interrupted, KeyExpired, StoreError, StoreUnavailable
from semel.flows.atomic import run_atomically
from semel.flows.handle import note, progress_of, release, run_handler
from semel.flows.reply import Reply, Send
from semel.flows.waiting import LeftWaiting, applied, wait

#: How often a claim looks again when rivals keep moving the record under its eyes.
CLAIM_TRIES = 5

#: Said with a 202 to a client that has asked for it.
RESPOND_ASYNC = (b"preference-applied", b"respond-async")


def guard(
    key: Key,
    scope: str,
    subject: Subject,
    policy: Policy,
    *,
    token: bytes,
    principal: str,
    notes_replays: bool = False,
    status_path: str | None = None,
) -> Flow[Reply]:
    """Guard one operation. *token* is random and names this attempt alone. What it refuses, it raises.

    *status_path* is where the state of operations can be asked for; without it, none is accepted to be run later.
    """
    wishes = preferences_of(subject.headers)
    wants_async = status_path is not None and wishes.respond_async and "respond-async" in policy.preferences
    is_accepted = status_path is not None and (policy.in_progress == "accept" or wants_async)
    claim = claim_on(key, scope, subject, policy, token=token, principal=principal, is_accepted=is_accepted)
    if policy.mode == "atomic":
        return (yield from run_atomically(key, claim, subject, policy, wishes, notes_replays=notes_replays))
    asked = _Asked(key, claim, subject, policy, wishes, notes_replays)
    got = yield from _claim(asked, prefers_202=wants_async)
    if isinstance(got, Answer):
        return Send(got)
    if isinstance(got, _Held):
        request = request_of(subject.method, subject.path)
        return (yield from run_handler(key, got.hold, got.progress, policy, request=request))
    if status_path is None:
        # Accepted by another door, or on another day.
        raise InProgress(retry_after=RETRY_AFTER_SECONDS)
    return Send((yield from _accepted(claim, status_path, is_wish=wants_async)))


@value
class _Asked:
    """What one request asks for, and how it is to be judged."""

    key: Key
    claim: Claim
    subject: Subject
    policy: Policy
    wishes: Preferences
    notes_replays: bool


@value
class _Ours:
    """The key is ours."""

    hold: Hold
    #: A worker is to run it: it was stored as pending.
    is_pending: bool


@value
class _Held:
    """The key is ours, and the operation has come so far."""

    hold: Hold
    progress: Progress


def claim_on(
    key: Key,
    scope: str,
    subject: Subject,
    policy: Policy,
    *,
    token: bytes,
    principal: str,
    is_accepted: bool = False,
) -> Claim:
    """Return the claim of this attempt on its key."""
    fingerprint = fingerprint_of(policy.fingerprint, subject)
    is_late_refused = policy.late == "refuse"
    is_stored = policy.store_request or is_accepted
    return Claim(
        scope,
        key.value,
        token,
        fingerprint,
        policy.lease,
        policy.retention,
        policy.on_crash,
        "strip" if is_late_refused else "delete",
        _request(subject, principal, policy) if is_stored else None,
        is_accepted,
        # A key that tells its own age can be refused without a record, unless its client's clock was ahead.
        key.made_at if is_late_refused else None,
    )


def _request(subject: Subject, principal: str, policy: Policy) -> Request:
    headers = tuple(pair for pair in subject.headers if policy.stores_header(pair[0]))
    head = Head(subject.method, subject.path, subject.query, headers, subject.mount)
    return Request(head, bytes(subject.body), principal)


def _claim(asked: _Asked, *, prefers_202: bool) -> Flow[_Held | Answer | Accepted]:
    """Get hold of the key, or the answer to give instead."""
    claim, policy = asked.claim, asked.policy
    by_token = Hold(claim.scope, claim.key, 0, claim.token)
    is_held = False
    try:
        got = yield from _seek(asked, prefers_202=prefers_202)
        if isinstance(got, _Ours):
            is_held = True
            yield from _refuse_late(asked.key, got.hold, policy)
            return Accepted() if got.is_pending else _Held(got.hold, (yield from progress_of(got.hold)))
        if not isinstance(got, Again):
            return got
    except LeftWaiting:
        raise
    except Interrupted:
        # Nothing has run: let the next request have the key at once, whether or not the claim got through.
        yield from release(by_token, policy)
        raise
    except StoreError as error:
        yield from Tell(StoreFailed(asked.key.short(), str(error)))
        if is_held or (isinstance(error, StoreUnavailable) and error.was_sent):
            yield from release(by_token, policy)
        raise
    # Rivals were quicker each time; or the replies were lost, and the key is ours without our knowing.
    yield from release(by_token, policy)
    raise InProgress(retry_after=RETRY_AFTER_SECONDS)


def _seek(asked: _Asked, *, prefers_202: bool) -> Flow[_Ours | Answer | Again | Accepted]:
    """Ask for the key until it is clear whose it is, and wait for its holder to end where that is wanted."""
    claim, policy = asked.claim, asked.policy
    has_waited = False
    told: Found | Again = Again.AGAIN
    tries = CLAIM_TRIES
    while tries:
        seen = (yield from claim) if isinstance(told, Again) else told
        is_news = has_waited and isinstance(told, Again)
        got: _Ours | Answer | Again | Busy | Accepted
        match seen:
            case Found():
                got = yield from _judge(seen, asked, is_news=is_news)
            case Hold():
                got = _Ours(seen, claim.is_accepted)
            case _:
                got = seen
        match got:
            case Answer():
                return applied(got, policy, asked.wishes) if has_waited else got
            case _Ours() | Accepted():
                return got
            case Busy() if prefers_202:
                return Accepted()
            case Busy():
                told = yield from wait(claim.scope, claim.key, policy, asked.wishes)
                has_waited = True
            case Again():
                told = got
                tries -= 1
            case never:  # pragma: no cover - mypy proves that nothing is left
                assert_never(never)
    return Again.AGAIN


def _judge(found: Found, asked: _Asked, *, is_news: bool) -> Flow[_Ours | Answer | Again | Busy | Accepted]:
    """Decide about a key that was there before this request; *is_news* to others who wait for it, if it has ended."""
    claim, policy = asked.claim, asked.policy
    seen = Hold(claim.scope, claim.key, found.attempt, found.token)
    if found.token == claim.token:
        # The reply to this very claim was lost on its way: the record bears our token.
        return _Ours(seen, found.state is State.PENDING)
    is_same = is_same_request(policy.fingerprint, found.fingerprint, claim.fingerprint, asked.subject)
    decision = decide(found, policy, is_same_request=is_same)
    if is_news and isinstance(decision, Replay | Refuse):
        yield from Announce(claim.scope, claim.key, found)
    match decision:
        case Replay(answer):
            if asked.notes_replays:
                yield from note(seen, "replayed")
            return replayed(answer, policy)
        case Refuse(refusal):
            raise refusal
        case Busy() | Accepted() as outcome:
            return outcome
        case Run():
            # One that has begun as an ordinary request, and did not expire, is no worker's: it has to be run here.
            wanted = claim if found.is_expired else replace(claim, is_accepted=False)
            got = yield from TakeOver(wanted, seen)
            if isinstance(got, Again):
                return got
            if got.attempt > 1:
                yield from Tell(TookOver(Key(claim.key).short(), got.attempt))
            return _Ours(got, wanted.is_accepted)
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _accepted(claim: Claim, path: str, *, is_wish: bool) -> Flow[Answer]:
    """Say where the state of this operation can be asked for."""
    record = yield from Look(claim.scope, claim.key)
    if record is None:
        # An operator has discarded it in this very moment.
        raise InProgress(retry_after=RETRY_AFTER_SECONDS)
    return not_ended(record, path, *((RESPOND_ASYNC,) if is_wish else ()))


def _refuse_late(key: Key, hold: Hold, policy: Policy) -> Flow[None]:
    """Refuse a key that tells its own age and is past retention: its record may have been reaped, its effect not."""
    if policy.late != "refuse" or key.made_at is None:
        return
    if key.is_late((yield from Now()), policy.retention):
        yield from release(hold, policy, "past retention")
        raise KeyExpired

"""One operation whose key is known, from its claim to its end. The order of I/O is the promise, so it is written here
once, for whatever comes in by any door.

What comes after the claim is in ``handle.py``, and in ``atomic.py`` where claim and ending are one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from semel.core.commands import Again, Claim, Flow, Now, TakeOver, Tell
from semel.core.decision import RETRY_AFTER_SECONDS, Refuse, Replay, Run, decide
from semel.core.events import StoreFailed, TookOver
from semel.core.fingerprint import Subject
from semel.core.key import Key
from semel.core.message import Answer, Head, Request
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.recovery import Progress
from semel.core.replay import replayed
from semel.errors import InProgress, Interrupted, KeyExpired, StoreError, StoreUnavailable
from semel.flows.atomic import run_atomically
from semel.flows.handle import note, progress_of, release, run_handler
from semel.flows.reply import Reply, Send

#: How often a claim looks again when rivals keep moving the record under its eyes.
CLAIM_TRIES = 5


def guard(
    key: Key, scope: str, subject: Subject, policy: Policy, *, token: bytes, principal: str, notes_replays: bool = False
) -> Flow[Reply]:
    """Guard one operation. *token* is random and names this attempt alone. What it refuses, it raises."""
    claim = claim_on(key, scope, subject, policy, token=token, principal=principal)
    if policy.mode == "atomic":
        return (yield from run_atomically(key, claim, subject, policy, notes_replays=notes_replays))
    got = yield from _claim(key, claim, subject, policy, notes_replays=notes_replays)
    if isinstance(got, Answer):
        return Send(got)
    return (yield from run_handler(key, got.hold, got.progress, policy))


@dataclass(frozen=True, slots=True)
class _Held:
    """The key is ours, and the operation has come so far."""

    hold: Hold
    progress: Progress


def claim_on(key: Key, scope: str, subject: Subject, policy: Policy, *, token: bytes, principal: str) -> Claim:
    """Return the claim of this attempt on its key."""
    fingerprint = policy.fingerprint.of(subject) if policy.fingerprint else b""
    # A key that tells its own age can be refused without a record.
    leaves_tombstone = policy.late == "refuse" and key.made_at is None
    head = Head(subject.method, subject.path, subject.query, tuple(subject.headers))
    return Claim(
        scope,
        key.value,
        token,
        fingerprint,
        policy.lease,
        policy.retention,
        policy.on_crash,
        "strip" if leaves_tombstone else "delete",
        Request(head, bytes(subject.body), principal) if policy.store_request else None,
    )


def _claim(key: Key, claim: Claim, subject: Subject, policy: Policy, *, notes_replays: bool) -> Flow[_Held | Answer]:
    """Get hold of the key, or the answer to give instead."""
    by_token = Hold(claim.scope, claim.key, 0, claim.token)
    is_held = False
    try:
        for _ in range(CLAIM_TRIES):
            seen = yield from claim
            got: Hold | Answer | Again
            if isinstance(seen, Found):
                got = yield from _judge(seen, claim, subject, policy, notes_replays=notes_replays)
            else:
                got = seen
            if isinstance(got, Hold):
                is_held = True
                yield from _refuse_late(key, got, policy)
                return _Held(got, (yield from progress_of(got)))
            if isinstance(got, Answer):
                return got
    except Interrupted:
        # Nothing has run: let the next request have the key at once, whether or not the claim got through.
        yield from release(by_token)
        raise
    except StoreError as error:
        yield from Tell(StoreFailed(key.short(), str(error)))
        if is_held or (isinstance(error, StoreUnavailable) and error.was_sent):
            yield from release(by_token)
        raise
    # Rivals were quicker each time; or the replies were lost, and the key is ours without our knowing.
    yield from release(by_token)
    raise InProgress(retry_after=RETRY_AFTER_SECONDS)


def _judge(
    found: Found, claim: Claim, subject: Subject, policy: Policy, *, notes_replays: bool
) -> Flow[Hold | Answer | Again]:
    """Decide about a key that was there before this request."""
    seen = Hold(claim.scope, claim.key, found.attempt, found.token)
    if found.token == claim.token:
        # The reply to this very claim was lost on its way: the record bears our token.
        return seen
    recipe = policy.fingerprint
    is_same = recipe is None or recipe.matches(found.fingerprint, claim.fingerprint, subject)
    match decide(found, policy, is_same_request=is_same):
        case Replay(answer):
            if notes_replays:
                yield from note(seen, "replayed")
            return replayed(answer, policy)
        case Refuse(refusal):
            raise refusal
        case Run():
            got = yield from TakeOver(claim, seen)
            if isinstance(got, Hold) and got.attempt > 1:
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
        yield from release(hold)
        raise KeyExpired

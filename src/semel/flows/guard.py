"""One operation with a known key, from its claim to its end. The order of I/O is the promise, so it is written here
once, for every entry point.

What comes after the claim is in ``handle.py``, and in ``atomic.py`` where claim and ending are one transaction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from semel.core.commands import Again, Claim, Look, Now, TakeOver
from semel.core.decision import RETRY_AFTER_SECONDS, Accepted, Busy, Refuse, Replay, Run, decide
from semel.core.events import StoreFailed, TookOver
from semel.core.fingerprint import Subject, fingerprint_of, is_same_request
from semel.core.message import Answer, Head, Request, request_of
from semel.core.policy import Policy
from semel.core.preference import Preferences, preferences_of
from semel.core.record import Found, Hold
from semel.core.recovery import Progress
from semel.core.replay import ended_with, replayed
from semel.core.state import State
from semel.core.status import not_ended
from semel.core.value import value
from semel.errors import InProgress, Interrupted, KeyExpired, StoreError, StoreReadOnly, StoreUnavailable
from semel.flows.atomic import run_atomically
from semel.flows.handle import note, progress_of, release, run_handler
from semel.flows.identify import Asked
from semel.flows.ports import GuardPorts
from semel.flows.reply import Reply, Send
from semel.flows.waiting import LeftWaiting, applied, wait

#: How often a claim looks again when rivals keep changing the record meanwhile.
CLAIM_TRIES = 5

#: Said with a 202 to a client that has asked for it.
RESPOND_ASYNC = (b"preference-applied", b"respond-async")


async def guard(
    ports: GuardPorts, asked: Asked, token: bytes, *, notes_replays: bool = False, status_path: str | None = None
) -> Reply:
    """Guard one operation. *token* is random and names this attempt alone. What it refuses, it raises.

    *status_path* is where the state of operations can be asked for; without it, none is accepted to be run later.
    """
    policy, subject = asked.policy, asked.subject
    wishes = preferences_of(subject.headers)
    wants_async = status_path is not None and wishes.respond_async and "respond-async" in policy.preferences
    is_accepted = status_path is not None and (policy.in_progress == "accept" or wants_async)
    request = request_of(subject.method, subject.path)
    claim = claim_on(asked, token, request=request, is_accepted=is_accepted)
    if policy.mode == "atomic":
        return await run_atomically(ports, asked, claim, wishes, notes_replays=notes_replays)
    got = await _claim(ports, _Seeker(asked, claim, wishes, wants_async, notes_replays))
    if isinstance(got, _Held):
        return await run_handler(ports, asked.key, got.hold, got.progress, policy, request=request)
    if isinstance(got, Answer):
        return Send(got, ended_with(got))
    if status_path is None:
        # Accepted through another entry point, or by an older policy.
        raise InProgress(retry_after=RETRY_AFTER_SECONDS)
    return Send(await _accepted(ports, claim, status_path, is_wish=wants_async), "accepted")


@value
class _Seeker:
    """A request that asks for a key."""

    asked: Asked
    claim: Claim
    wishes: Preferences
    prefers_202: bool
    notes_replays: bool


@value
class _Won:
    """The key belongs to this request."""

    hold: Hold
    #: A worker is to run it: it was stored as pending.
    is_pending: bool


@value
class _Held:
    """The key belongs to this request, and the operation has come so far."""

    hold: Hold
    progress: Progress


def claim_on(asked: Asked, token: bytes, *, request: str, is_accepted: bool = False) -> Claim:
    """Return the claim of this attempt on its key."""
    policy, subject = asked.policy, asked.subject
    is_late_refused = policy.late == "refuse"
    is_stored = policy.store_request or is_accepted
    return Claim(
        asked.scope,
        asked.key.value,
        token,
        fingerprint_of(policy.fingerprint, subject),
        policy.lease,
        policy.retention,
        policy.on_crash,
        "strip" if is_late_refused else "delete",
        _request(subject, asked.principal, policy) if is_stored else None,
        is_accepted,
        # A key that tells its own age can be refused without a record, unless its client's clock was ahead.
        asked.key.made_at if is_late_refused else None,
        request,
    )


def _request(subject: Subject, principal: str, policy: Policy) -> Request:
    headers = tuple(pair for pair in subject.headers if policy.stores_header(pair[0]))
    head = Head(subject.method, subject.path, subject.query, headers, subject.mount)
    return Request(head, bytes(subject.body), principal)


async def _claim(ports: GuardPorts, seeker: _Seeker) -> _Held | Answer | Accepted:
    """Get hold of the key, or the answer to give instead."""
    asked, claim = seeker.asked, seeker.claim
    policy, won = asked.policy, None
    try:
        got = await _seek(ports, seeker)
        if isinstance(got, _Won):
            won = got.hold
            if policy.late == "refuse":
                await _refuse_late(ports, asked, won)
            if got.is_pending:
                return Accepted()
            return _Held(won, Progress() if won.attempt == 1 else await progress_of(ports, won))
        if not isinstance(got, Again):
            return got
    except LeftWaiting:
        raise
    except Interrupted:
        # Nothing has run: let the next request have the key at once, whether or not the claim got through.
        await release(ports, Hold(claim.scope, claim.key, 0, claim.token), policy)
        raise
    except StoreError as error:
        if isinstance(error, StoreUnavailable | StoreReadOnly):
            ports.saw_outage()
        ports.tell(StoreFailed(asked.key.short(), str(error)))
        if won is not None or (isinstance(error, StoreUnavailable) and error.was_sent):
            await release(ports, Hold(claim.scope, claim.key, 0, claim.token), policy)
        raise
    # Rivals were quicker each time; or the replies were lost, and the key is ours without our knowing.
    await release(ports, Hold(claim.scope, claim.key, 0, claim.token), policy)
    raise InProgress(retry_after=RETRY_AFTER_SECONDS)


async def _seek(ports: GuardPorts, seeker: _Seeker) -> _Won | Answer | Again | Accepted:
    """Ask for the key until it is clear who holds it, and wait for its holder to end where that is wanted."""
    claim, policy = seeker.claim, seeker.asked.policy
    has_waited = False
    told: Found | Again = Again.AGAIN
    tries = CLAIM_TRIES
    while tries:
        seen = await ports.claim(claim) if isinstance(told, Again) else told
        if isinstance(seen, Hold):
            return _Won(seen, claim.is_accepted)
        got: _Won | Answer | Again | Busy | Accepted = (
            seen
            if isinstance(seen, Again)
            else await _judge(ports, seen, seeker, is_news=has_waited and isinstance(told, Again))
        )
        match got:
            case Answer():
                return applied(got, policy, seeker.wishes) if has_waited else got
            case _Won() | Accepted():
                return got
            case Busy() if seeker.prefers_202:
                return Accepted()
            case Busy():
                told = await wait(ports, claim.scope, claim.key, policy, seeker.wishes)
                has_waited = True
            case Again():
                told = got
                tries -= 1
            case never:  # pragma: no cover - mypy proves that nothing is left
                assert_never(never)
    return Again.AGAIN


async def _judge(  # noqa: C901 - all that is decided about a key that was found, in one place
    ports: GuardPorts, found: Found, seeker: _Seeker, *, is_news: bool
) -> _Won | Answer | Again | Busy | Accepted:
    """Decide about a key that was there before this request; *is_news* to other waiters, if it has ended."""
    asked, claim = seeker.asked, seeker.claim
    policy = asked.policy
    if found.state is State.PROCESSING and found.lease_is_over:
        found = _unless_kept(ports, claim, found)
    # The reply to this very claim may have been lost on its way: then the record bears our token.
    is_own = found.token == claim.token and found.state in {State.PENDING, State.PROCESSING}
    if is_own and (found.state is State.PENDING or not found.lease_is_over):
        return _Won(Hold(claim.scope, claim.key, found.attempt, found.token), found.state is State.PENDING)
    is_same = is_same_request(policy.fingerprint, found.fingerprint, claim.fingerprint, asked.subject)
    # Our own lease has run out, and nothing has run under it: it is taken over, as a rival might do at this moment.
    decision = Run() if is_own else decide(found, policy, is_same_request=is_same)
    if is_news and isinstance(decision, Replay | Refuse):
        ports.announce(claim.scope, claim.key, found)
    match decision:
        case Replay(answer):
            if seeker.notes_replays:
                await note(ports, Hold(claim.scope, claim.key, found.attempt, found.token), "replayed")
            return replayed(answer, policy)
        case Refuse(refusal):
            raise refusal
        case Busy() | Accepted() as outcome:
            return outcome
        case Run():
            # One that has begun as an ordinary request, and did not expire, is no worker's: it has to be run here.
            wanted = claim if found.is_expired else replace(claim, is_accepted=False)
            seen = Hold(claim.scope, claim.key, found.attempt, found.token)
            got = await ports.take_over(TakeOver(wanted, seen))
            if isinstance(got, Again):
                return got
            if got.attempt > 1:
                ports.tell(TookOver(asked.key.short(), got.attempt))
            return _Won(got, wanted.is_accepted)
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _unless_kept(ports: GuardPorts, claim: Claim, found: Found) -> Found:
    """Return what was *found*, as busy where its worker lives, or may: the store was away when its lease was to be
    renewed.
    """
    is_kept = ports.is_kept(Hold(claim.scope, claim.key, found.attempt, found.token))
    return replace(found, lease_is_over=False) if is_kept else found


async def _accepted(ports: GuardPorts, claim: Claim, path: str, *, is_wish: bool) -> Answer:
    """Say where the state of this operation can be asked for."""
    record = await ports.ask(Look(claim.scope, claim.key))
    if record is None:
        # An operator has discarded it in this very moment.
        raise InProgress(retry_after=RETRY_AFTER_SECONDS)
    return not_ended(record, path, *((RESPOND_ASYNC,) if is_wish else ()))


async def _refuse_late(ports: GuardPorts, asked: Asked, hold: Hold) -> None:
    """Refuse a key that tells its own age and is past retention: its record may have been reaped, its effect not."""
    key, policy = asked.key, asked.policy
    if key.made_at is not None and key.is_late(await ports.ask(Now()), policy.retention):
        await release(ports, hold, policy, "past retention")
        raise KeyExpired

"""A handler's writes and its record in one commit. Here a transaction is held open while the handler runs.

There is no lease and no sweeper: the database ends the transaction of a process that dies, and nothing has happened.
That is why this flow, unlike the others, may hold a transaction across a yield; whatever ends it early undoes it.
"""

from __future__ import annotations

from typing import assert_never

from semel.core.commands import Again, Begin, Claim, Finish, Now, Settle, Verdict
from semel.core.decision import Accepted, Busy, Refuse, Replay, Run, decide
from semel.core.events import NotKept, NotStored, StoreFailed, TookOver
from semel.core.fingerprint import is_same_request
from semel.core.handler import Ending, Raised, RunHandler, Streaming
from semel.core.key import Key
from semel.core.message import Answer, request_of
from semel.core.policy import Policy
from semel.core.preference import NONE as NO_PREFERENCES
from semel.core.preference import Preferences
from semel.core.record import Found, Hold
from semel.core.recovery import check_end, read_back
from semel.core.replay import Free, Keep, ended_with, replayed
from semel.core.state import TERMINAL, Event
from semel.errors import (
    AnswerNotStored,
    CommitUnknown,
    KeyExpired,
    SemelError,
    StoreError,
    StoreUnavailable,
)
from semel.flows.handle import COMPLETE_PAUSES, Ran, handler_ran, note, reply_to, tell_fenced, weigh
from semel.flows.identify import Asked
from semel.flows.ports import GuardPorts
from semel.flows.reply import Reply, Send
from semel.flows.waiting import applied, wait


async def run_atomically(
    ports: GuardPorts, asked: Asked, claim: Claim, wishes: Preferences = NO_PREFERENCES, *, notes_replays: bool = False
) -> Reply:
    """Guard one request in the application's own transaction."""
    key, policy = asked.key, asked.policy
    try:
        seen, got = await _begin(ports, asked, claim, wishes)
        if isinstance(got, Answer):
            if notes_replays and (replayed_hold := _hold_of(seen, claim)) is not None:
                await note(ports, replayed_hold, "replayed")
            return Send(got, ended_with(got))
        before = None if seen is got else _hold_of(seen, claim)
        if policy.late == "refuse":
            await _refuse_late(ports, key, policy)
        if got.attempt > 1:
            ports.tell(TookOver(key.short(), got.attempt))
        request = request_of(asked.subject.method, asked.subject.path)
        limit, time = policy.max_response_body, policy.max_held
        ending = await ports.run_handler(RunHandler(got, None, limit, request=request, max_response_time=time))
        return await _end(ports, asked, claim, got, ending, before=before)
    except StoreError as error:
        await ports.undo()
        if not isinstance(error, AnswerNotStored):  # Of that, people know already.
            ports.tell(StoreFailed(key.short(), str(error)))
        raise
    except Exception:
        # Whatever it was, nothing of this may be left open; where the transaction has ended this does nothing.
        await ports.undo()
        raise


async def _begin(
    ports: GuardPorts, asked: Asked, claim: Claim, wishes: Preferences
) -> tuple[Hold | Found, Hold | Answer]:
    """Get the key's lock, with an open transaction, or the answer to give instead, with none."""
    policy, has_waited = asked.policy, False
    told: Found | Again = Again.AGAIN
    while True:
        seen = await ports.begin(Begin(claim)) if isinstance(told, Again) else told
        is_news = has_waited and isinstance(told, Again)
        got = _judge(ports, seen, asked, claim, is_news=is_news) if isinstance(seen, Found) else seen
        if isinstance(got, Hold) and isinstance(told, Again):
            return seen, got
        await ports.undo()
        if isinstance(got, Answer):
            return seen, applied(got, policy, wishes) if has_waited else got
        if isinstance(got, Hold):
            # Another has seen that it may be taken over, in a transaction that was not ours.
            told = Again.AGAIN
            continue
        told = await wait(ports, claim.scope, claim.key, policy, wishes)
        has_waited = True


def _judge(ports: GuardPorts, found: Found, asked: Asked, claim: Claim, *, is_news: bool) -> Hold | Answer | Busy:
    """Decide about a key that was there before this request; *is_news* to others who wait for it, if it has ended."""
    policy = asked.policy
    is_same = is_same_request(policy.fingerprint, found.fingerprint, claim.fingerprint, asked.subject)
    decision = decide(found, policy, is_same_request=is_same)
    if is_news and isinstance(decision, Replay | Refuse):
        ports.announce(claim.scope, claim.key, found)
    match decision:
        case Replay(answer):
            return replayed(answer, policy)
        case Refuse(refusal):
            raise refusal
        case Busy() | Accepted():
            # Accepted by a policy of another day: a worker has it, and it is in progress all the same.
            return Busy()
        case Run():
            if found.is_expired:
                return Hold(claim.scope, claim.key, 1, claim.token)
            # A handler in one transaction takes no steps, so it can't go on from any: it would do them again.
            check_end(read_back(found.steps), ())
            return Hold(claim.scope, claim.key, found.attempt + 1, claim.token)
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _hold_of(seen: Hold | Found, claim: Claim) -> Hold | None:
    """Return the hold of the record that was there before, where there was one."""
    return Hold(claim.scope, claim.key, seen.attempt, seen.token) if isinstance(seen, Found) else None


async def _refuse_late(ports: GuardPorts, key: Key, policy: Policy) -> None:
    """Refuse a key that tells its own age and is past retention: its record may have been reaped, its effect not."""
    if key.made_at is not None and key.is_late(await ports.ask(Now()), policy.retention):
        raise KeyExpired


async def _end(
    ports: GuardPorts, asked: Asked, claim: Claim, hold: Hold, ending: Ending, *, before: Hold | None
) -> Reply:
    """Commit what the handler wrote together with its answer, or undo it."""
    key, policy = asked.key, asked.policy
    if not isinstance(ending, Ran):
        # First of all: whatever is written of it elsewhere would wait for this transaction.
        await ports.undo()
    ran = await handler_ran(ports, key, hold, ending, is_undone=True)
    ran, verdict = weigh(ran, policy)
    match verdict:
        case Free():
            await ports.undo()
        case Keep(event, answer):
            if event is Event.FAIL:
                # The policy keeps server errors; what the handler wrote before it failed is not kept with them.
                await ports.undo()
                await _begin_again(ports, key, claim, hold, before)
            if isinstance(ran, Streaming):
                ports.tell(NotKept(key.short(), ran.status))
            try:
                await _finish(ports, key, Finish(claim, hold, before, event, answer, policy.gives_hints))
            except SemelError:
                raise
            except Exception as error:  # noqa: BLE001 - the application's own: a constraint that is checked at COMMIT
                await ports.undo()
                return reply_to(ports, key, Raised(error, no_effect=True), Free(), policy)
        case unheard:  # pragma: no cover - mypy proves that nothing is left
            assert_never(unheard)
    return reply_to(ports, key, ran, verdict, policy)


async def _begin_again(ports: GuardPorts, key: Key, claim: Claim, hold: Hold, before: Hold | None) -> None:
    """Take the key's lock in another transaction, where the first was undone; refuse if a rival came in between."""
    seen = await ports.begin(Begin(claim))
    is_running = isinstance(seen, Found) and not seen.lease_is_over
    if is_running or _hold_of(seen, claim) != before:
        await ports.undo()
        await tell_fenced(ports, key, hold)


async def _finish(ports: GuardPorts, key: Key, command: Finish) -> None:
    hold = command.hold
    try:
        verdict = await ports.finish(command)
    except CommitUnknown as error:
        verdict = await _settled(ports, key, hold, error)
    except AnswerNotStored as error:
        # Committed here, and perhaps not where it has to be to survive this server.
        ports.tell(NotStored(key.short(), hold.attempt, str(error)))
        raise
    if verdict is Verdict.FENCED:
        await tell_fenced(ports, key, hold)


async def _settled(ports: GuardPorts, key: Key, hold: Hold, unknown: CommitUnknown) -> Verdict:
    """Find out what became of a COMMIT without a reply: the record bears this attempt's token, or it does not."""
    for pause in (*COMPLETE_PAUSES, None):
        try:
            record = await ports.ask(Settle(hold))
        except StoreError as error:
            if pause is None:
                ports.tell(NotStored(key.short(), hold.attempt, str(error)))
                raise AnswerNotStored from error
            await ports.pause(pause)
        else:
            if record is not None and record.token == hold.token and record.state in TERMINAL:
                return Verdict.DONE
            # The handler's writes went with the record: nothing has happened.
            raise StoreUnavailable(f"The transaction was rolled back: {unknown}")
    raise AssertionError  # pragma: no cover - the last round returned or raised

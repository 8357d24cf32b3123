"""A handler's run under a hold, and what becomes of its answer: stored first, and only then let go.

For a request that has just claimed its key, and for an operation that is finished without its client.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import assert_never

from semel.core.commands import Complete, Look, Note, Release, Save, Verdict
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.encrypted import is_marked_result
from semel.core.events import AnswerLost, Fenced, LostLease, NotKept, NotStored, StoreFailed
from semel.core.handler import Answered, Ending, Lost, NotStarted, Parked, Raised, RunHandler, Streaming
from semel.core.key import Key
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.record import Hold
from semel.core.recovery import Done, Progress, read_back
from semel.core.replay import Free, Keep, judge
from semel.core.state import Event
from semel.errors import (
    AnswerNotStored,
    InProgress,
    NoEffect,
    OperationUnfinished,
    OutcomeUnknown,
    SecretMissing,
    ShuttingDown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from semel.flows.ports import GuardPorts, Ports
from semel.flows.reply import PassOn, Reply, Reraise, Send

#: Smaller answers are not what a statement takes long for.
LARGE_ANSWER = 256 * 1024

#: The handler has run, and only its answer is missing: worth trying for as long as a fail-over of a pooler takes.
COMPLETE_PAUSES = (timedelta(milliseconds=50), timedelta(milliseconds=250), timedelta(seconds=1))

STORE_RETRY_AFTER_SECONDS = 2
#: A restart, most likely: the next server is up in a moment.
SHUTDOWN_RETRY_AFTER_SECONDS = 2

#: What stopped the handler (a provider that does not answer, most likely) is seldom over within one second.
UNFINISHED_RETRY_AFTER_SECONDS = 2

#: For the log, and for the client.
RECORD_GONE = "its record is gone: the store has lost it, or an operator has freed the key"
_RECORD_GONE = "This operation may have taken effect, and its record is gone. Find out what it did before you retry."

Ran = Answered | Streaming | Raised


async def progress_of(ports: GuardPorts, hold: Hold) -> Progress:
    """Read how far the operation has come that was just taken over; a first attempt has nothing to go on from.

    What was seen before the take-over may be out of date: until then its last holder, who was only slow, could commit
    one more step. From then on it can't.
    """
    if hold.attempt == 1:
        return Progress()
    record = await ports.ask(Look(hold.scope, hold.key))
    if record is None or (record.attempt, record.token) != (hold.attempt, hold.token):
        raise InProgress(retry_after=RETRY_AFTER_SECONDS)
    progress = read_back(record.steps)
    if any(isinstance(step, Done) and is_marked_result(step.result) for step in progress.steps):
        raise SecretMissing
    return progress


async def run_handler(
    ports: GuardPorts,
    key: Key,
    hold: Hold,
    progress: Progress,
    policy: Policy,
    *,
    request: str = "",
) -> Reply:
    """Run the handler, store its answer, and only then let the answer go."""
    limit, time = policy.max_response_body, policy.max_response_time
    ending = await ports.run_handler(RunHandler(hold, policy.lease, limit, progress, request, time))
    return await end(ports, key, hold, ending, policy)


async def end(
    ports: GuardPorts, key: Key, hold: Hold, ending: Ending, policy: Policy, *, is_accepted: bool = False
) -> Reply:
    """Store how the handler ended, or free its key; return what the client gets.

    What a router answers by itself (no such path) is the end of an operation that *is accepted*: there is no client
    with a retry that would bring another answer.
    """
    if isinstance(ending, NotStarted):
        await release(ports, hold, policy, "shutting down")
    ended = ending if isinstance(ending, Ran) else await handler_ran(ports, key, hold, ending, is_undone=False)
    if is_accepted and isinstance(ended, Answered):
        ended = replace(ended, reached_handler=True)
    ran, verdict = weigh(ended, policy)
    match verdict:
        case Free():
            freeing = Release(hold, wakes=policy.gives_hints, reason=_reason(ran))
            if ended.unsaved is None or await _is_saved(ports, key, ended.unsaved, freeing, policy.lease):
                with suppress(StoreError):
                    await ports.ask(freeing)
        case Keep(event, answer):
            if isinstance(ran, Streaming):
                ports.tell(NotKept(key.short(), ran.status))
            command = Complete(hold, event, answer, policy.gives_hints)
            if (await _complete(ports, key, command, policy.lease)) is Verdict.FENCED:
                if await is_gone(ports, hold):
                    ports.tell(AnswerLost(key.short(), hold.attempt, RECORD_GONE))
                    raise OutcomeUnknown(_RECORD_GONE)
                await tell_fenced(ports, key, hold)
        case unheard:  # pragma: no cover - mypy proves that nothing is left
            assert_never(unheard)
    return reply_to(ports, key, ran, verdict, policy)


async def handler_ran(ports: GuardPorts, key: Key, hold: Hold, ending: Ending, *, is_undone: bool) -> Ran:
    """Return how the handler ended, where it ran to an end of its own; refuse otherwise. Say whether what it did *is
    undone*.
    """
    match ending:
        case Lost(has_run):
            ports.tell(LostLease(key.short(), hold.attempt))
            await note(ports, hold, "stopped")
            if has_run and not is_undone and await is_gone(ports, hold):
                raise OutcomeUnknown(_RECORD_GONE)
            # The worker that took over runs the operation now, or has; a retry will get that answer.
            raise InProgress(retry_after=RETRY_AFTER_SECONDS)
        case Parked():
            raise OutcomeUnknown
        case NotStarted():
            raise ShuttingDown(retry_after=SHUTDOWN_RETRY_AFTER_SECONDS)
        case _:
            return ending


def weigh(ran: Ran, policy: Policy) -> tuple[Ran, Keep | Free]:
    """Judge how the handler ended; it may not end an operation before it has taken all stored steps."""
    verdict = judge(ran, policy)
    if ran.skipped is None or isinstance(verdict, Free):
        return ran, verdict
    # It ended before it had come to where the operation is already. A failure says nothing of the operation then, and
    # is not kept, whatever the policy; an answer would be a wrong one, and is not even sent.
    return (ran if verdict.event is Event.FAIL else Raised(ran.skipped, no_effect=True, has_steps=True)), Free()


def reply_to(ports: GuardPorts, key: Key, ran: Ran, verdict: Keep | Free, policy: Policy) -> Reply:
    """Return what the client gets for how the handler ended."""
    is_free = isinstance(verdict, Free)
    match ran:
        case Answered(answer):
            is_unfinished = is_free and ran.has_steps and _is_bare(answer)
            return Send(_unfinished(policy) if is_unfinished else answer, "freed" if is_free else "ran")
        case Streaming():
            return PassOn(outcome="freed" if is_free else "not_kept")
        case Raised(error):
            if isinstance(verdict, Keep):
                return Reraise(error, verdict.answer)
            if isinstance(error, StoreError) and (ran.no_effect or policy.mode == "atomic"):
                ports.tell(StoreFailed(key.short(), str(error)))
                error.retry_after = STORE_RETRY_AFTER_SECONDS
                # Half-way, a step may have charged a card: the client must not hear that nothing was run.
                return Send(_unfinished(policy) if ran.has_steps else refused(error, policy), "freed")
            if isinstance(error, NoEffect | InProgress):
                return Send(refused(type(error)(error.detail, retry_after=RETRY_AFTER_SECONDS), policy), "freed")
            # A bare 500 is final to most clients, and this one has only stopped half-way.
            return Reraise(error, _unfinished(policy) if ran.has_steps else None, "freed")
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def _unfinished(policy: Policy) -> Answer:
    return refused(OperationUnfinished(retry_after=UNFINISHED_RETRY_AFTER_SECONDS), policy)


def _is_bare(answer: Answer) -> bool:
    """Whether it is what a framework answers for an exception that it doesn't know: a page, or a line of text."""
    is_json = any(name == b"content-type" and b"json" in value for name, value in answer.headers)
    return answer.status == HTTPStatus.INTERNAL_SERVER_ERROR and not is_json


async def is_gone(ports: Ports, hold: Hold) -> bool:
    """Whether there is no record any more where a handler has run: no other worker has it, so none will answer. Nothing
    is stored in its place: an operator may have freed the key, and a store that lost it can't be told from that.
    """
    with suppress(StoreError):
        return await ports.ask(Look(hold.scope, hold.key)) is None
    return False


async def tell_fenced(ports: GuardPorts, key: Key, hold: Hold) -> None:
    """Say that this worker's ending was thrown away, and refuse: a retry will get the other's answer."""
    ports.tell(Fenced(key.short(), hold.attempt))
    await note(ports, hold, "fenced")
    raise InProgress(retry_after=RETRY_AFTER_SECONDS)


async def release(ports: GuardPorts, hold: Hold, policy: Policy, reason: str | None = None) -> None:
    """Free the key if the store can be reached; otherwise its lease will."""
    with suppress(StoreError):
        await ports.ask(Release(hold, wakes=policy.gives_hints, reason=reason))


def _reason(ran: Ran) -> str:
    """Say in a word why an attempt ended nothing. No message of an error: it may quote a customer's data."""
    if isinstance(ran, Raised):
        return f"raised {type(ran.error).__name__}"
    return f"answered {ran.answer.status if isinstance(ran, Answered) else ran.status}"


async def _is_saved(ports: GuardPorts, key: Key, save: Save, freeing: Release, lease: timedelta) -> bool:
    """Store the result of an effect, of which this run alone knows; where that fails again, keep it with the key."""
    try:
        return (await ports.ask(save)) is Verdict.DONE
    except StoreError as error:
        ports.tell(NotStored(key.short(), save.hold.attempt, str(error)))
        ports.keep(save.hold, (save, freeing), lease)
        return False


async def _complete(ports: GuardPorts, key: Key, command: Complete, lease: timedelta) -> Verdict:
    """Store the answer, patiently: the handler has run. If that fails the key is kept, never freed: this worker keeps
    the answer, too, and goes on trying behind its client's back.

    An answer that the store will not take, however often it is asked, is given up for a tombstone: the operation is
    done, and that must be stored above all, or it would be run again when its lease is over.
    """
    asked = command
    for pause in (*COMPLETE_PAUSES, None):
        try:
            verdict = await ports.ask(command)
        except StoreError as error:
            if pause is None:
                ports.tell(NotStored(key.short(), asked.hold.attempt, str(error)))
                # The whole of it: there may be room for it later.
                ports.keep(asked.hold, (replace(asked, wakes=False),), lease)
                raise AnswerNotStored from error
            command, tried = next_try(command, error), command
            if command.answer is tried.answer:
                await ports.pause(pause)
        else:
            if command.answer is not asked.answer:
                ports.tell(NotKept(key.short(), asked.answer.status))
            return verdict
    raise AssertionError  # pragma: no cover - the last round returned or raised


def next_try(command: Complete, error: StoreError) -> Complete:
    """Return what to ask the store next, which has failed to store an answer: less, where it would refuse it again."""
    if _is_hopeless(command, error):
        command = replace(command, answer=tombstone(command.answer))
    # Should it be the hint that the store objects to: the answer must not be lost for want of that.
    return replace(command, wakes=False)


def tombstone(answer: Answer) -> Answer:
    """Return what is left of an *answer* that can't be kept: a few bytes."""
    return Answer(answer.status, tuple([pair for pair in answer.headers if pair[0] == b"location"]), None)


def _is_hopeless(command: Complete, error: StoreError) -> bool:
    """Whether the store would refuse the same answer again."""
    size = len(command.answer.body or b"")
    if isinstance(error, StoreUnavailable):
        return size > 0 and (error.has_no_space or (error.was_too_slow and size > LARGE_ANSWER))
    return isinstance(error, StoreRefused) and size > 0 and not command.wakes


async def note(ports: GuardPorts, hold: Hold, event: str) -> None:
    """Leave a line in the trail. It is for people: that it can't be written changes nothing for the client."""
    with suppress(StoreError):
        await ports.ask(Note(hold, event))

"""One request whose writes and whose record are one commit: what it asks for, in what order, for every turn."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel.core.commands import Begin, Claim, Finish, Note, Now, Settle, Undo, Verdict
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.events import Fenced, LostLease, NotKept, NotStored, StoreFailed, TookOver
from semel.core.fingerprint import Subject
from semel.core.handler import Answered, Lost, NotStarted, Raised, RunHandler, Streaming
from semel.core.key import Key
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import NO_TOKEN, Found, Hold, Record
from semel.core.replay import MARKER
from semel.core.state import TERMINAL, Event, State
from semel.errors import (
    AnswerNotStored,
    CommitUnknown,
    Interrupted,
    NoEffect,
    RecoveryPointLost,
    StoreUnavailable,
)
from semel.flows.handle import COMPLETE_PAUSES
from semel.flows.reply import PassOn, Reply, Reraise, Send
from semel.flows.serve import serve
from tests.kit.ports import PORTS, NameScope, Pause, ReadBody, Tell
from tests.kit.script import Line, Played, play

ATOMIC = Policy(mode="atomic")
KEEPS = Policy(mode="atomic", server_errors="keep")
LATE = Policy(mode="atomic", late="refuse")
TOKEN, OTHER_TOKEN = b"t" * 16, b"o" * 16
BODY = b'{"amount": 5}'
KEY, OLD = "key-1", "01890a5d-ac96-774b-bcce-b302099a8057"
SHORT = Key(KEY).short()
NOW = datetime(2025, 1, 1, tzinfo=UTC)
CREATED = Answer(201, ((b"location", b"/charges/1"), (b"set-cookie", b"s=1")), b'{"id": 1}')
KEPT = Answer(201, ((b"location", b"/charges/1"),), b'{"id": 1}')

HOLD = Hold("alice", KEY, 1, TOKEN)
SEEN = Hold("alice", KEY, 1, OTHER_TOKEN)
HEIR = Hold("alice", KEY, 2, TOKEN)

UNREACHABLE = StoreUnavailable("no route")
NO_REPLY = CommitUnknown("reset")

ASK: list[Line] = [(NameScope, "alice"), (ReadBody, BODY)]
UNDO: Line = (Undo, None)
TOLD: Line = (Tell, None)
DONE: Line = (Finish, Verdict.DONE)
BEGIN: list[Line] = [*ASK, (Begin, HOLD)]
RUN: list[Line] = [*BEGIN, (RunHandler, Answered(CREATED))]


def head(key: str = KEY) -> Head:
    return Head("POST", "/charges", b"", ((b"idempotency-key", key.encode()),))


def fingerprint(body: bytes = BODY) -> bytes:
    assert ATOMIC.fingerprint is not None
    return ATOMIC.fingerprint.of(Subject("POST", "/charges", b"", head().headers, body))


CLAIM = Claim("alice", KEY, TOKEN, fingerprint(), ATOMIC.lease, ATOMIC.retention, request_line="POST /charges")


def found(
    state: State = State.PROCESSING,
    *,
    body: bytes = BODY,
    token: bytes = OTHER_TOKEN,
    lease_is_over: bool = True,
    is_expired: bool = False,
) -> Found:
    answer = KEPT if state in TERMINAL else None
    return Found(state, 1, token, fingerprint(body), answer, lease_is_over=lease_is_over, is_expired=is_expired)


#: What a transaction is told while another holds the key's lock.
LOCKED = found(token=NO_TOKEN, lease_is_over=False)


def record(state: State, token: bytes = TOKEN) -> Record:
    is_over = state in TERMINAL
    return Record(
        scope="alice",
        key=KEY,
        state=state,
        attempt=1,
        token=token,
        fingerprint=b"",
        recovery_point=None,
        steps=None,
        answer=KEPT if is_over else None,
        created_at=NOW,
        lease_expires_at=None if is_over else NOW,
        completed_at=NOW if is_over else None,
        expires_at=NOW,
        lease_left=None,
        retention_left=timedelta(0),
    )


def played(script: list[Line], policy: Policy = ATOMIC, key: str = KEY) -> Played[Reply]:
    return play(serve(PORTS, head(key), policy, TOKEN), script)


def sent(reply: Reply) -> Answer:
    assert isinstance(reply, Send)
    return reply.answer


def refusal(reply: Reply) -> tuple[int, str, bytes | None]:
    """The status, the code and Retry-After of a refusal."""
    answer = sent(reply)
    return answer.status, json.loads(answer.body or b"")["code"], dict(answer.headers).get(b"retry-after")


BUSY = (409, "idempotency-key-in-progress", b"%d" % RETRY_AFTER_SECONDS)


# A new key


def test_one_transaction_from_lock_to_answer() -> None:
    """Begin, run, write the record and commit, and only then reply. There is no claim and no lease."""
    assert played([*RUN, DONE]) == Played(
        (
            NameScope(),
            ReadBody(ATOMIC.max_request_body),
            Begin(CLAIM),
            RunHandler(HOLD, None, ATOMIC.max_response_body, request="POST /charges"),
            Finish(CLAIM, HOLD, None, Event.COMPLETE, KEPT),
        ),
        Send(CREATED),
    )


@pytest.mark.parametrize("status", [400, 402, 409, 422])
def test_refusal_of_the_handlers_commits(status: int) -> None:
    """A final 4xx is an outcome like any other: what the handler wrote is committed with it."""
    result = played([*BEGIN, (RunHandler, Answered(Answer(status))), DONE])
    assert result.commands[-1] == Finish(CLAIM, HOLD, None, Event.COMPLETE, Answer(status))
    assert result.result == Send(Answer(status))


@pytest.mark.parametrize("answer", [Answer(500), Answer(503), Answer(429), Answer(401)])
def test_not_final_undoes(answer: Answer) -> None:
    """A server error, or an answer that is not final, undoes what the handler wrote. It goes out as it is."""
    result = played([*BEGIN, (RunHandler, Answered(answer)), UNDO])
    assert result.result == Send(answer)


def test_router_refused_it() -> None:
    """What no handler saw is undone, whatever its status."""
    assert played([*BEGIN, (RunHandler, Answered(CREATED, reached_handler=False)), UNDO]).result == Send(CREATED)


def test_exception_undoes() -> None:
    """An exception undoes what the handler wrote, and passes."""
    error = OSError("half-way")
    assert played([*BEGIN, (RunHandler, Raised(error)), UNDO]).result == Reraise(error, None)


def test_no_effect() -> None:
    """NoEffect undoes, and the client may send it again."""
    result = played([*BEGIN, (RunHandler, Raised(NoEffect("Later."), no_effect=True)), UNDO])
    assert refusal(result.result) == (503, "no-effect", b"%d" % RETRY_AFTER_SECONDS)


def test_stream() -> None:
    """A stream is committed as a tombstone before any of it leaves."""
    result = played([*BEGIN, (RunHandler, Streaming(200, ())), TOLD, DONE])
    assert result.commands[-2:] == (
        Tell(NotKept(SHORT, 200)),
        Finish(CLAIM, HOLD, None, Event.COMPLETE, Answer(200, (), None)),
    )
    assert result.result == PassOn()


def test_stream_of_an_error_undoes() -> None:
    """A stream with a server error's status undoes, and flows."""
    assert played([*BEGIN, (RunHandler, Streaming(500, ())), UNDO]).result == PassOn()


# Server errors that the policy keeps


@pytest.mark.parametrize("ending", [Answered(Answer(500)), Raised(OSError())], ids=["answered", "raised"])
def test_error_is_kept_without_what_was_written(ending: Any) -> None:
    """Where errors are kept, what the handler wrote is undone first: a new transaction holds the error alone."""
    result = played([*BEGIN, (RunHandler, ending), UNDO, (Begin, HOLD), DONE], KEEPS)
    finish = result.commands[-1]
    assert isinstance(finish, Finish)
    assert (finish.event, finish.answer.status, finish.seen) == (Event.FAIL, 500, None)
    expected = Send(Answer(500)) if isinstance(ending, Answered) else Reraise(ending.error, finish.answer)
    assert result.result == expected


def test_error_in_the_place_of_a_dead_workers_record() -> None:
    """The second transaction must find what the first had found: the dead worker's record, and nobody else's."""
    failed: list[Line] = [(RunHandler, Answered(Answer(500))), UNDO]
    script: list[Line] = [*ASK, (Begin, found()), TOLD, *failed, (Begin, found()), DONE]
    assert played(script, KEEPS).commands[-1] == Finish(CLAIM, HEIR, SEEN, Event.FAIL, Answer(500))


@pytest.mark.parametrize(
    "before, after",
    [
        (HOLD, LOCKED),
        (HOLD, found(State.COMPLETE)),
        (found(), HOLD),
        (found(), found(State.COMPLETE, token=TOKEN)),
        (found(token=NO_TOKEN), LOCKED),
    ],
    ids=["locked", "ended", "gone", "another's", "locked, as if it were nobody's"],
)
def test_rival_between_the_two_transactions(before: Any, after: Any) -> None:
    """If a rival has come in between, the error is thrown away, and nothing is open when that is noted."""
    told: list[Line] = [TOLD] if isinstance(before, Found) else []
    failed: list[Line] = [*told, (RunHandler, Answered(Answer(500))), UNDO]
    fenced: list[Line] = [(Begin, after), UNDO, TOLD, (Note, None), UNDO]
    result = played([*ASK, (Begin, before), *failed, *fenced], KEEPS)
    hold = HEIR if told else HOLD
    assert result.commands[-3:-1] == (Tell(Fenced(SHORT, hold.attempt)), Note(hold, "fenced"))
    assert refusal(result.result) == BUSY


# A key that is there


@pytest.mark.parametrize("state", [State.COMPLETE, State.FAILED])
def test_replay(state: State) -> None:
    """A replay runs nothing, writes nothing, and leaves no transaction open."""
    result = played([*ASK, (Begin, found(state)), UNDO])
    assert result.result == Send(Answer(201, (*KEPT.headers, MARKER), KEPT.body))


def test_replay_is_noted_on_request() -> None:
    """A replay's line in the trail is written when the transaction is over: it would wait for it otherwise."""
    flow = serve(PORTS, head(), ATOMIC, TOKEN, notes_replays=True)
    result = play(flow, [*ASK, (Begin, found(State.COMPLETE)), UNDO, (Note, None)])
    assert result.commands[-1] == Note(SEEN, "replayed")
    assert sent(result.result).status == 201


@pytest.mark.parametrize("state", [State.PROCESSING, State.COMPLETE])
def test_another_request_under_the_same_key(state: State) -> None:
    """A different request under the same key is refused."""
    result = played([*ASK, (Begin, found(state, body=b"{}")), UNDO])
    assert refusal(result.result) == (422, "idempotency-key-reused", None)


@pytest.mark.parametrize("there", [LOCKED, found(lease_is_over=False)], ids=["a transaction", "a worker with a lease"])
def test_busy(there: Found) -> None:
    """While another runs it, in a transaction or under a lease, a second is told to wait."""
    assert refusal(played([*ASK, (Begin, there), UNDO, UNDO]).result) == BUSY


def test_another_request_while_the_first_runs() -> None:
    """A different request under a key whose first is still running is refused for good, not told to wait."""
    result = played([*ASK, (Begin, replace(LOCKED, fingerprint=fingerprint(b"{}"))), UNDO])
    assert refusal(result.result)[:2] == (422, "idempotency-key-reused")


def test_parked() -> None:
    """An operation that guard mode has parked is not run by atomic mode."""
    assert refusal(played([*ASK, (Begin, found(State.UNKNOWN)), UNDO]).result) == (409, "outcome-unknown", None)


def test_take_over_from_the_dead() -> None:
    """A dead worker's record is replaced by the finished one, if it is still the one that was seen."""
    result = played([*ASK, (Begin, found()), TOLD, (RunHandler, Answered(CREATED)), DONE])
    assert result.commands[3:] == (
        Tell(TookOver(SHORT, 2)),
        RunHandler(HEIR, None, ATOMIC.max_response_body, request="POST /charges"),
        Finish(CLAIM, HEIR, SEEN, Event.COMPLETE, KEPT),
    )


def test_refuse_after_a_crash() -> None:
    """With on_crash="refuse" a dead worker's operation is not run again."""
    result = played([*ASK, (Begin, found()), UNDO], Policy(mode="atomic", on_crash="refuse"))
    assert refusal(result.result)[:2] == (409, "outcome-unknown")


def test_late_retry_is_new() -> None:
    """An expired record is replaced by a first attempt, whatever it was a record of."""
    late = found(State.COMPLETE, body=b"{}", is_expired=True)
    result = played([*ASK, (Begin, late), (RunHandler, Answered(CREATED)), DONE])
    assert result.commands[-1] == Finish(CLAIM, HOLD, SEEN, Event.COMPLETE, KEPT)


def test_late_retry_is_refused() -> None:
    """With late="refuse" it is gone instead."""
    result = played([*ASK, (Begin, found(State.COMPLETE, is_expired=True)), UNDO], LATE)
    assert refusal(result.result)[:2] == (410, "idempotency-key-expired")


def test_key_that_tells_its_age() -> None:
    """A UUIDv7 from before the retention is refused without a record; a younger one runs."""
    hold = Hold("alice", OLD, 1, TOKEN)
    result = played([*ASK, (Begin, hold), (Now, NOW), UNDO], LATE, OLD)
    assert refusal(result.result)[:2] == (410, "idempotency-key-expired")
    made = Key(OLD).made_at
    assert made is not None
    script: list[Line] = [*ASK, (Begin, hold), (Now, made), (RunHandler, Answered(CREATED)), DONE]
    assert played(script, LATE, OLD).result == Send(CREATED)


def test_key_of_no_age_is_not_asked_for_one() -> None:
    """A key that does not tell its age costs no question about the time."""
    assert played([*RUN, DONE], LATE).result == Send(CREATED)


def test_steps_of_guard_mode_are_not_done_again() -> None:
    """A record with steps, left behind by a handler of phases, is a loud error: one transaction can't go on from it."""
    there = replace(found(), steps='[{"phase":"ride_created","result":7}]')
    with pytest.raises(RecoveryPointLost, match=r"Stored: ride_created\. In the code: none"):
        played([*ASK, (Begin, there), UNDO])
    expired = replace(there, is_expired=True)
    assert played([*ASK, (Begin, expired), (RunHandler, Answered(CREATED)), DONE]).result == Send(CREATED)


# The end fails


def test_fenced() -> None:
    """If somebody else has written the record, everything was rolled back, and the client gets the other's answer."""
    result = played([*RUN, (Finish, Verdict.FENCED), TOLD, (Note, None), UNDO])
    assert result.commands[-3:-1] == (Tell(Fenced(SHORT, 1)), Note(HOLD, "fenced"))
    assert refusal(result.result) == BUSY


@pytest.mark.parametrize("state", [State.COMPLETE, State.FAILED])
def test_lost_reply_and_it_was_committed(state: State) -> None:
    """A COMMIT whose reply was lost is resolved: the record bears this attempt's token, so the answer may leave."""
    result = played([*RUN, (Finish, NO_REPLY), (Settle, record(state))])
    assert result.commands[-1] == Settle(HOLD)
    assert result.result == Send(CREATED)


@pytest.mark.parametrize(
    "there",
    [None, record(State.COMPLETE, OTHER_TOKEN), record(State.PROCESSING)],
    ids=["nothing", "another's", "not ended"],
)
def test_lost_reply_and_it_was_rolled_back(there: Record | None) -> None:
    """If it does not, nothing has happened: the client is told to send it again."""
    result = played([*RUN, (Finish, NO_REPLY), (Settle, there), UNDO, TOLD])
    assert result.commands[-1] == Tell(StoreFailed(SHORT, "The transaction was rolled back: reset"))
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_lost_reply_is_resolved_patiently() -> None:
    """It is asked again, with pauses, for as long as a fail-over takes."""
    script: list[Line] = [
        *RUN,
        (Finish, NO_REPLY),
        (Settle, UNREACHABLE),
        (Pause, None),
        (Settle, UNREACHABLE),
        (Pause, None),
        (Settle, record(State.COMPLETE)),
    ]
    result = played(script)
    assert [each.duration for each in result.commands if isinstance(each, Pause)] == list(COMPLETE_PAUSES[:2])
    assert result.result == Send(CREATED)


def test_lost_reply_that_can_not_be_resolved() -> None:
    """If nobody can be asked, the answer stays here: it may be stored, it may not, and a retry will find out."""
    tries: list[Line] = [line for _ in COMPLETE_PAUSES for line in ((Settle, UNREACHABLE), (Pause, None))]
    result = played([*RUN, (Finish, NO_REPLY), *tries, (Settle, UNREACHABLE), TOLD, UNDO])
    assert result.commands[-2] == Tell(NotStored(SHORT, 1, "no route"))
    assert refusal(result.result)[:2] == (503, "answer-not-stored")


def test_replica_did_not_confirm() -> None:
    """A commit that may not survive this server is told of, and its answer stays here; a retry will get it."""
    result = played([*RUN, (Finish, AnswerNotStored("no standby")), TOLD, UNDO])
    assert result.commands[-2] == Tell(NotStored(SHORT, 1, "no standby"))
    assert refusal(result.result)[:2] == (503, "answer-not-stored")


def test_constraint_that_is_checked_at_the_commit() -> None:
    """An error of the application's own data at COMMIT is an exception of the handler's: undone, and raised."""
    error = ValueError("duplicate order")
    assert played([*RUN, (Finish, error), UNDO]).result == Reraise(error, None)


def test_store_fails_at_the_end() -> None:
    """If the record can't be written nothing has happened, for it would have been one commit."""
    result = played([*RUN, (Finish, UNREACHABLE), UNDO, TOLD])
    assert result.commands[-1] == Tell(StoreFailed(SHORT, "no route"))
    assert refusal(result.result)[:2] == (503, "store-unavailable")


# The rest


@pytest.mark.parametrize("script", [[(Begin, UNREACHABLE)], [(Begin, HOLD), (Now, UNREACHABLE)]], ids=["begin", "now"])
def test_unreachable_store_runs_nothing(script: list[Line]) -> None:
    """Without the store nothing runs: people are told, and the client is, too."""
    result = played([*ASK, *script, UNDO, TOLD], LATE, OLD)
    assert result.commands[-1] == Tell(StoreFailed(Key(OLD).short(), "no route"))
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_server_is_about_to_stop() -> None:
    """A handler that was not started leaves no transaction and no record."""
    result = played([*BEGIN, (RunHandler, NotStarted()), UNDO, UNDO])
    assert refusal(result.result)[:2] == (503, "shutting-down")


def test_stopped_in_the_middle() -> None:
    """A handler that was stopped is undone before anything is written of it: that would wait for its transaction."""
    result = played([*BEGIN, (RunHandler, Lost()), UNDO, TOLD, (Note, None), UNDO])
    assert result.commands[-3:-1] == (Tell(LostLease(SHORT, 1)), Note(HOLD, "stopped"))
    assert refusal(result.result) == BUSY


@pytest.mark.parametrize(
    "script",
    [
        [(Begin, Interrupted())],
        [(Begin, HOLD), (Now, Interrupted())],
        [(Begin, HOLD), (Now, datetime(2000, 1, 1, tzinfo=UTC)), (RunHandler, Interrupted())],
        [
            (Begin, HOLD),
            (Now, datetime(2000, 1, 1, tzinfo=UTC)),
            (RunHandler, Answered(CREATED)),
            (Finish, Interrupted()),
        ],
    ],
    ids=["begin", "now", "handler", "finish"],
)  # fmt: skip - one line each reads best
def test_interrupted(script: list[Line]) -> None:
    """Whoever goes away in the middle, at whichever step, leaves no transaction open."""
    with pytest.raises(Interrupted):
        played([*ASK, *script, UNDO], LATE, OLD)


def test_interrupted_while_settling() -> None:
    """The same while a COMMIT without a reply is resolved."""
    with pytest.raises(Interrupted):
        played([*RUN, (Finish, NO_REPLY), (Settle, Interrupted()), UNDO])

"""One guarded request: what it asks for, in what order, and what it answers, for every turn it can take."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

from semel.core.body_hash import BodyHash
from semel.core.commands import Again, Claim, Complete, Look, Note, Now, Release, Save, TakeOver, Verdict
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.encrypted import MARK
from semel.core.events import Fenced, LostLease, NotKept, NotStored, PersonalKey, StoreFailed, TookOver
from semel.core.fingerprint import Subject, fingerprint_of
from semel.core.handler import Answered, Lost, NotStarted, Parked, Raised, RunHandler, Streaming
from semel.core.key import Key
from semel.core.message import Answer, Head, Headers, Request
from semel.core.policy import MAX_RESPONSE_TIME, Policy
from semel.core.record import Found, Hold, Record
from semel.core.recovery import Begun, Done, Progress, written
from semel.core.replay import MARKER
from semel.core.state import Event, State
from semel.errors import (
    ConfigurationError,
    InProgress,
    Interrupted,
    NoEffect,
    RecoveryPointLost,
    ShuttingDown,
    StepUnfinished,
    StoreError,
    StoreNotReady,
    StoreRefused,
    StoreUnavailable,
)
from semel.flows.guard import CLAIM_TRIES
from semel.flows.handle import COMPLETE_PAUSES, LARGE_ANSWER, SHUTDOWN_RETRY_AFTER_SECONDS, STORE_RETRY_AFTER_SECONDS
from semel.flows.reply import PassOn, Reply, Reraise, Send
from semel.flows.serve import Around, serve
from tests.kit.ports import PORTS, Keep, NameScope, Pause, ReadBody, Tell
from tests.kit.script import Line, Played, play

POLICY = Policy()
NOW = datetime(2025, 1, 1, tzinfo=UTC)
TOKEN = b"t" * 16
OTHER_TOKEN = b"o" * 16
BODY = b'{"amount": 5}'
KEY = "key-1"
SHORT = Key(KEY).short()
CREATED = Answer(201, ((b"location", b"/charges/1"), (b"set-cookie", b"s=1")), b'{"id": 1}')
KEPT = Answer(201, ((b"location", b"/charges/1"),), b'{"id": 1}')

HOLD = Hold("alice", KEY, 1, TOKEN)
BY_TOKEN = Hold("alice", KEY, 0, TOKEN)
SEEN = Hold("alice", KEY, 1, OTHER_TOKEN)
HEIR = Hold("alice", KEY, 2, TOKEN)
STEPS = Progress((Done("phase", "ride_created", 7), Begun("charge_created")))

UNREACHABLE = StoreUnavailable("no route")
CUT_OFF = StoreUnavailable("reset", was_sent=True)

BEGIN: list[Line] = [(NameScope, "alice"), (ReadBody, BODY)]
RUN: list[Line] = [(RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)]


def head(key: str | None = KEY, method: str = "POST") -> Head:
    headers: Headers = () if key is None else ((b"idempotency-key", key.encode()),)
    return Head(method, "/charges", b"", headers)


def fingerprint(body: bytes = BODY, policy: Policy = POLICY) -> bytes:
    assert policy.fingerprint is not None
    return policy.fingerprint.of(Subject("POST", "/charges", b"", head().headers, body))


def found(
    state: State = State.PROCESSING,
    *,
    answer: Answer | None = None,
    token: bytes = OTHER_TOKEN,
    body: bytes = BODY,
    lease_is_over: bool = False,
    is_expired: bool = False,
) -> Found:
    return Found(state, 1, token, fingerprint(body), answer, lease_is_over=lease_is_over, is_expired=is_expired)


def record(hold: Hold, steps: Progress = Progress()) -> Record:  # noqa: B008 - a frozen value
    """What is there of an operation in progress."""
    return Record(
        scope=hold.scope,
        key=hold.key,
        state=State.PROCESSING,
        attempt=hold.attempt,
        token=hold.token,
        fingerprint=b"",
        recovery_point=steps.recovery_point,
        steps=written(steps),
        answer=None,
        created_at=NOW,
        lease_expires_at=NOW,
        completed_at=None,
        expires_at=NOW,
        lease_left=timedelta(0),
        retention_left=timedelta(0),
    )


def played(script: list[Line], policy: Policy = POLICY, key: str | None = KEY) -> Played[Reply]:
    return play(serve(PORTS, head(key), policy, TOKEN), script)


TAKE_OVER: list[Line] = [(TakeOver, HEIR), (Tell, None), (Look, record(HEIR))]


def sent(reply: Reply) -> Answer:
    assert isinstance(reply, Send)
    return reply.answer


def refusal(reply: Reply) -> tuple[int, str, bytes | None]:
    """The status, the code and Retry-After of a refusal."""
    answer = sent(reply)
    return answer.status, json.loads(answer.body or b"")["code"], dict(answer.headers).get(b"retry-after")


# Before the claim


def test_no_key_passes_through() -> None:
    """A request without a key is asked nothing and passes through, where a key is optional."""
    assert played([], key=None) == Played((), PassOn())


def test_no_key_where_one_is_required() -> None:
    """A request without a key is refused where one is required, before anybody is asked anything."""
    assert refusal(played([], Policy(required=True), key=None).result)[:2] == (400, "idempotency-key-missing")


def test_bad_key_is_never_no_key() -> None:
    """A key that can't be read is refused, even where keys are optional."""
    assert refusal(played([], key="a,b").result)[:2] == (400, "idempotency-key-invalid")


BY_BODY = Policy(key_from=BodyHash(fields=["amount"], window=timedelta(minutes=10)))
JSON = (b"content-type", b"application/json")
#: What is stored of a request that nothing but its key is compared of.
PLACE = fingerprint_of(None, Subject("POST", "/charges", b"", (), b""))


def test_key_is_made_of_the_body() -> None:
    """A request without a key gets one of its body: for the window, and without a fingerprint to compare."""
    asked = Head("POST", "/charges", b"", (JSON,))
    result = play(serve(PORTS, asked, BY_BODY, TOKEN), [*BEGIN, (Claim, UNREACHABLE), (Tell, None)])
    claim = result.commands[2]
    assert isinstance(claim, Claim)
    assert claim.key.startswith("body:")
    assert (claim.fingerprint, claim.retention) == (PLACE, timedelta(minutes=10))
    there = replace(found(State.COMPLETE, answer=KEPT, lease_is_over=True), fingerprint=PLACE)
    assert sent(play(serve(PORTS, asked, BY_BODY, TOKEN), [*BEGIN, (Claim, there)]).result).status == 201


def test_key_that_is_sent_wins() -> None:
    """A client that sends a key is guarded by it, as if no body could make one."""
    result = played([*BEGIN, (Claim, UNREACHABLE), (Tell, None)], BY_BODY)
    claim = result.commands[2]
    assert isinstance(claim, Claim)
    assert (claim.key, claim.retention, claim.fingerprint) == (KEY, BY_BODY.retention, fingerprint())


def test_body_that_makes_no_key_is_never_run() -> None:
    """A body that says nothing to make a key of is refused, though keys are optional."""
    assert refusal(played(BEGIN, BY_BODY, None).result)[:2] == (400, "idempotency-key-missing")


def test_keys_that_look_made_are_refused() -> None:
    """A client can't choose a key that would be taken for one of a body; without such keys it may."""
    assert refusal(played([], BY_BODY, "body:1").result)[:2] == (400, "idempotency-key-invalid")
    assert refusal(played([*BEGIN, (Claim, UNREACHABLE), (Tell, None)], key="body:1").result)[0] == 503


def test_personal_key_is_told_of() -> None:
    """A key that looks like an e-mail address works, and is warned about by its digest."""
    mail = "ada@example.org"
    play_on: list[Line] = [(Tell, None), *BEGIN, (Claim, found(State.COMPLETE, answer=KEPT, lease_is_over=True))]
    result = played(play_on, key=mail)
    assert result.commands[0] == Tell(PersonalKey(Key(mail).short()))
    assert sent(result.result).status == 201


def test_nobodys_request() -> None:
    """A request that belongs to nobody is refused before its body is read."""
    assert refusal(played([(NameScope, None)]).result)[:2] == (400, "idempotency-scope-missing")


def test_large_body() -> None:
    """A body over the limit is refused, and the limit is named."""
    policy = Policy(max_request_body=10)
    result = played([(NameScope, "alice"), (ReadBody, None)], policy)
    assert result.commands[-1] == ReadBody(10)
    assert refusal(result.result)[:2] == (413, "request-body-too-large")
    assert b"10 bytes" in (sent(result.result).body or b"")


# A new key


def test_new_key_runs_and_is_stored_before_it_is_sent() -> None:
    """Claim, run, store, and only then reply; the client gets every header, the store those that are repeated."""
    script: list[Line] = [*BEGIN, (Claim, HOLD), *RUN]
    assert played(script) == Played(
        (
            NameScope(),
            ReadBody(POLICY.max_request_body),
            Claim("alice", KEY, TOKEN, fingerprint(), POLICY.lease, POLICY.retention, request_line="POST /charges"),
            RunHandler(
                HOLD,
                POLICY.lease,
                POLICY.max_response_body,
                request="POST /charges",
                max_response_time=MAX_RESPONSE_TIME,
            ),
            Complete(HOLD, Event.COMPLETE, KEPT),
        ),
        Send(CREATED),
    )


def test_no_fingerprint() -> None:
    """A policy without a fingerprint stores only where a request was sent, and compares no body."""
    policy = Policy(fingerprint=None)
    script: list[Line] = [*BEGIN, (Claim, found(State.COMPLETE, answer=KEPT, body=b"other", lease_is_over=True))]
    result = played(script, policy)
    claim = result.commands[-1]
    assert isinstance(claim, Claim)
    assert claim.fingerprint == PLACE
    assert sent(result.result).status == 201


def test_not_final_frees_the_key() -> None:
    """An answer that is not final goes out as it is, and the key is freed."""
    answer = Answer(429, ((b"retry-after", b"3"),), b"slow down")
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Answered(answer)), (Release, Verdict.DONE)])
    assert (result.commands[-1], result.result) == (Release(HOLD), Send(answer))


def test_key_that_can_not_be_freed() -> None:
    """If freeing fails, the answer still goes out: the lease will free the key."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Answered(Answer(429))), (Release, UNREACHABLE)])
    assert result.result == Send(Answer(429))


def test_stream() -> None:
    """A stream is told of, its tombstone is stored, and then it flows."""
    streaming = Streaming(200, ((b"content-type", b"text/event-stream"),))
    script: list[Line] = [*BEGIN, (Claim, HOLD), (RunHandler, streaming), (Tell, None), (Complete, Verdict.DONE)]
    result = played(script)
    assert result.commands[-2:] == (
        Tell(NotKept(SHORT, 200)),
        Complete(HOLD, Event.COMPLETE, Answer(200, streaming.headers, None)),
    )
    assert result.result == PassOn()


def test_stream_that_is_not_final() -> None:
    """A stream whose status is not kept flows on, and its key is freed."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Streaming(408, ())), (Release, Verdict.DONE)])
    assert result.result == PassOn()


def test_exception_is_final() -> None:
    """A handler that raised may have had an effect: the failure is stored, and raised again after its answer."""
    error = OSError("half-way")
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Raised(error)), (Complete, Verdict.DONE)])
    complete = result.commands[-1]
    assert isinstance(complete, Complete)
    assert complete.event is Event.FAIL
    assert result.result == Reraise(error, complete.answer)
    assert complete.answer.status == 500


def test_exception_that_frees_the_key() -> None:
    """Where server errors free the key, the exception passes, and there is no answer of ours."""
    error = OSError("half-way")
    policy = Policy(server_errors="release")
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Raised(error)), (Release, Verdict.DONE)], policy)
    assert result.result == Reraise(error, None)


def test_no_effect() -> None:
    """A handler that says NoEffect frees the key, and the client may send it again."""
    raised = Raised(NoEffect("The card network is down."), no_effect=True)
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, raised), (Release, Verdict.DONE)])
    assert refusal(result.result) == (503, "no-effect", b"%d" % RETRY_AFTER_SECONDS)
    assert b"card network" in (sent(result.result).body or b"")


def test_store_trouble_inside_a_step() -> None:
    """A store that failed inside the first step is a refusal to be repeated, like one that failed before it."""
    raised = Raised(StoreUnavailable("It is away."), no_effect=True)
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, raised), (Release, Verdict.DONE), (Tell, None)])
    assert refusal(result.result) == (503, "store-unavailable", b"%d" % STORE_RETRY_AFTER_SECONDS)


def test_no_effect_where_errors_are_kept() -> None:
    """Where every error is kept, NoEffect is one: the first answer is the one that is stored, and no other."""
    raised = Raised(NoEffect(), no_effect=True)
    result = played(
        [*BEGIN, (Claim, HOLD), (RunHandler, raised), (Complete, Verdict.DONE)], Policy(server_errors="keep")
    )
    assert isinstance(result.result, Reraise)
    stored = result.commands[-1]
    assert isinstance(stored, Complete)
    assert result.result.answer == stored.answer


# A key that is there


@pytest.mark.parametrize("state", [State.COMPLETE, State.FAILED])
def test_replay_asks_for_nothing_more(state: State) -> None:
    """A replay is one statement: the claim that found it."""
    result = played([*BEGIN, (Claim, found(state, answer=KEPT, lease_is_over=True))])
    assert result.result == Send(Answer(201, (*KEPT.headers, MARKER), KEPT.body))


def test_tombstone() -> None:
    """A retry of what could not be kept is refused, and not run again."""
    tombstone = found(State.COMPLETE, answer=Answer(200, (), None), lease_is_over=True)
    assert refusal(played([*BEGIN, (Claim, tombstone)]).result)[:2] == (409, "response-not-replayable")


def test_busy() -> None:
    """While the first request runs, the second is told to wait: a moment, or, for a silent worker, its lease."""
    lease = POLICY.lease.total_seconds()
    for left, seconds in ((lease, b"1"), (lease * 0.6, b"1"), (lease * 0.5, b"%d" % (lease // 2)), (0.2, b"1")):
        there = replace(record(SEEN), lease_left=timedelta(seconds=left))
        busy: list[Line] = [*BEGIN, (Claim, found()), (Look, there)]
        assert refusal(played(busy).result) == (409, "idempotency-key-in-progress", seconds)


@pytest.mark.parametrize("seen", [None, UNREACHABLE])
def test_busy_and_gone(seen: object) -> None:
    """When to come back is a hint: where nothing can be found out about it, it is a moment."""
    result = played([*BEGIN, (Claim, found()), (Look, seen)]).result
    assert refusal(result) == (409, "idempotency-key-in-progress", b"1")


@pytest.mark.parametrize("state", [State.PROCESSING, State.COMPLETE])
def test_another_request_under_the_same_key(state: State) -> None:
    """Another body under the same key is refused, in progress too."""
    answer = KEPT if state is State.COMPLETE else None
    script: list[Line] = [*BEGIN, (Claim, found(state, answer=answer, body=b"{}", lease_is_over=answer is not None))]
    assert refusal(played(script).result)[:2] == (422, "idempotency-key-reused")
    stripe = Policy.stripe()
    assert sent(played(script, stripe).result).status == 400


def test_own_token_is_a_hold() -> None:
    """A claim that finds its own token has got through before: it holds the key, and the handler runs."""
    script: list[Line] = [*BEGIN, (Claim, Again.AGAIN), (Claim, found(token=TOKEN)), *RUN]
    result = played(script)
    assert result.commands[-2] == RunHandler(
        HOLD, POLICY.lease, POLICY.max_response_body, request="POST /charges", max_response_time=MAX_RESPONSE_TIME
    )


def test_take_over_from_the_dead() -> None:
    """When a worker died, the next request takes over from exactly the one it saw, tells of it, and runs."""
    script: list[Line] = [*BEGIN, (Claim, found(lease_is_over=True)), *TAKE_OVER, *RUN]
    result = played(script)
    claim = Claim("alice", KEY, TOKEN, fingerprint(), POLICY.lease, POLICY.retention, request_line="POST /charges")
    assert result.commands[3:] == (
        TakeOver(claim, SEEN),
        Tell(TookOver(SHORT, 2)),
        Look("alice", KEY),
        RunHandler(
            HEIR, POLICY.lease, POLICY.max_response_body, request="POST /charges", max_response_time=MAX_RESPONSE_TIME
        ),
        Complete(HEIR, Event.COMPLETE, KEPT),
    )
    assert result.result == Send(CREATED)


def test_take_over_goes_on_from_what_is_stored() -> None:
    """The steps to go on from are read after the take-over: until then a slow holder could commit one more."""
    seen = replace(found(lease_is_over=True), steps=written(Progress(STEPS.steps[:1])))
    script: list[Line] = [*BEGIN, (Claim, seen), (TakeOver, HEIR), (Tell, None), (Look, record(HEIR, STEPS)), *RUN]
    assert played(script).commands[-2] == RunHandler(
        HEIR, POLICY.lease, POLICY.max_response_body, STEPS, "POST /charges", MAX_RESPONSE_TIME
    )


def test_steps_that_cant_be_read() -> None:
    """Steps that are encrypted with a secret that is not here are gone on from by no handler: 503."""
    hidden = Progress((Done("phase", "ride_created", {MARK: "AQ=="}),))
    script: list[Line] = [*BEGIN, (Claim, found(lease_is_over=True)), (TakeOver, HEIR), (Tell, None)]
    result = played([*script, (Look, record(HEIR, hidden)), (Tell, None), (Release, Verdict.DONE)])
    assert refusal(result.result)[:2] == (503, "store-unavailable")


@pytest.mark.parametrize("there", [None, record(SEEN), record(replace(HEIR, attempt=3))])
def test_taken_over_and_lost_again(there: Record | None) -> None:
    """Whoever has lost the operation by the time it reads how far it has come runs nothing."""
    script: list[Line] = [*BEGIN, (Claim, found(lease_is_over=True)), (TakeOver, HEIR), (Tell, None), (Look, there)]
    assert refusal(played(script).result) == (409, "idempotency-key-in-progress", b"1")


def test_taken_over_and_the_store_fails() -> None:
    """A key that was taken over before the store failed is given up: nothing has run."""
    taken: list[Line] = [(Claim, found(lease_is_over=True)), (TakeOver, HEIR), (Tell, None), (Look, UNREACHABLE)]
    result = played([*BEGIN, *taken, (Tell, None), (Release, Verdict.DONE)])
    assert result.commands[-1] == Release(BY_TOKEN)
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_own_token_after_a_take_over() -> None:
    """A take-over whose reply was lost is found by its token, and goes on from what is stored."""
    mine = replace(found(token=TOKEN), attempt=2)
    script: list[Line] = [*BEGIN, (Claim, Again.AGAIN), (Claim, mine), (Look, record(HEIR, STEPS)), *RUN]
    assert played(script).commands[-2] == RunHandler(
        HEIR, POLICY.lease, POLICY.max_response_body, STEPS, "POST /charges", MAX_RESPONSE_TIME
    )


@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
def test_own_token_past_its_lease(on_crash: Literal["rerun", "refuse"]) -> None:
    """A claim that finds its own token when its lease is over takes the key over from itself: a rival might be about
    to. That nothing has run is known, whatever the policy says of crashes.
    """
    mine = found(token=TOKEN, lease_is_over=True)
    script: list[Line] = [*BEGIN, (Claim, Again.AGAIN), (Claim, mine), (TakeOver, HEIR), (Tell, None)]
    taken = played([*script, (Look, record(HEIR, Progress())), *RUN], Policy(on_crash=on_crash))
    assert [each.seen for each in taken.commands if isinstance(each, TakeOver)] == [HOLD]
    assert taken.result == Send(CREATED)


def test_own_token_is_parked() -> None:
    """A claim that finds its own token parked runs nothing: an operator may have said already that it did nothing."""
    parked = found(State.UNKNOWN, token=TOKEN, lease_is_over=True)
    result = played([*BEGIN, (Claim, Again.AGAIN), (Claim, parked)])
    assert refusal(result.result)[:2] == (409, "outcome-unknown")


def test_expired_in_the_middle_of_a_take_over() -> None:
    """A record that expires between sight and take-over starts anew: no step of the old operation is gone on from."""
    seen = replace(found(lease_is_over=True), steps=written(STEPS))
    script: list[Line] = [*BEGIN, (Claim, seen), (TakeOver, HOLD), *RUN]
    assert played(script).commands[-2] == RunHandler(
        HOLD, POLICY.lease, POLICY.max_response_body, request="POST /charges", max_response_time=MAX_RESPONSE_TIME
    )


def test_parked() -> None:
    """A retry of a parked operation runs nothing, and is told that its outcome is unknown."""
    result = played([*BEGIN, (Claim, found(State.UNKNOWN, lease_is_over=True))])
    assert refusal(result.result) == (409, "outcome-unknown", None)


def test_refuse_after_a_crash() -> None:
    """With on_crash="refuse" a dead worker's operation is not run again: its outcome is unknown."""
    result = played([*BEGIN, (Claim, found(lease_is_over=True))], Policy(on_crash="refuse"))
    assert refusal(result.result)[:2] == (409, "outcome-unknown")


def test_late_retry_is_new() -> None:
    """After retention a retry is a new operation, which is no take-over from a dead worker."""
    late = found(State.COMPLETE, answer=KEPT, body=b"{}", lease_is_over=True, is_expired=True)
    script: list[Line] = [*BEGIN, (Claim, late), (TakeOver, HOLD), *RUN]
    assert played(script).result == Send(CREATED)


def test_late_retry_is_refused() -> None:
    """With late="refuse" it is gone instead."""
    late = found(State.COMPLETE, answer=KEPT, lease_is_over=True, is_expired=True)
    result = played([*BEGIN, (Claim, late)], Policy(late="refuse"))
    assert refusal(result.result)[:2] == (410, "idempotency-key-expired")


def test_lost_take_over_looks_again() -> None:
    """Whoever loses a take-over looks again, and replays what the winner stored."""
    script: list[Line] = [
        *BEGIN,
        (Claim, found(lease_is_over=True)),
        (TakeOver, Again.AGAIN),
        (Claim, found(State.COMPLETE, answer=KEPT, lease_is_over=True)),
    ]
    assert sent(played(script).result).body == KEPT.body


def test_rivals_for_ever() -> None:
    """A claim that keeps meeting rivals gives up after a few tries, and whatever it may have got without knowing."""
    result = played([*BEGIN, *[(Claim, Again.AGAIN)] * CLAIM_TRIES, (Release, Verdict.FENCED)])
    assert result.commands[-1] == Release(BY_TOKEN)
    assert refusal(result.result) == (409, "idempotency-key-in-progress", b"1")


# A key that tells its own age

OLD = "01890a5d-ac96-774b-bcce-b302099a8057"
LATE = Policy(late="refuse")


def test_old_key_is_refused_without_a_record() -> None:
    """A UUIDv7 from before the retention is refused though its record is reaped, and the key is freed again."""
    hold = Hold("alice", OLD, 1, TOKEN)
    result = played([*BEGIN, (Claim, hold), (Now, NOW), (Release, Verdict.DONE)], LATE, OLD)
    assert result.commands[-1] == Release(hold)
    assert refusal(result.result)[:2] == (410, "idempotency-key-expired")


def test_old_key_and_the_clock_can_not_be_read() -> None:
    """A claim that was won before the store failed is freed: nothing has run."""
    hold = Hold("alice", OLD, 1, TOKEN)
    result = played([*BEGIN, (Claim, hold), (Now, UNREACHABLE), (Tell, None), (Release, Verdict.DONE)], LATE, OLD)
    assert result.commands[-1] == Release(Hold("alice", OLD, 0, TOKEN))
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_young_key_runs() -> None:
    """A UUIDv7 within the retention runs."""
    made = Key(OLD).made_at
    assert made is not None
    script: list[Line] = [*BEGIN, (Claim, HOLD), (Now, made + timedelta(hours=1)), *RUN]
    assert played(script, LATE, OLD).result == Send(CREATED)


def test_key_of_no_age_runs() -> None:
    """A key that does not tell its age is asked for none."""
    script: list[Line] = [*BEGIN, (Claim, HOLD), *RUN]
    assert played(script, LATE).result == Send(CREATED)


# The store fails


@pytest.mark.parametrize("error", [UNREACHABLE, StoreNotReady()], ids=["unreachable", "not ready"])
def test_unreachable_store_runs_nothing(error: StoreError) -> None:
    """Without the store nothing runs: 503, and when to come back."""
    result = played([*BEGIN, (Claim, error), (Tell, None)])
    assert result.commands[-1] == Tell(StoreFailed(SHORT, str(error)))
    assert refusal(result.result) == (503, "store-unavailable", b"%d" % STORE_RETRY_AFTER_SECONDS)


@pytest.mark.parametrize("answer", [Verdict.DONE, Verdict.FENCED, UNREACHABLE], ids=["done", "fenced", "failed"])
def test_claim_that_may_have_got_through(answer: object) -> None:
    """A claim that was sent and not answered is freed by its token, as well as that can be done."""
    result = played([*BEGIN, (Claim, CUT_OFF), (Tell, None), (Release, answer)])
    assert result.commands[-1] == Release(BY_TOKEN)
    assert refusal(result.result)[:2] == (503, "store-unavailable")


def test_take_over_that_may_have_got_through() -> None:
    """The same for a take-over."""
    result = played(
        [*BEGIN, (Claim, found(lease_is_over=True)), (TakeOver, CUT_OFF), (Tell, None), (Release, Verdict.DONE)]
    )
    assert result.commands[-1] == Release(BY_TOKEN)


def test_answer_is_stored_patiently() -> None:
    """When the handler has run and the store fails, storing is tried again, with pauses."""
    script: list[Line] = [
        *BEGIN,
        (Claim, HOLD),
        (RunHandler, Answered(CREATED)),
        (Complete, CUT_OFF),
        (Pause, None),
        (Complete, UNREACHABLE),
        (Pause, None),
        (Complete, Verdict.DONE),
    ]
    result = played(script)
    assert [each.duration for each in result.commands if isinstance(each, Pause)] == list(COMPLETE_PAUSES[:2])
    assert result.result == Send(CREATED)


def test_an_answer_is_not_lost_for_want_of_a_hint() -> None:
    """The first try to store an answer gives the hint that others wait for; those after it ask for nothing more than
    the answer.
    """
    script: list[Line] = [
        *BEGIN,
        (Claim, HOLD),
        (RunHandler, Answered(CREATED)),
        *((Complete, CUT_OFF), (Pause, None), (Complete, Verdict.DONE)),
    ]
    result = played(script, Policy(in_progress="wait"))
    assert [each.wakes for each in result.commands if isinstance(each, Complete)] == [True, False]


def too_slow() -> StoreUnavailable:
    error = StoreUnavailable("statement timeout", was_sent=True)
    error.was_too_slow = True
    return error


def no_space() -> StoreUnavailable:
    error = StoreUnavailable("disk full", was_sent=True)
    error.has_no_space = True
    return error


@pytest.mark.parametrize(
    "error, size, tries",
    [
        (too_slow(), LARGE_ANSWER + 1, [True, False]),
        (too_slow(), LARGE_ANSWER, [True, True]),  # It is not the answer that takes long.
        (CUT_OFF, LARGE_ANSWER + 1, [True, True]),
        (no_space(), 10, [True, False]),
        (no_space(), 0, [True, True]),
        (StoreRefused("too large"), 10, [True, False]),
        (StoreRefused("no"), 0, [True, True]),
    ],
    ids=["too slow", "slow and small", "lost", "no space", "empty", "refused", "refused and empty"],
)
def test_answer_that_the_store_will_not_take(error: StoreError, size: int, tries: list[bool]) -> None:
    """An answer that would be refused again is sent once and stored as a tombstone, without another try: that the
    operation is done must not be lost for want of its answer.
    """
    answer = Answer(201, (), bytes(size))
    again: list[Line] = (
        [(Pause, None), (Complete, Verdict.DONE)] if tries[-1] else [(Complete, Verdict.DONE), (Tell, None)]
    )
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Answered(answer)), (Complete, error), *again])
    assert [each.answer.body is not None for each in result.commands if isinstance(each, Complete)] == tries
    assert result.result == Send(answer)
    assert (Tell(NotKept(SHORT, 201)) in result.commands) is not tries[-1]


def test_refused_with_a_hint() -> None:
    """Where the hint may be what the store objects to, the answer is tried once more without it."""
    refusing: list[Line] = [(Complete, StoreRefused("no")), (Pause, None), (Complete, StoreRefused("no"))]
    ended: list[Line] = [(Complete, Verdict.DONE), (Tell, None)]
    script: list[Line] = [*BEGIN, (Claim, HOLD), (RunHandler, Answered(CREATED)), *refusing, *ended]
    result = played(script, Policy(in_progress="wait"))
    tries = [(each.wakes, each.answer.body is not None) for each in result.commands if isinstance(each, Complete)]
    assert tries == [(True, True), (False, True), (False, False)]


def test_answer_that_can_not_be_stored() -> None:
    """An answer that can't be stored is not sent, and its key is never freed: the effect may be there. Both are kept by
    the worker, which goes on trying.
    """
    tries: list[Line] = [line for _ in COMPLETE_PAUSES for line in ((Complete, CUT_OFF), (Pause, None))]
    script: list[Line] = [
        *BEGIN,
        (Claim, HOLD),
        (RunHandler, Answered(CREATED)),
        *tries,
        (Complete, UNREACHABLE),
        (Tell, None),
        (Keep, None),
    ]
    result = played(script)
    kept = Complete(HOLD, Event.COMPLETE, KEPT)
    assert result.commands[-2:] == (Tell(NotStored(SHORT, 1, "no route")), Keep(HOLD, (kept,), POLICY.lease))
    assert not any(isinstance(each, Release) for each in result.commands)
    assert refusal(result.result) == (503, "answer-not-stored", b"%d" % STORE_RETRY_AFTER_SECONDS)


@pytest.mark.parametrize("ending", [Answered(CREATED), Raised(OSError())], ids=["answered", "raised"])
def test_fenced_worker_keeps_its_answer_to_itself(ending: Any) -> None:
    """A worker that lost its key throws its answer away: the client gets the answer of whoever took over."""
    fenced: list[Line] = [(Complete, Verdict.FENCED), (Look, record(HEIR)), (Tell, None), (Note, None)]
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, ending), *fenced])
    assert result.commands[-2:] == (Tell(Fenced(SHORT, 1)), Note(HOLD, "fenced"))
    assert refusal(result.result) == (409, "idempotency-key-in-progress", b"1")


@pytest.mark.parametrize(
    "ended",
    [
        [(RunHandler, Answered(CREATED)), (Complete, Verdict.FENCED), (Look, None), (Tell, None)],
        [(RunHandler, Lost()), (Tell, None), (Note, None), (Look, None)],
    ],
    ids=["answered", "stopped"],
)
def test_record_that_is_gone(ended: list[Line]) -> None:
    """Where the handler has run and there is no record any more, no other worker has the operation, and none will
    answer: the client is told that the outcome is unknown, and not to wait.
    """
    result = played([*BEGIN, (Claim, HOLD), *ended])
    assert refusal(result.result) == (409, "outcome-unknown", None)


def test_record_that_is_gone_before_the_handler() -> None:
    """A handler that was not begun, since its claim was lost, has had no effect."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Lost(has_run=False)), (Tell, None), (Note, None)])
    assert refusal(result.result)[:2] == (409, "idempotency-key-in-progress")


def test_trail_that_can_not_be_written() -> None:
    """The trail is for people: that it can't be written changes nothing for the client."""
    fenced: list[Line] = [(Complete, Verdict.FENCED), (Look, UNREACHABLE), (Tell, None), (Note, UNREACHABLE)]
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Answered(CREATED)), *fenced])
    assert refusal(result.result) == (409, "idempotency-key-in-progress", b"1")


@pytest.mark.parametrize("answer", [None, UNREACHABLE], ids=["noted", "failed"])
def test_replays_are_noted_on_request(answer: object) -> None:
    """Where the trail is to have replays, it gets a line, if that can be done; elsewhere a replay writes nothing."""
    there = found(State.COMPLETE, answer=KEPT, lease_is_over=True)
    result = play(serve(PORTS, head(), POLICY, TOKEN, notes_replays=True), [*BEGIN, (Claim, there), (Note, answer)])
    assert result.commands[-1] == Note(SEEN, "replayed")
    assert sent(result.result).status == 201


# How a handler can end beside


def test_lease_is_lost_in_mid_handler() -> None:
    """A handler that was stopped because its lease was lost stores nothing, and the client is told to come back."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Lost()), (Tell, None), (Note, None), (Look, record(HEIR))])
    assert result.commands[-3:-1] == (Tell(LostLease(SHORT, 1)), Note(HOLD, "stopped"))
    assert refusal(result.result) == (409, "idempotency-key-in-progress", b"1")


def test_parked_in_mid_handler() -> None:
    """A handler that came to an effect nobody knows of has parked the operation: it is refused, and not freed."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, Parked())])
    assert refusal(result.result) == (409, "outcome-unknown", None)


def test_server_is_about_to_stop() -> None:
    """A handler that was not started because the server stops leaves the key free for the next server."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, NotStarted()), (Release, Verdict.DONE)])
    assert result.commands[-1] == Release(HOLD)
    assert refusal(result.result) == (503, "shutting-down", b"%d" % SHUTDOWN_RETRY_AFTER_SECONDS)


def freed(ending: Any, policy: Policy = POLICY) -> Any:
    """What comes of an ending that frees the key."""
    return played([*BEGIN, (Claim, HOLD), (RunHandler, ending), (Release, Verdict.DONE)], policy).result


def test_page_for_a_handler_with_steps() -> None:
    """What a framework answers for an error it doesn't know would be final to a client: with steps, it is not."""
    page = Answer(500, ((b"content-type", b"text/html"),), b"<h1>Oops</h1>")
    assert refusal(freed(Answered(page, no_effect=True, has_steps=True))) == (503, "operation-unfinished", b"2")
    assert freed(Answered(page, no_effect=True)) == Send(page)


def test_answer_of_the_apis_own_for_a_handler_with_steps() -> None:
    """A server error that the API has put into words of its own is sent as it is."""
    own = Answer(500, ((b"content-type", b"application/json"),), b"{}")
    assert freed(Answered(own, no_effect=True, has_steps=True)) == Send(own)


def test_store_that_fails_in_a_handler_without_steps() -> None:
    """A store that fails after an effect which is recorded nowhere is the handler's own error, where errors free."""
    error = StoreUnavailable("It is away.")
    assert freed(Raised(error), Policy(server_errors="release")) == Reraise(error, None, "freed")


def test_store_that_fails_between_two_steps() -> None:
    """A client is not told that nothing was run where steps were taken, and the log says why it stopped."""
    ending = Raised(StoreUnavailable("It is away."), no_effect=True, has_steps=True)
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, ending), (Release, Verdict.DONE), (Tell, None)])
    assert refusal(result.result) == (503, "operation-unfinished", b"2")
    assert result.commands[-1] == Tell(StoreFailed(SHORT, "It is away."))


@pytest.mark.parametrize("policy", [POLICY, Policy.stripe()], ids=["auto", "keep"])
def test_handler_that_raised_in_progress(policy: Policy) -> None:
    """A function with a key of its own that is busy elsewhere is no outcome, whatever the policy keeps."""
    result = freed(Raised(InProgress()), policy)
    assert isinstance(result, Send)
    assert (result.answer.status, dict(result.answer.headers)[b"retry-after"]) == (409, b"1")


OFF = Policy(enforcement="off", required=True)


def test_switched_off() -> None:
    """With its guard switched off a request is passed on, as the operation that it would have been."""
    assert played([(NameScope, "alice")], OFF).result == PassOn(HOLD)


@pytest.mark.parametrize("answer", [None, LookupError("no such user")])
def test_switched_off_without_an_owner(answer: object) -> None:
    """Where its owner can't be found out, it is passed on all the same."""
    assert played([(NameScope, answer)], OFF).result == PassOn()


@pytest.mark.parametrize("key", [None, '"half'])
def test_switched_off_without_a_key(key: str | None) -> None:
    """Where it has no key, or one that can't be read, the application is not even asked."""
    assert play(serve(PORTS, head(key), OFF, TOKEN), []).result == PassOn()


def test_switched_off_and_shutting_down() -> None:
    """A process that is about to end refuses what has a key, as ever: without its operation, a handler would fail."""
    reply = played([(NameScope, ShuttingDown(retry_after=2))], OFF).result
    assert isinstance(reply, Send)
    assert (reply.answer.status, dict(reply.answer.headers)[b"retry-after"]) == (503, b"2")


def test_switched_off_and_gone() -> None:
    """A client that has gone meanwhile is not answered."""
    with pytest.raises(Interrupted):
        played([(NameScope, Interrupted())], OFF)


def test_guard_inside_of_another() -> None:
    """A request whose key is claimed by a guard further outside, in the same store, is passed on."""
    hold = Hold("alice", "key-1", 1, OTHER_TOKEN)
    outside = Around("alice", "key-1", OTHER_TOKEN, "POST /charges", is_atomic=False)
    script: list[Line] = [*BEGIN, (Look, record(hold))]
    assert play(serve(PORTS, head(), POLICY, TOKEN, around=outside), script).result == PassOn()
    with pytest.raises(ConfigurationError, match="atomic"):
        play(serve(PORTS, head(), Policy.ietf(mode="atomic"), TOKEN, around=outside), script)


def test_guard_inside_of_an_atomic_one() -> None:
    """Inside of an atomic guard, which has no record yet, nothing is asked of the store."""
    outside = Around("alice", "key-1", OTHER_TOKEN, "POST /charges", is_atomic=True)
    assert play(serve(PORTS, head(), POLICY, TOKEN, around=outside), BEGIN).result == PassOn()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_guard_inside_of_one_with_another_store(token: bytes | None) -> None:
    """Where the store has no record of the outer guard's claim, the request is claimed as usual."""
    outside = Around("alice", "key-1", OTHER_TOKEN, "POST /charges", is_atomic=False)
    script: list[Line] = [
        *BEGIN,
        (Look, None if token is None else record(Hold("alice", "key-1", 1, token))),
        (Claim, found(State.COMPLETE, answer=CREATED, lease_is_over=True)),
    ]
    assert isinstance(play(serve(PORTS, head(), POLICY, TOKEN, around=outside), script).result, Send)


@pytest.mark.parametrize("outside", [("bob", "key-1", ""), ("alice", "key-2", ""), ("alice", "key-1", "POST /refunds")])
def test_guard_inside_of_another_operation(outside: tuple[str, str, str]) -> None:
    """One whose key is another's, or that is another request, is claimed as usual."""
    scope, key, request = outside
    around = Around(scope, key, OTHER_TOKEN, request, is_atomic=False)
    script: list[Line] = [*BEGIN, (Claim, found(State.COMPLETE, answer=CREATED, lease_is_over=True))]
    assert isinstance(play(serve(PORTS, head(), POLICY, TOKEN, around=around), script).result, Send)


SKIPPED = RecoveryPointLost(("ride_created", "charge_created"), ("ride_created",))
STREAM = Streaming(200, (), SKIPPED)


@pytest.mark.parametrize("policy", [POLICY, Policy.stripe()], ids=["auto", "keep"])
@pytest.mark.parametrize("ending", [Answered(CREATED, skipped=SKIPPED), STREAM], ids=["answer", "stream"])
def test_answer_of_a_handler_that_skipped_steps(ending: Any, policy: Policy) -> None:
    """An answer given before all stored steps were taken is no answer: it is a loud error, and nothing is lost."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, ending), (Release, Verdict.DONE)], policy)
    assert isinstance(result.result, Reraise)
    assert result.result.error is SKIPPED
    assert result.result.answer is not None
    assert result.result.answer.status == 503


@pytest.mark.parametrize("policy", [POLICY, Policy.stripe()], ids=["auto", "keep"])
def test_failure_of_a_handler_that_skipped_steps(policy: Policy) -> None:
    """One that failed before it came to where the operation is keeps nothing: the next attempt goes on from there."""
    unfinished = StepUnfinished("charge_created")
    error = OSError("no route")
    free: Line = (Release, Verdict.DONE)
    answer = Answered(Answer(502), no_effect=True, skipped=unfinished)
    assert played([*BEGIN, (Claim, HOLD), (RunHandler, answer), free], policy).result == Send(Answer(502))
    raised = Raised(error, no_effect=True, skipped=unfinished)
    assert played([*BEGIN, (Claim, HOLD), (RunHandler, raised), free], policy).result == Reraise(error, None)
    stream = Streaming(500, (), unfinished)
    assert played([*BEGIN, (Claim, HOLD), (RunHandler, stream), free], policy).result == PassOn()


def test_not_now_from_a_handler_that_skipped_steps() -> None:
    """An answer that is never kept, such as 429, passes as it is, whatever was skipped."""
    ending = Answered(Answer(429), skipped=SKIPPED)
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, ending), (Release, Verdict.DONE)])
    assert result.result == Send(Answer(429))


# What the claim takes along


def claimed(policy: Policy, key: str = KEY) -> Claim:
    script: list[Line] = [*BEGIN, (Claim, UNREACHABLE), (Tell, None)]
    claim = played(script, policy, key).commands[2]
    assert isinstance(claim, Claim)
    return claim


def test_request_is_kept_on_request() -> None:
    """The request goes with the claim where the policy keeps it, whole and with its principal; else it does not."""
    assert claimed(POLICY).request is None
    assert claimed(Policy(store_request=True)).request == Request(head(), BODY, "alice")


def test_policy_goes_with_the_record() -> None:
    """Whoever finds the record later knows what its policy said of crashes and of late retries."""
    assert (claimed(POLICY).on_crash, claimed(POLICY).after_retention) == ("rerun", "delete")
    late = claimed(Policy(on_crash="refuse", late="refuse"))
    assert (late.on_crash, late.after_retention, late.made_at) == ("refuse", "strip", None)
    # A UUIDv7 tells its own age. Whether that is enough to refuse it by, the store knows, by its own clock.
    old = claimed(Policy(late="refuse"), OLD)
    assert (old.after_retention, old.made_at) == ("strip", Key(OLD).made_at)
    assert claimed(Policy(), OLD).made_at is None


# The caller goes away


@pytest.mark.parametrize("script", [[(NameScope, Interrupted())], [(NameScope, "alice"), (ReadBody, Interrupted())]])
def test_interrupted_before_the_claim(script: list[Line]) -> None:
    """A caller that goes before the claim leaves nothing to do."""
    with pytest.raises(Interrupted):
        played(script)


@pytest.mark.parametrize(
    "script",
    [
        [(Claim, Interrupted())],
        [(Claim, found(lease_is_over=True)), (TakeOver, Interrupted())],
        [(Claim, Again.AGAIN), (Claim, Interrupted())],
        [(Claim, found(lease_is_over=True)), (TakeOver, HEIR), (Tell, None), (Look, Interrupted())],
    ],
    ids=["claim", "take-over", "second claim", "steps"],
)
@pytest.mark.parametrize("answer", [Verdict.DONE, UNREACHABLE], ids=["done", "failed"])
def test_interrupted_while_claiming(script: list[Line], answer: object) -> None:
    """A caller that goes while the key is claimed has it freed behind, by its token, if that can be done."""
    with pytest.raises(Interrupted):
        played([*BEGIN, *script, (Release, answer)])


def test_interrupted_while_asking_the_time() -> None:
    """The same while the store's clock is read."""
    with pytest.raises(Interrupted):
        played([*BEGIN, (Claim, HOLD), (Now, Interrupted()), (Release, Verdict.DONE)], LATE, OLD)


def unsaved() -> Raised:
    """An effect whose result the store did not take."""
    return Raised(
        StoreUnavailable("It is away."), no_effect=True, has_steps=True, unsaved=Save(HOLD, Progress(), Progress())
    )


def test_result_that_is_stored_with_the_ending() -> None:
    """The result of an effect that the store did not take is stored before the key is freed."""
    ends: list[Line] = [(Save, Verdict.DONE), (Release, Verdict.DONE), (Tell, None)]
    reply = played([*BEGIN, (Claim, HOLD), (RunHandler, unsaved()), *ends]).result
    assert refusal(reply) == (503, "operation-unfinished", b"2")


def test_result_that_is_kept() -> None:
    """Where the store is still away, the worker keeps the result of the effect, and with it the key."""
    ends: list[Line] = [(Save, StoreUnavailable("It is away.")), (Tell, None), (Keep, None), (Tell, None)]
    run = played([*BEGIN, (Claim, HOLD), (RunHandler, unsaved()), *ends])
    assert refusal(run.result) == (503, "operation-unfinished", b"2")
    [keep] = [each for each in run.commands if isinstance(each, Keep)]
    assert [type(each) for each in keep.commands] == [Save, Release]


def test_result_that_another_has_taken_over() -> None:
    """Where another worker has the key by then, it is not freed: the result is that worker's to find."""
    reply = played([*BEGIN, (Claim, HOLD), (RunHandler, unsaved()), (Save, Verdict.FENCED), (Tell, None)]).result
    assert refusal(reply) == (503, "operation-unfinished", b"2")

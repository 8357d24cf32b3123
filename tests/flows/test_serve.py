"""One guarded request: what it asks for, in what order, and what it answers, for every turn it can take."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel.core.commands import (
    Again,
    Answered,
    Claim,
    Complete,
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
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.events import Fenced, NotKept, NotStored, PersonalKey, StoreFailed, TookOver
from semel.core.fingerprint import Subject
from semel.core.key import Key
from semel.core.message import Answer, Head, Headers
from semel.core.policy import Policy
from semel.core.record import Found, Hold
from semel.core.replay import MARKER
from semel.core.state import Event, State
from semel.errors import Interrupted, NoEffect, StoreError, StoreNotReady, StoreUnavailable
from semel.flows.serve import (
    CLAIM_TRIES,
    COMPLETE_PAUSES,
    STORE_RETRY_AFTER_SECONDS,
    PassOn,
    Reply,
    Reraise,
    Send,
    serve,
)
from semel.testing.script import Line, Played, play

POLICY = Policy()
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


def played(script: list[Line], policy: Policy = POLICY, key: str | None = KEY) -> Played[Reply]:
    return play(serve(head(key), policy, TOKEN), script)


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
            Claim("alice", KEY, TOKEN, fingerprint(), POLICY.lease, POLICY.retention),
            RunHandler(HOLD, POLICY.lease, POLICY.max_response_body),
            Complete(HOLD, Event.COMPLETE, KEPT),
        ),
        Send(CREATED),
    )


def test_no_fingerprint() -> None:
    """A policy without a fingerprint stores none, and compares none."""
    policy = Policy(fingerprint=None)
    script: list[Line] = [*BEGIN, (Claim, found(State.COMPLETE, answer=KEPT, body=b"other", lease_is_over=True))]
    result = played(script, policy)
    claim = result.commands[-1]
    assert isinstance(claim, Claim)
    assert claim.fingerprint == b""
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
    """While the first request runs, the second is told to wait."""
    assert refusal(played([*BEGIN, (Claim, found())]).result) == (409, "idempotency-key-in-progress", b"1")


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
    assert result.commands[-2] == RunHandler(HOLD, POLICY.lease, POLICY.max_response_body)


def test_take_over_from_the_dead() -> None:
    """When a worker died, the next request takes over from exactly the one it saw, tells of it, and runs."""
    script: list[Line] = [*BEGIN, (Claim, found(lease_is_over=True)), (TakeOver, HEIR), (Tell, None), *RUN]
    result = played(script)
    claim = Claim("alice", KEY, TOKEN, fingerprint(), POLICY.lease, POLICY.retention)
    assert result.commands[3:] == (
        TakeOver(claim, SEEN),
        Tell(TookOver(SHORT, 2)),
        RunHandler(HEIR, POLICY.lease, POLICY.max_response_body),
        Complete(HEIR, Event.COMPLETE, KEPT),
    )
    assert result.result == Send(CREATED)


def test_refuse_after_a_crash() -> None:
    """With on_crash="refuse" a dead worker's operation is not run again: its outcome is unknown."""
    result = played([*BEGIN, (Claim, found(lease_is_over=True))], Policy(on_crash="refuse"))
    assert refusal(result.result)[:2] == (409, "outcome-unknown")


def test_late_retry_is_new() -> None:
    """After retention a retry is a new operation, which is no take-over from a dead worker."""
    late = found(State.COMPLETE, answer=KEPT, body=b"{}", lease_is_over=True, is_expired=True)
    script: list[Line] = [*BEGIN, (Claim, late), (TakeOver, HEIR), *RUN]
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
NOW = datetime(2025, 1, 1, tzinfo=UTC)
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


def test_answer_that_can_not_be_stored() -> None:
    """An answer that can't be stored is not sent, and its key is never freed: the effect may be there."""
    tries: list[Line] = [line for _ in COMPLETE_PAUSES for line in ((Complete, CUT_OFF), (Pause, None))]
    script: list[Line] = [
        *BEGIN,
        (Claim, HOLD),
        (RunHandler, Answered(CREATED)),
        *tries,
        (Complete, UNREACHABLE),
        (Tell, None),
    ]
    result = played(script)
    assert result.commands[-1] == Tell(NotStored(SHORT, 1, "no route"))
    assert not any(isinstance(each, Release) for each in result.commands)
    assert refusal(result.result) == (503, "answer-not-stored", b"%d" % STORE_RETRY_AFTER_SECONDS)


@pytest.mark.parametrize("ending", [Answered(CREATED), Raised(OSError())], ids=["answered", "raised"])
def test_fenced_worker_keeps_its_answer_to_itself(ending: Any) -> None:
    """A worker that lost its key throws its answer away: the client gets the answer of whoever took over."""
    result = played([*BEGIN, (Claim, HOLD), (RunHandler, ending), (Complete, Verdict.FENCED), (Tell, None)])
    assert result.commands[-1] == Tell(Fenced(SHORT, 1))
    assert refusal(result.result) == (409, "idempotency-key-in-progress", b"1")


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
    ],
    ids=["claim", "take-over", "second claim"],
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

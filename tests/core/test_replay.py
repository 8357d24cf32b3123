"""Which answers are kept, what of them, and how a repeated one is marked."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.handler import Answered, Raised, Streaming
from semel.core.message import Answer, Headers
from semel.core.policy import FINAL_STATUSES, NEVER_REPLAYED, Policy, ServerErrors
from semel.core.problem import refused
from semel.core.replay import (
    MARKER,
    REPLAYED_HEADERS,
    Free,
    Keep,
    is_endless,
    judge,
    kept,
    may_be_endless,
    replayed,
    retold,
)
from semel.core.state import Event
from semel.errors import OperationFailed

POLICY = Policy()
OK = Answer(201, ((b"content-type", b"text/plain"), (b"set-cookie", b"s=1")), b"\x00\xff")

NEVER = {name.encode() for name in NEVER_REPLAYED}

header_names = st.sampled_from(sorted(REPLAYED_HEADERS | NEVER | {b"x-ride", b"x-trace"}))
headers = st.lists(st.tuples(header_names, st.binary(max_size=4)), max_size=8).map(tuple)


def test_final_answer_is_kept() -> None:
    """A final answer is kept with its body as it is, its header names in lower case and no cookie."""
    assert judge(Answered(OK), POLICY) == Keep(
        Event.COMPLETE, Answer(201, ((b"content-type", b"text/plain"),), b"\x00\xff")
    )


def test_answer_from_before_the_handler_frees_the_key() -> None:
    """What the router refused has run nothing, whatever its status."""
    assert judge(Answered(OK, reached_handler=False), POLICY) == Free()


@pytest.mark.parametrize("status", range(200, 500))
def test_each_status_below_500(status: int) -> None:
    """Below 500 the policy's list alone decides, for whole answers and for streams."""
    verdicts = [judge(Answered(Answer(status)), POLICY), judge(Streaming(status, ()), POLICY)]
    assert [isinstance(each, Keep) for each in verdicts] == [status in FINAL_STATUSES] * 2


@pytest.mark.parametrize(
    "server_errors, no_effect, is_kept",
    [
        ("auto", False, True),
        ("auto", True, False),
        ("keep", False, True),
        ("keep", True, True),
        ("release", False, False),
        ("release", True, False),
    ],
)
def test_server_errors(server_errors: ServerErrors, no_effect: bool, is_kept: bool) -> None:
    """5xx and exceptions: "auto" frees the key only where no effect is proven, "keep" never, "release" always."""
    policy = Policy(server_errors=server_errors)
    answered = judge(Answered(Answer(502, (), b"oops"), no_effect=no_effect), policy)
    raised = judge(Raised(OSError(), no_effect=no_effect), policy)
    if is_kept:
        assert answered == Keep(Event.FAIL, Answer(502, (), b"oops"))
        assert isinstance(raised, Keep)
        assert (raised.event, raised.answer.status) == (Event.FAIL, 500)
        assert json.loads(raised.answer.body or b"")["code"] == "operation-failed"
    else:
        assert answered == raised == Free()


@pytest.mark.parametrize(
    "server_errors, is_kept", [("auto", False), ("release", False), ("keep", True)], ids=["auto", "release", "keep"]
)
def test_server_errors_in_atomic_mode(server_errors: ServerErrors, is_kept: bool) -> None:
    """In atomic mode a server error is rolled back, which proves that nothing happened; a policy may keep it still."""
    policy = Policy(mode="atomic", server_errors=server_errors)
    endings: list[Answered | Streaming | Raised] = [Answered(Answer(502)), Streaming(502, ()), Raised(OSError())]
    assert [isinstance(judge(ending, policy), Keep) for ending in endings] == [is_kept] * 3


def test_other_answers_in_atomic_mode() -> None:
    """Below 500 atomic mode keeps what guard mode keeps: a refusal of the handler's commits, too."""
    policy = Policy(mode="atomic")
    for status in range(200, 500):
        assert judge(Answered(Answer(status)), policy) == judge(Answered(Answer(status)), POLICY)
    assert judge(Answered(OK, reached_handler=False), policy) == Free()


def test_stream_leaves_a_tombstone() -> None:
    """A stream that took effect is remembered without its body; one that failed is remembered as failed."""
    head: Headers = ((b"content-type", b"text/event-stream"), (b"date", b"today"))
    assert judge(Streaming(200, head), POLICY) == Keep(
        Event.COMPLETE, Answer(200, ((b"content-type", b"text/event-stream"),), None)
    )
    assert judge(Streaming(500, ()), POLICY) == Keep(Event.FAIL, Answer(500, (), None))


def test_replay_is_marked() -> None:
    """A replay is the stored answer and a marker, nothing else."""
    assert replayed(OK, POLICY) == Answer(201, (*OK.headers, MARKER), OK.body)


def test_tombstone_is_told() -> None:
    """A tombstone's replay is a refusal: it took effect, its answer is gone, and where to look if that was said."""
    answer = replayed(Answer(201, ((b"location", b"/rides/1"), (b"etag", b"1")), None), POLICY)
    assert answer.status == 409
    assert json.loads(answer.body or b"")["code"] == "response-not-replayable"
    assert answer.headers[-1] == (b"location", b"/rides/1")
    assert b"etag" not in dict(answer.headers)
    assert MARKER not in answer.headers


def test_answer_is_told_for_the_first_time() -> None:
    """Who asks what became of it gets the answer as it was, with nothing to say that it is a replay."""
    answer = Answer(201, ((b"location", b"/charges/1"), (b"x-own", b"1")), b"{}")
    assert retold(answer, Policy()) == answer


def test_tombstone_is_told_for_the_first_time() -> None:
    """An answer that was not kept is told as such, and where its outcome is, if it said so."""
    told = retold(Answer(200, ((b"location", b"/reports/1"), (b"x-own", b"1")), None), Policy())
    assert told.status == 409
    assert told.headers[-1] == (b"location", b"/reports/1")
    assert b"x-own" not in dict(told.headers)


@pytest.mark.parametrize("status, said", [(201, None), (402, None), (500, b"false"), (503, b"false")])
def test_stripes_clients_stop_at_a_replayed_server_error(status: int, said: bytes | None) -> None:
    """A server error that is kept will not change: Stripe's clients are told so, once; others know no such header."""
    stored = Answer(status, ((b"content-type", b"text/plain"),), b"")
    assert dict(replayed(stored, Policy.stripe()).headers).get(b"stripe-should-retry") == said
    assert b"stripe-should-retry" not in dict(replayed(stored, POLICY).headers)
    failed = refused(OperationFailed(), Policy.stripe())
    assert [name for name, _ in replayed(failed, Policy.stripe()).headers].count(b"stripe-should-retry") == 1


def test_more_headers_on_request() -> None:
    """A policy may have more headers repeated."""
    policy = Policy(replay_headers=["X-Ride"])
    assert kept(((b"x-ride", b"7"), (b"set-cookie", b"s"), (b"date", b"today")), policy) == ((b"x-ride", b"7"),)


@given(headers, st.sets(header_names))
def test_kept_headers(given_headers: Headers, extra: set[bytes]) -> None:
    """What is kept is a part of what was sent, in the same order, and never a cookie or a connection's own."""
    policy = Policy(replay_headers=[name.decode() for name in extra - NEVER])
    left = kept(given_headers, policy)
    rest = iter(given_headers)
    assert all(pair in rest for pair in left)
    assert not {name for name, _ in left} & NEVER
    wanted = (REPLAYED_HEADERS | extra) - NEVER
    assert left == tuple(pair for pair in given_headers if pair[0] in wanted)


@given(st.sampled_from(sorted(FINAL_STATUSES)), headers, st.binary())
def test_replay_of_what_was_kept(status: int, given_headers: Headers, body: bytes) -> None:
    """A kept answer comes back byte for byte, but for the headers that are never repeated and the marker."""
    verdict = judge(Answered(Answer(status, given_headers, body)), POLICY)
    assert isinstance(verdict, Keep)
    again = replayed(verdict.answer, POLICY)
    assert (again.status, again.body) == (status, body)
    assert again.headers == (*kept(given_headers, POLICY), MARKER)
    assert replayed(verdict.answer, POLICY) == again


@pytest.mark.parametrize(
    "head, endless",
    [
        (((b"content-type", b"text/event-stream"),), True),
        (((b"x", b"y"), (b"content-type", b"Text/Event-Stream; charset=utf-8")), True),
        (((b"content-type", b"multipart/x-mixed-replace;boundary=x"),), True),
        (((b"content-type", b"application/grpc+proto"),), True),
        (((b"content-type", b"application/json"),), False),
        (((b"accept", b"text/event-stream"),), False),
        ((), False),
    ],
)
def test_endless_answers(head: Headers, endless: bool) -> None:
    """Some media types say of themselves that they have no end."""
    assert is_endless(head) is endless
    assert may_be_endless(head) is endless


NDJSON = (b"content-type", b"application/x-ndjson; charset=utf-8")


@pytest.mark.parametrize(
    "head, streamed",
    [
        ((NDJSON,), True),
        ((NDJSON, (b"content-length", b"7")), False),
        (((b"content-type", b"application/json"),), False),
    ],
)
def test_lines_may_have_no_end(head: Headers, streamed: bool) -> None:
    """Lines of JSON are a stream, unless their length is known."""
    assert may_be_endless(head) is streamed
    assert not is_endless(head)


PROBLEM = (b"content-type", b"application/problem+json")


@pytest.mark.parametrize(
    "answer, is_kept",
    [
        (Answer(409), True),
        (Answer(409, ((b"retry-after", b"1"),)), False),
        (Answer(201, ((b"retry-after", b"1"),)), True),
        (Answer(409, ((b"stripe-should-retry", b"true"),)), False),
        (Answer(409, ((b"stripe-should-retry", b"false"),)), True),
        (Answer(409, (PROBLEM,), b'{"retryable": true}'), False),
        (Answer(409, (PROBLEM,), b'{"retryable": false}'), True),
        (Answer(409, (PROBLEM,), b'{"retryable": '), True),
        (Answer(409, (PROBLEM,), b"[]"), True),
        (Answer(409, (), b'{"retryable": true}'), True),
    ],
)
def test_later(answer: Answer, is_kept: bool) -> None:
    """A 409 that says "not now" is not kept, whole or as a stream; one that says "never" is."""
    assert isinstance(judge(Answered(answer), POLICY), Keep if is_kept else Free)
    if PROBLEM not in answer.headers:
        assert isinstance(judge(Streaming(answer.status, answer.headers), POLICY), Keep if is_kept else Free)

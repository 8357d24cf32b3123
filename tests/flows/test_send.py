"""A client's flow: what it sends, when it stops, and what a crash at any point leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from semel.core.intent import Beginning, Begun, Ended, Lapsed, Outgoing, Taken
from semel.core.message import Answer
from semel.core.outcome import RetryReason
from semel.core.retrying import Failure
from semel.errors import AnswerNotKept, ClientError, IntentBusy, RequestOutcomeUnknown
from semel.flows.send import NoReply, Reply, Terms, send
from semel.stores.transaction import at_once

URL = "https://api.example/pay"
TERMS = Terms("k-1", deadline=60)
INTENT = Terms("k-1", deadline=60, intent="invoice 17")
OUTGOING = Outgoing("POST", URL, (), b"{}")


class NotConnected(Exception):
    """The library's own error."""


def reply(status: int, code: str = "", **headers: str) -> Reply:
    named = {name.replace("_", "-"): said for name, said in headers.items()}
    kind = {"content-type": "application/problem+json"} if code else {}
    body = json.dumps({"code": code}).encode() if code else b""
    return Reply(status, named | kind, lambda: body, f"response {status}")


LOST = NoReply(Failure.LOST, NotConnected("lost"))
NOT_SENT = NoReply(Failure.NOT_SENT, NotConnected("not sent"))
BUSY = reply(409, "idempotency-key-in-progress", retry_after="1")
ACCEPTED = reply(202, location="/status/1", retry_after="1")

Got = Reply | NoReply | Exception


@dataclass
class World:
    """Answers in their order, and a list of what was done. Time passes by pauses alone."""

    replies: Sequence[Got]
    beginnings: Sequence[Beginning] = ()
    quota: int = 10
    is_quick: bool = True
    #: Whether no other process has taken the intent over.
    is_ours: bool = True
    #: Seconds that a pause takes more than it was to, and the first write of the journal: the machine slept.
    sleeps: float = 0.0
    done: list[str] = field(default_factory=list)
    reasons: list[RetryReason] = field(default_factory=list)
    clock: float = 1000.0
    #: What was left of it.
    in_doubt: bool | None = None

    def __post_init__(self) -> None:
        self._replies = iter(self.replies)
        self._beginnings = iter(self.beginnings)

    def now(self) -> float:
        return self.clock

    def today(self) -> float:
        return 0.0

    def method(self) -> str:
        return "POST"

    def url(self) -> str:
        return URL

    def dice(self) -> float:
        return 0.5

    async def begin(self) -> Beginning:
        self.done.append("begin")
        self.clock += self.sleeps
        return next(self._beginnings)

    async def renew(self) -> bool:
        self.done.append("renew")
        return self.is_ours

    async def is_held(self) -> bool:
        return self.is_ours

    async def settle(self, got: Reply, *, is_certain: bool) -> bool:
        if not (is_certain or self.is_ours):
            return False
        self.done.append(f"settle {got.status}")
        return True

    def release(self, *, in_doubt: bool) -> None:
        self.in_doubt = in_doubt
        if self.beginnings:
            self.done.append("release")

    async def attempt(self, seconds: float) -> Reply | NoReply:
        assert seconds > 0
        self.done.append("send")
        return self._next(seconds)

    async def look(self, url: str, seconds: float) -> Reply | NoReply:
        assert seconds > 0
        self.done.append(f"look {url}")
        return self._next(seconds)

    def _next(self, seconds: float) -> Reply | NoReply:
        got = next(self._replies)
        self.clock += 0 if self.is_quick else seconds
        if isinstance(got, Exception):
            raise got
        return got

    async def pause(self, seconds: float) -> None:
        self.done.append(f"pause {seconds:g}")
        self.clock += seconds + self.sleeps

    def spend(self) -> bool:
        self.quota -= 1
        return self.quota >= 0

    def retrying(self, reason: RetryReason) -> None:
        self.reasons.append(reason)

    def answered(self) -> None:
        self.done.append("answered")

    def stored(self, answer: Answer) -> Any:
        return f"stored {answer.status}"


def sent(world: World, terms: Terms = TERMS) -> Any:
    return at_once(send(world, terms))


def refused(kind: type[ClientError], world: World, terms: Terms = TERMS) -> ClientError:
    with pytest.raises(kind) as caught:
        sent(world, terms)
    assert (caught.value.key, caught.value.intent) == ("k-1", terms.intent)
    assert "k-1" in str(caught.value)
    return caught.value


def test_success() -> None:
    """A request that succeeds is sent once, and nothing is waited for."""
    world = World([reply(201)])
    assert sent(world) == "response 201"
    assert world.done == ["send", "answered"]


def test_lost_connections_are_retried() -> None:
    """A lost connection is no answer: the request is sent again, after longer pauses."""
    world = World([LOST, LOST, NOT_SENT, reply(200)])
    assert sent(world) == "response 200"
    assert [each for each in world.done if "pause" in each] == ["pause 0.05", "pause 0.1", "pause 0.2"]
    assert world.reasons == ["lost", "lost", "not_sent"]


def test_busy() -> None:
    """A key that is in progress is waited for as the server says, and costs no quota."""
    world = World([BUSY, BUSY, reply(201)], quota=0)
    assert sent(world) == "response 201"
    assert world.done.count("pause 1.05") == 2
    assert world.reasons == ["conflict", "conflict"]


@pytest.mark.parametrize(
    "last",
    [reply(400, "amount-missing"), reply(402), reply(422), *(reply(s, idempotent_replayed="true") for s in (404, 500))],
    ids=lambda last: f"{last.status} {dict(last.headers)}",
)
def test_final_answers(last: Reply) -> None:
    """An answer that will not change is returned at once, after a try that was lost as well."""
    world = World([LOST, last])
    assert sent(world) == f"response {last.status}"
    assert world.in_doubt is False


NOT_ITS_ANSWERS = [
    *(reply(status) for status in (304, 400, 403, 404, 405, 410, 412, 413, 423, 501, 505)),
    *(reply(status, location="/elsewhere") for status in (301, 302, 303)),
    *(reply(status, x_should_retry="false") for status in (409, 429, 503)),
    reply(422, "idempotency-key-reused"),
]


@pytest.mark.parametrize("last", NOT_ITS_ANSWERS, ids=lambda last: f"{last.status} {dict(last.headers)}")
def test_answers_that_are_not_its_own(last: Reply) -> None:
    """After a try that was lost, an answer that says nothing of the operation leaves it unknown: it ends the tries,
    and is not written down as its answer, in this process or in the next.
    """
    world = World([LOST, last], [Begun("k-1", OUTGOING, is_resumed=False)])
    assert refused(RequestOutcomeUnknown, world, INTENT).response == f"response {last.status}"
    assert (world.done.count("send"), world.done[-1], world.in_doubt) == (2, "release", True)
    assert not [each for each in world.done if "settle" in each]

    resumed = World([last], [Begun("k-1", OUTGOING, is_resumed=True)])
    assert refused(RequestOutcomeUnknown, resumed, INTENT).response == f"response {last.status}"
    assert resumed.done == ["begin", "send", "release"]


@pytest.mark.parametrize("last", NOT_ITS_ANSWERS, ids=lambda last: f"{last.status} {dict(last.headers)}")
def test_the_same_without_a_doubt(last: Reply) -> None:
    """Where nothing can have happened before, it is the caller's to read."""
    assert sent(World([NOT_SENT, last])) == f"response {last.status}"


@pytest.mark.parametrize(
    "got, in_doubt",
    [
        ([reply(401)], False),
        ([reply(429, x_should_retry="false")], False),
        ([reply(503, x_should_retry="false")], True),
        ([reply(307, location="/x")], False),
        ([LOST, reply(307, location="/x")], True),
        ([reply(202, location="https://other.example/")], True),
    ],
)
def test_doubts_that_are_left(got: list[Got], in_doubt: bool) -> None:
    """An intent that is not settled is given back with the doubt that is left, and so is a request that goes on."""
    world = World(got, [Begun("k-1", OUTGOING, is_resumed=False)])
    assert sent(world, INTENT).startswith("response")
    assert world.done[-1] == "release"
    assert world.in_doubt is in_doubt
    again = World([reply(404)])
    if in_doubt:
        refused(RequestOutcomeUnknown, again, Terms("k-1", deadline=60, was_sent=True))


def test_conflict_after_doubt() -> None:
    """A 409 without a word may be about the try that was lost, which is under way: it is sent again."""
    assert sent(World([LOST, reply(409), reply(201)])) == "response 201"
    assert sent(World([reply(409)])) == "response 409"


def test_deadline_without_an_answer() -> None:
    """When the time is over and a try may have taken effect, the outcome is unknown, and the exception has the key."""
    world = World([LOST] * 2, is_quick=False)
    error = refused(RequestOutcomeUnknown, world)
    assert isinstance(error.__cause__, NotConnected)
    assert error.response is None
    assert world.done == ["send"]


def test_deadline_with_an_answer_in_doubt() -> None:
    """An error that may hide an effect is no outcome either; the exception has the last response."""
    world = World([reply(502), reply(503, retry_after="60")])
    assert refused(RequestOutcomeUnknown, world).response == "response 503"


def test_deadline_without_a_doubt() -> None:
    """Where no try can have taken effect, the last answer or error is the outcome."""
    assert sent(World([NOT_SENT, reply(429, retry_after="100")])) == "response 429"
    with pytest.raises(NotConnected, match="not sent"):
        sent(World([reply(503, "store-unavailable"), NOT_SENT], quota=1))


def test_asleep_in_a_pause() -> None:
    """A client that slept past its deadline sends nothing more: the server may have forgotten the key."""
    world = World([reply(503, "outcome-lost")], sleeps=90_000)
    assert refused(RequestOutcomeUnknown, world).response == "response 503"
    assert world.done == ["send", "pause 0.05"]
    with pytest.raises(NotConnected, match="not sent"):
        sent(World([NOT_SENT], sleeps=90_000))
    looked = World([ACCEPTED, reply(404)], sleeps=90_000)
    refused(RequestOutcomeUnknown, looked)
    assert [each for each in looked.done if "pause" not in each] == ["send", "look https://api.example/status/1"]


def test_asleep_before_it_is_sent() -> None:
    """One that slept when its intent was written down does not send it: another process may have done so since."""
    world = World([], [Begun("k-1", OUTGOING, is_resumed=False)], sleeps=90_000)
    assert refused(RequestOutcomeUnknown, world, INTENT).response is None
    assert (world.done, world.in_doubt) == (["begin", "release"], False)
    refused(RequestOutcomeUnknown, World([]), Terms("k-1", deadline=-1, was_sent=True))


def test_quota() -> None:
    """Without quota a failure is told at once: a server in trouble gets no more requests."""
    world = World([LOST], quota=0)
    refused(RequestOutcomeUnknown, world)
    assert world.done == ["send"]


def test_refused_after_doubt() -> None:
    """A 401 says nothing about an earlier try that was lost."""
    assert sent(World([reply(401)])) == "response 401"
    assert refused(RequestOutcomeUnknown, World([LOST, reply(401)])).response == "response 401"
    assert sent(World([LOST, reply(307, location="/x")])) == "response 307"


def test_unknown() -> None:
    """A server that can't tell what happened is believed."""
    error = refused(RequestOutcomeUnknown, World([reply(409, "outcome-unknown")]))
    assert error.response == "response 409"


def test_accepted() -> None:
    """A 202 is followed to its result."""
    world = World([ACCEPTED, ACCEPTED, reply(201)])
    assert sent(world) == "response 201"
    looks = "look https://api.example/status/1"
    assert world.done == ["send", "pause 1.05", looks, "pause 1.05", looks, "answered"]


def test_accepted_and_still_running() -> None:
    """What says at the status URL that it runs is no result; when the time is over, it is returned as it is."""
    running = Reply(200, {"content-type": "application/json"}, lambda: b'{"status": "running"}', "running")
    world = World([ACCEPTED, running, running, reply(201)])
    assert sent(world) == "response 201"
    assert world.done.count("look https://api.example/status/1") == 3
    late = World([ACCEPTED, running], [Begun("k-1", OUTGOING, is_resumed=False)])
    assert sent(late, Terms("k-1", deadline=2, intent="invoice 17")) == "running"
    assert (late.done[-1], late.in_doubt) == ("release", True)


def test_accepted_and_unsure() -> None:
    """An error at the status URL may be the result: the request itself, sent again, says so."""
    world = World([ACCEPTED, reply(500), reply(500, idempotent_replayed="true")])
    assert sent(world) == "response 500"
    assert [each for each in world.done if "send" in each or "look" in each] == [
        "send",
        "look https://api.example/status/1",
        "send",
    ]
    refused(RequestOutcomeUnknown, World([ACCEPTED, reply(401)]))
    refused(RequestOutcomeUnknown, World([ACCEPTED, NOT_SENT], quota=0))


@pytest.mark.parametrize("status", [307, 403, 404, 409, 410])
def test_answers_to_a_look(status: int) -> None:
    """What is said at the status URL is not the answer of the operation, unless it says so: a replica may be late."""
    world = World([ACCEPTED, reply(status), reply(201)])
    assert sent(world) == "response 201"
    assert [each for each in world.done if "send" in each] == ["send", "send"]
    marked = World([ACCEPTED, reply(status, idempotent_replayed="true")])
    assert sent(marked) == f"response {status}"


def test_an_error_after_a_doubt() -> None:
    """An error that ends the tries does not hide that an earlier one may have taken effect."""
    mistake = ValueError("a certificate")
    assert refused(RequestOutcomeUnknown, World([LOST, mistake])).key == "k-1"
    refused(RequestOutcomeUnknown, World([ACCEPTED, mistake]))
    with pytest.raises(ValueError, match="a certificate"):
        sent(World([NOT_SENT, mistake]))


@pytest.mark.parametrize(
    "world, terms",
    [
        (World([reply(202, location="https://other.example/status/1")]), TERMS),
        (World([reply(202, location="/status/1", retry_after="100")]), TERMS),
        (World([reply(202, location="/status/1")]), Terms("k-1", deadline=60, follows=False)),
        (World([reply(202, location="/status/1")]), Terms("k-1", deadline=1)),
    ],
    ids=["another host", "too late", "not wanted", "no time left"],
)
def test_not_followed(world: World, terms: Terms) -> None:
    """A 202 is returned if it is not followed, to no other host at all, and not past the deadline."""
    assert sent(world, terms) == "response 202"
    assert world.done == ["send"]


def test_intent() -> None:
    """An intent is written down, sent, and settled."""
    world = World([LOST, reply(201)], [Begun("k-1", OUTGOING, is_resumed=False)])
    assert sent(world, INTENT) == "response 201"
    assert world.done == ["begin", "send", "pause 0.05", "renew", "send", "answered", "settle 201", "release"]


def test_intent_has_the_stored_key() -> None:
    """The key of an intent is the one in the journal, in errors too; a try before a crash may have taken effect."""
    world = World([NOT_SENT], [Begun("k-1", OUTGOING, is_resumed=True)], quota=0)
    other = Terms("k-2", deadline=60, intent="invoice 17")
    refused(RequestOutcomeUnknown, world, other)
    assert world.done == ["begin", "send", "release"]


def test_challenge_after_a_crash() -> None:
    """An intent that is resumed may be asked for a login: its 401 is returned, and it stays pending."""
    world = World([reply(401)], [Begun("k-1", OUTGOING, is_resumed=True)])
    assert sent(world, INTENT) == "response 401"
    assert world.done == ["begin", "send", "release"]


def test_intent_with_an_answer() -> None:
    """An intent that has its answer is not sent, and neither is one with an answer that was too large to keep."""
    world = World([], [Ended("k-1", Answer(201))])
    assert sent(world, INTENT) == "stored 201"
    refused(AnswerNotKept, World([], [Ended("k-1", None)]), INTENT)


def test_intent_past_retention() -> None:
    """An intent past the server's retention is not sent."""
    refused(RequestOutcomeUnknown, World([], [Lapsed("k-1")]), INTENT)


def test_intent_elsewhere() -> None:
    """An intent that another process sends is waited for, up to the deadline."""
    world = World([], [Taken("k-1")] * 3 + [Ended("k-1", Answer(201))])
    assert sent(world, INTENT) == "stored 201"
    refused(IntentBusy, World([], [Taken("k-1")] * 1000), INTENT)


def test_intent_is_released_whatever_happens() -> None:
    """An error on the way gives the intent back to other processes."""

    class Broken(World):
        async def attempt(self, seconds: float) -> Reply | NoReply:
            raise KeyboardInterrupt

    world = Broken([], [Begun("k-1", OUTGOING, is_resumed=False)])
    with pytest.raises(KeyboardInterrupt) as caught:
        sent(world, INTENT)
    assert world.done == ["begin", "release"]
    (note,) = caught.value.__notes__
    assert "k-1" in note


@pytest.mark.parametrize("last", NOT_ITS_ANSWERS, ids=lambda last: f"{last.status} {dict(last.headers)}")
def test_lost_lease(last: Reply) -> None:
    """A process that has lost its lease can't tell what the next one has sent: an answer that says nothing of the
    operation leaves it unknown, and so does a try that was not sent.
    """
    world = World([last, last], [Begun("k-1", OUTGOING, is_resumed=False)], is_ours=False, quota=0)
    assert refused(RequestOutcomeUnknown, world, INTENT).response == f"response {last.status}"
    assert (world.done[-1], world.in_doubt) == ("release", True)
    assert not [each for each in world.done if "settle" in each]
    not_sent = World([NOT_SENT], [Begun("k-1", OUTGOING, is_resumed=False)], is_ours=False, quota=0)
    assert refused(RequestOutcomeUnknown, not_sent, INTENT).response is None


@pytest.mark.parametrize(
    "last",
    [reply(201), reply(400, "amount-missing"), reply(402), reply(422), reply(404, idempotent_replayed="true")],
    ids=lambda last: f"{last.status} {dict(last.headers)}",
)
def test_certain_answers_need_no_lease(last: Reply) -> None:
    """What only the operation can have answered is written down by any process, also by one that has lost its lease."""
    world = World([reply(429), last], [Begun("k-1", OUTGOING, is_resumed=False)], is_ours=False)
    assert sent(world, INTENT) == f"response {last.status}"
    assert f"settle {last.status}" in world.done


def test_an_error_after_a_lost_lease() -> None:
    """An error of the library does not hide what the next process may have sent."""
    world = World([reply(429), ValueError("a certificate")], [Begun("k-1", OUTGOING, is_resumed=False)], is_ours=False)
    refused(RequestOutcomeUnknown, world, INTENT)

"""Requests that are accepted, and run later: what their clients see, through both entry points and on every store."""

import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import BodyHash, NoEffect, Policy, stores
from semel.core.commands import Browse, Park
from semel.core.record import Hold, Record
from semel.core.state import State
from semel.core.status import Name
from semel.errors import ConfigurationError
from semel.flows.finish import FinishReport
from semel.stores.tiered import Tiered
from semel.work import Reaper
from tests.web.accepted import ACCEPT, Office, Offices, ThreadWorld, World, location
from tests.web.harness import HANG_SECONDS, AsgiWorld, Call, Gate, Reply, Response, chunks, wait_until

ENTRIES = ("asgi", "wsgi")
STORES = ("memory", "sqlite", "postgres", "redis", "tiered")
OVER = timedelta(microseconds=1)


@pytest.fixture(params=[f"{entry}-{store}" for entry in ENTRIES for store in STORES])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """One entry point on a store of this test's own: a worker takes whatever it finds there."""
    entry, store = request.param.split("-")
    where: str | Tiered = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'semel.db'}"
    if store == "postgres":
        where = request.getfixturevalue("migrated_postgres_url")
    elif store == "redis":
        where = request.getfixturevalue("redis_url")
    elif store == "tiered":
        where = Tiered(where, cache=request.getfixturevalue("redis_url"))
    opened: World
    opened = (
        AsgiWorld(lambda: stores.async_store(where)) if entry == "asgi" else ThreadWorld(lambda: stores.store(where))
    )
    yield opened
    opened.close()


@pytest.fixture
def offices(world: World) -> Offices:
    return partial(Office, world)


@pytest.fixture
def office(world: World) -> Office:
    """One that accepts every request."""
    return Office(world)


@pytest.fixture(params=ENTRIES)
def any_offices(request: pytest.FixtureRequest) -> Iterator[Offices]:
    """For what no store has a part in."""
    url, entry = "memory://", request.param
    opened: World
    opened = AsgiWorld(lambda: stores.async_store(url)) if entry == "asgi" else ThreadWorld(lambda: stores.store(url))
    yield partial(Office, opened)
    opened.close()


def is_accepted(response: Response, state: str = "pending") -> bool:
    body = response.json()
    assert response.header("retry-after") == "1"
    assert body["status_url"] == location(response)
    return (response.status, body["state"]) == (202, state)


def test_from_the_202_to_the_answer(office: Office) -> None:
    """202 with Location and Retry-After; the same at the status URL until it has run; then its answer, to whoever asks
    there, and as a replay to whoever sends it again. It runs once.
    """
    first = office.send()
    assert is_accepted(first)
    assert location(first).startswith("/semel/operations/")
    assert (first.header("preference-applied"), office.runs) == (None, 0)
    assert is_accepted(office.ask(first))
    again = office.send()
    assert is_accepted(again)
    assert location(again) == location(first)
    assert [record.state for record in office.perform(Browse(10, state=State.PENDING))] == [State.PENDING]

    assert office.work() == FinishReport(finished=1)
    assert [(call.key, call.attempt, call.body) for call in office.shop.runs] == [("key-1", 1, b'{"amount": 5}')]
    told = office.ask(first)
    assert (told.status, told.json(), told.is_replay) == (201, {"payment": 1}, False)
    assert told.header("location") == "/payments/1"
    replay = office.send()
    assert (replay.status, replay.json(), replay.is_replay) == (201, {"payment": 1}, True)
    assert office.work() == FinishReport()
    assert office.runs == 1


def test_while_it_runs(office: Office) -> None:
    """While a worker runs it, the status URL and every duplicate say that it is processing, and nobody takes it."""
    with Gate() as gate:
        office.shop.handler = gate
        first = office.send()
        working = office.start_work()
        gate.wait()
        assert is_accepted(office.ask(first), "processing")
        again = office.send()
        assert is_accepted(again, "processing")
        assert location(again) == location(first)
        assert office.work() == FinishReport()
        gate.open()
        assert working.result(HANG_SECONDS) == FinishReport(finished=1)
    assert office.runs == 1


def test_another_request_under_the_same_key(office: Office) -> None:
    """A key that was accepted for one request is refused for another, as ever."""
    office.send()
    assert office.send(body=b"{}").code == "idempotency-key-reused"


def test_only_its_owner_is_told(office: Office) -> None:
    """Anybody else is told that there is no such operation, before it has run and after."""
    first = office.send()
    for _ in range(2):
        for stranger in ("mallory", ""):
            refused = office.ask(first, x_account=stranger)
            assert (refused.status, refused.code) == (404, "operation-not-found")
        office.work()
    assert office.ask(first).status == 201


def spelled(*parts: Any) -> str:
    return urlsafe_b64encode(json.dumps(parts, separators=(",", ":")).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "a/b",
        "%00",
        "W10",
        "A" * 9000,
        spelled("key-1", "", 1, "soon"),
        spelled("key-1", ""),
        spelled("key-1", 1, 2, 3),
        spelled("\x00", "", 1, 4102444800),
        spelled("\ud800", "", 1, 4102444800),
        spelled("key-1", "\x00", 1, 4102444800),
        spelled("nobody's", "", 1, 4102444800),
        "bm90IGpzb24",
        "\u00e9",
    ],
)
def test_malformed_names(office: Office, name: str) -> None:
    """What names no operation is not found, whatever it is."""
    refused = office.ask(f"/semel/operations/{name}")
    assert (refused.status, refused.code, refused.error) == (404, "operation-not-found", None)


def test_expired(offices: Offices) -> None:
    """Past its retention it is gone (410), whether or not the reaper has been there; to strangers it never was."""
    office = offices(Policy.ietf(in_progress="accept", retention=timedelta(milliseconds=1), lease=OVER))
    first = office.send()
    wait_until(lambda: bool(office.records()[0].is_expired))
    assert (office.ask(first).status, office.ask(first).code) == (410, "operation-expired")
    assert office.work() == FinishReport(), "What nobody asks for any more is not run."
    while office.records():
        reap(office)
    wait_until(lambda: office.ask(first).status == 410)  # The name tells whole seconds.
    assert office.ask(first).code == "operation-expired"


def reap(office: Office) -> None:
    world = office.world
    if isinstance(world, AsgiWorld):
        world.submit(semel.work.AsyncReaper(world.store).run_once()).result(HANG_SECONDS)
    else:
        Reaper(world.store).run_once()


def test_late_requests_are_refused(offices: Offices) -> None:
    """With late="refuse" a retry past the retention is refused, and the status URL says that it is expired."""
    office = offices(Policy.ietf(in_progress="accept", retention=timedelta(milliseconds=1), lease=OVER, late="refuse"))
    first = office.send()
    wait_until(lambda: bool(office.records()[0].is_expired))
    reap(office)
    assert (office.send().code, office.ask(first).code) == ("idempotency-key-expired", "operation-expired")
    assert office.runs == 0


def test_expired_and_sent_again(offices: Offices) -> None:
    """After its retention the same key is a new operation, with an address of its own."""
    office = offices(Policy.ietf(in_progress="accept", retention=timedelta(seconds=2), lease=OVER))
    first = office.send()
    wait_until(lambda: bool(office.records()[0].is_expired))
    second = office.send()
    assert is_accepted(second)
    assert location(second) != location(first)
    wait_until(lambda: office.ask(first).code == "operation-expired")  # Its name tells whole seconds.
    assert office.ask(second).status == 202


def test_outcome_unknown(office: Office) -> None:
    """Of one that is parked the status URL says what its retry would be told: 409, outcome unknown."""
    first = office.send()
    (record,) = office.records()
    office.perform(Park(hold_of(record)))
    assert (office.ask(first).status, office.ask(first).code) == (409, "outcome-unknown")
    assert office.send().code == "outcome-unknown"


def hold_of(record: Record) -> Hold:
    return Hold(record.scope, record.key, record.attempt, record.token)


RESPOND_ASYNC = Policy.ietf(preferences={"wait", "respond-async"})


def test_respond_async(offices: Offices) -> None:
    """Where the policy allows it, a client that prefers to be answered later is, and is told that it was heard."""
    office = offices(RESPOND_ASYNC)
    first = office.send(prefer="respond-async")
    assert is_accepted(first)
    assert first.header("preference-applied") == "respond-async"
    plain = office.send()
    assert is_accepted(plain)
    assert plain.header("preference-applied") is None
    assert office.work() == FinishReport(finished=1)
    assert office.send(prefer="respond-async").is_replay


def test_respond_async_while_the_first_runs(offices: Offices) -> None:
    """A duplicate that prefers it is told where to ask, while the first is run by the request that brought it."""
    office = offices(RESPOND_ASYNC)
    with Gate() as gate:
        office.shop.handler = gate
        running = office.start()
        gate.wait()
        again = office.send(prefer="respond-async, wait=1")
        assert is_accepted(again, "processing")
        assert is_accepted(office.ask(again), "processing")
        assert office.send().status == 409
        gate.open()
        assert running.result(HANG_SECONDS).status == 201
    assert office.ask(again).status == 201


def test_respond_async_without_permission(any_offices: Offices) -> None:
    """Where the policy does not allow it, the preference changes nothing, and nothing is mounted."""
    office = any_offices(Policy.ietf())
    first = office.send(prefer="respond-async")
    assert (first.status, first.header("preference-applied"), office.runs) == (201, None, 1)
    assert office.ask("/semel/operations/x").code is None


def test_long_polling(offices: Offices) -> None:
    """A client that says `Prefer: wait=…` at the status URL is answered when the operation ends."""
    office = offices(Policy.ietf(in_progress="accept", wait=timedelta(seconds=HANG_SECONDS)))
    first = office.send()
    waiting = office.start(location(first), method="GET", prefer=f"wait={HANG_SECONDS}")
    wait_until(lambda: office.app.guard.room.count == 1)
    office.work()
    assert waiting.result(HANG_SECONDS).status == 201


def test_long_polling_has_an_end(any_offices: Offices) -> None:
    """When the time is over, it is told that the operation has not ended."""
    office = any_offices()
    first = office.send()
    assert is_accepted(office.ask(first, prefer="wait=1"))


@pytest.mark.parametrize("status", [200, 204, 302, 400, 404, 405, 409, 422, 500])
def test_what_ends_it(any_offices: Offices, status: int) -> None:
    """Any answer that says more than "not now" is its end, and the client finds it at the status URL."""
    office = any_offices()
    office.shop.handler = lambda _: Reply(status, b"" if status == 204 else b"said")
    first = office.send()
    assert office.work() == FinishReport(finished=1)
    assert (office.ask(first).status, office.ask(first).body) == (status, b"" if status == 204 else b"said")


@pytest.mark.parametrize("status", [401, 403, 407, 408, 421, 425, 429])
def test_what_does_not(any_offices: Offices, status: int) -> None:
    """An answer for want of time, or of credentials, which are not stored, is no end: it is tried again later."""
    office = any_offices()
    office.shop.handler = lambda _: Reply(status, b"said")
    first = office.send()
    assert office.work() == FinishReport(failed=1)
    assert is_accepted(office.ask(first), "processing")
    assert is_accepted(office.send(), "processing")
    assert office.work() == FinishReport()


def test_nobody_answers_for_the_path(any_offices: Offices) -> None:
    """A path that the app does not know is an end, too: 404, as its client would have got at once."""
    office = any_offices()
    if isinstance(office.world, ThreadWorld):
        office.shop.handler = lambda _: Reply(404, b"none")
    first = office.send("/unknown")
    assert office.work() == FinishReport(finished=1)
    told = office.ask(first)
    assert (told.status, told.code) == (404, None)


def test_exceptions(any_offices: Offices, caplog: pytest.LogCaptureFixture) -> None:
    """A handler that raises has failed for good, unless it says that nothing happened: then it is tried again."""
    office = any_offices()

    def fails(call: Call) -> Reply:
        raise (NoEffect if call.key == "nothing" else RuntimeError)("broken")

    office.shop.handler = fails
    broken = office.send()
    assert office.work() == FinishReport(finished=1)
    assert office.ask(broken).status == 500
    nothing = office.send(key="nothing")
    assert office.work() == FinishReport(failed=1)
    assert office.ask(nothing).status == 202
    assert "RuntimeError: broken" in caplog.text


def test_streams(any_offices: Offices) -> None:
    """An answer that is too large to be kept is lost, and the status URL says that the operation is done."""
    office = any_offices(Policy.ietf(in_progress="accept", max_response_body=1000))
    office.shop.handler = lambda _: Reply(201, chunks(600, 3))
    first = office.send()
    assert office.work() == FinishReport(finished=1)
    assert (office.ask(first).status, office.ask(first).code) == (409, "response-not-replayable")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-ndjson"])
def test_slow_streams(any_offices: Offices, media_type: str) -> None:
    """However long an accepted operation takes to answer, and by whatever parts, its client gets the whole answer."""
    office = any_offices(Policy.ietf(in_progress="accept", max_response_time=timedelta(microseconds=1)))
    office.shop.handler = lambda _: Reply(201, iter([b"1\n", b"2\n", b"3\n"]), (("content-type", media_type),))
    first = office.send()
    assert office.work() == FinishReport(finished=1)
    assert (office.ask(first).status, office.ask(first).body) == (201, b"1\n2\n3\n")


def test_mounted(office: Office) -> None:
    """Under a mount point the address has it in front, and the stored request is run from there."""
    first = office.send(mount="/api")
    assert location(first).startswith("/api/semel/operations/")
    assert office.ask(location(first)).code is None, "At the root nothing is known below the mount point."
    assert is_accepted(office.ask(location(first).removeprefix("/api"), mount="/api"))
    office.work()
    assert office.shop.runs[-1].path == "/api/pay"
    assert office.ask(location(first).removeprefix("/api"), mount="/api").status == 201


@pytest.mark.parametrize("mount", ["//evil.example", "/\\evil.example", "evil.example"])
def test_mounted_at_another_host(any_offices: Offices, mount: str) -> None:
    """A mount point that a proxy's header has made up sends no client to another host: the address is a path here."""
    where = location(any_offices().send("/pay", mount=mount))
    assert where.startswith("/")
    assert not where.startswith(("//", "/\\"))


def test_line_break_in_a_path(any_offices: Offices, caplog: pytest.LogCaptureFixture) -> None:
    """A path with an escaped line break in it is one line of the log, whatever is told of it."""
    office = any_offices()
    office.send("/pay/1%0AERROR%20forged%0D%1b")
    office.app.routes = type(office.app.routes)(None, "/elsewhere")
    office.work()
    (record,) = [each for each in caplog.records if "parked" in each.getMessage()]
    assert "forged" in record.getMessage()
    assert record.getMessage().isprintable()


def test_head(office: Office) -> None:
    """HEAD is GET without the body: the same status and headers, its length included."""
    first = office.send()
    for _ in range(2):
        whole, head = office.ask(first), office.ask(first, method="HEAD")
        assert (head.status, head.headers, head.body) == (whole.status, whole.headers, b"")
        assert head.header("content-length") == str(len(whole.body))
        office.work()


@pytest.mark.parametrize("method", ["POST", "DELETE", "OPTIONS"])
def test_other_methods(any_offices: Offices, method: str) -> None:
    """Whatever else is sent to a status URL is the app's to answer."""
    office = any_offices(ACCEPT, paths="/pay")
    first = office.send()
    assert office.send(location(first), method=method, key=None).code is None


@pytest.mark.parametrize("key", ["k" * 255, '"a \\"quoted\\" one"', '"a, b; c=d"', "/../%2e?#&", "~" * 64])
def test_strange_keys(office: Office, key: str) -> None:
    """Whatever a key may be made of, its address is found again."""
    first = office.send(key=key)
    assert is_accepted(office.ask(first))
    office.work()
    assert office.ask(first).status == 201


def test_one_key_on_two_endpoints(offices: Offices) -> None:
    """Where that is two operations, each has an address of its own."""
    office = offices(Policy.ietf(in_progress="accept", scope_by="operation"))
    one, other = office.send("/pay/one"), office.send("/pay/%C3%B6ther")
    assert location(one) != location(other)
    assert office.work() == FinishReport(finished=2)
    office.shop.handler = None
    assert {office.ask(each).json()["payment"] for each in (one, other)} == {1, 2}
    assert office.ask(one, x_account="mallory").status == 404


def test_keys_of_the_body(offices: Offices) -> None:
    """A request without a key, whose body makes one, is accepted as any other; its window is its retention."""
    body_hash = BodyHash(fields=["amount"], window=timedelta(minutes=1))
    office = offices(Policy.ietf(in_progress="accept", key_from=body_hash))
    first = office.send(key=None)
    assert location(office.send(key=None)) == location(first)
    assert location(office.send(key=None, body=b'{"amount": 6}')) != location(first)
    assert office.work() == FinishReport(finished=2)
    assert office.ask(first).status == 201


def test_progress(office: Office) -> None:
    """What the handler says of its progress is in the state, until it has ended."""

    def half_way(_call: Call) -> Reply:
        semel.current().progress(0.5, "half-way")
        state = office.ask(first).json()
        return Reply(200, json.dumps([state["progress"], state["note"]]).encode())

    office.shop.handler = half_way
    first = office.send()
    assert (first.json()["progress"], first.json()["note"]) == (None, None)
    assert office.work() == FinishReport(finished=1)
    assert office.ask(first).json() == [0.5, "half-way"]


def test_oldest_first(office: Office) -> None:
    """They are begun in the order in which they were accepted."""
    for number in range(5):
        office.send(key=f"key-{number}")
    office.work()
    assert [call.key for call in office.shop.runs] == [f"key-{number}" for number in range(5)]


def test_its_own_address(any_offices: Offices) -> None:
    """The path of the addresses can be chosen."""
    office = any_offices(ACCEPT, status_path="/v1/jobs")
    first = office.send()
    assert location(first).startswith("/v1/jobs/")
    assert is_accepted(office.ask(first))


@pytest.mark.parametrize("path", ["", "/", "jobs", "/jobs/", "/jobs/*", "/jobs//x", "/{name}", 5])
def test_a_path_that_can_not_be(any_offices: Offices, path: Any) -> None:
    """A path that is none is said to be wrong at start, even where nothing is accepted."""
    with pytest.raises(ConfigurationError, match="status_path must be a plain path"):
        any_offices(Policy.ietf(), status_path=path)


@pytest.mark.parametrize("policy", [ACCEPT, RESPOND_ASYNC])
def test_nowhere_to_ask(any_offices: Offices, policy: Policy) -> None:
    """Without addresses nothing can be accepted, which is said at start."""
    with pytest.raises(ConfigurationError, match="nowhere to ask"):
        any_offices(policy, status_path=None)
    with pytest.raises(ConfigurationError, match="nowhere to ask"):
        any_offices(Policy.ietf(), paths={"/pay": policy}, status_path=None)
    assert any_offices(Policy.ietf(), status_path=None).send().status == 201


@pytest.mark.parametrize("concurrency", [0, -1, True, "4", 1.5])
def test_a_concurrency_that_can_not_be(any_offices: Offices, concurrency: Any) -> None:
    """How many are run at once is a number, 1 or more."""
    with pytest.raises(ConfigurationError, match="concurrency is how many"):
        any_offices(work=True, concurrency=concurrency)


def test_names_are_spelled_in_one_way(office: Office) -> None:
    """A name with anything added to it is another, and not found."""
    first = office.send()
    for other in ("=", "A", "/", "%20"):
        assert office.ask(location(first) + other).status == 404
    name = Name.read(location(first).rpartition("/")[2])
    assert (name.key, name.operation) == ("key-1", "")

"""When the store can't be reached, nothing runs unprotected; and what has run is not run again."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import psycopg
import pytest
import redis

import semel
import semel.stores
from semel import Policy
from semel.core.commands import Claim, Command, Complete, Release, Renew, Save, TakeOver, Verdict
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event, State
from semel.errors import StoreUnavailable
from semel.flows import handle, steps
from semel.stores import leases
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.sqlite import file, writer
from semel.stores.step import Step
from tests.web.conftest import ENTRIES
from tests.web.harness import HANG_SECONDS, Api, AsgiWorld, Call, Gate, Reply, WsgiWorld, eventually, wait_until
from tests.web.scenarios import assert_problem, assert_replayed

T = TypeVar("T")

NOWHERE = "postgresql://nobody@127.0.0.1:9/nothing"  # port 9 is "discard", and nobody listens there


class Weather:
    """Which commands fail, and how often."""

    def __init__(self) -> None:
        self.storms: dict[type[Command[Any]], int] = {}
        #: Whether they fail because the store is full.
        self.is_full = False

    def blow(self, command: Command[Any]) -> None:
        left = self.storms.get(type(command), 0)
        if left:
            self.storms[type(command)] = left - 1
            error = StoreUnavailable("a storm", was_sent=False)
            error.has_no_space = self.is_full
            raise error


class FlakyStore(MemoryStore):
    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather

    def perform(self, command: Command[T]) -> T:
        self._weather.blow(command)
        return super().perform(command)


class AsyncFlakyStore(AsyncMemoryStore):
    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather

    def perform(self, command: Command[T]) -> Step[T]:
        try:
            self._weather.blow(command)
        except StoreUnavailable as error:
            failed = Step[T](loop=asyncio.get_running_loop())
            failed.settle(error)
            return failed
        return super().perform(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        self._weather.blow(command)
        return super().renew(command)


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture(params=ENTRIES)
def open_world(request: pytest.FixtureRequest) -> Any:
    """Open an entry point on a store that is given in both colours; close it in the end."""
    opened: list[AsgiWorld | WsgiWorld] = []

    def open_it(plain: Callable[[], Store], coloured: Callable[[], AsyncStore]) -> AsgiWorld | WsgiWorld:
        opened.append(AsgiWorld(coloured) if request.param == "asgi" else WsgiWorld(plain))
        return opened[-1]

    yield open_it
    for world in opened:
        world.close()


@pytest.fixture
def api(open_world: Any, weather: Weather) -> Api:
    return Api(open_world(lambda: FlakyStore(weather), lambda: AsyncFlakyStore(weather)))


@pytest.mark.parametrize("url", [NOWHERE, "sqlite:////no/such/folder/semel.db"])
def test_store_that_is_not_there(open_world: Any, url: str) -> None:
    """With nothing at the store's address, a keyed request is 503 with Retry-After, and the handler does not run."""
    api = Api(open_world(lambda: semel.stores.store(url), lambda: semel.stores.async_store(url)))
    response = api.send()
    assert_problem(response, 503, "store-unavailable")
    assert int(response.header("retry-after") or 0) >= 1
    assert response.json()["retryable"] is True
    assert b"folder" not in response.body
    assert b"127.0.0.1" not in response.body
    assert api.runs == 0
    assert api.send(key=None).status == 201, "a request without a key needs no store"


def test_table_that_is_not_there(open_world: Any, empty_postgres_url: str) -> None:
    """A database without the table is 503, and the handler does not run."""
    api = Api(
        open_world(lambda: semel.stores.store(empty_postgres_url), lambda: semel.stores.async_store(empty_postgres_url))
    )
    assert_problem(api.send(), 503, "store-unavailable")
    assert api.runs == 0


def test_store_that_fails_at_the_claim(api: Api, weather: Weather) -> None:
    """A claim that fails is 503; when the store is back, the same request runs."""
    weather.storms[Claim] = 1
    assert_problem(api.send(), 503, "store-unavailable")
    assert api.runs == 0
    assert api.send().status == 201


def test_store_that_fails_between_claim_and_complete(api: Api, weather: Weather) -> None:
    """An answer that can't be stored does not leave: 503 says that it may have taken effect, and the key is kept."""
    weather.storms[Complete] = 100
    response = api.send()
    assert_problem(response, 503, "answer-not-stored")
    assert int(response.header("retry-after") or 0) >= 1
    assert b"payment" not in response.body
    assert [record.state for record in api.records()] == [State.PROCESSING]
    assert_problem(api.send(), 409, "idempotency-key-in-progress")
    assert api.runs == 1
    weather.storms.clear()


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has its 503 at once."""
    for module in (handle, steps):
        monkeypatch.setattr(module, "COMPLETE_PAUSES", (timedelta(0),))


def end_lease(api: Api) -> None:
    world: Any = api.world
    world.store.age(timedelta(hours=1))


def stored_answer(api: Api) -> Answer:
    """Wait until the one operation has ended, and return its answer."""
    wait_until(lambda: api.records()[0].answer is not None)
    [answer] = [record.answer for record in api.records()]
    assert answer is not None
    return answer


@pytest.mark.usefixtures("impatience")
def test_answer_that_waits_for_the_store(api: Api, weather: Weather) -> None:
    """A worker keeps an answer that the store does not take, and stores it when the store is back: retries get it."""
    weather.storms[Complete] = 4
    assert_problem(api.send(), 503, "answer-not-stored")
    assert stored_answer(api).status == 201
    retry = api.send()
    assert (retry.status, retry.is_replay, retry.body) == (201, True, b'{"payment": 1}')
    assert api.runs == 1


@pytest.mark.usefixtures("impatience")
@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
def test_lease_that_ends_while_the_store_is_away(
    api: Api, weather: Weather, on_crash: Literal["rerun", "refuse"]
) -> None:
    """Where the lease has run out meanwhile, this process knows that it has the answer: a retry is told to come back,
    and nothing runs again.
    """
    api = api.under(Policy.ietf(on_crash=on_crash))
    weather.storms |= {Complete: 10_000, Renew: 10_000}
    assert_problem(api.send(), 503, "answer-not-stored")
    end_lease(api)
    assert_problem(api.send(), 409, "idempotency-key-in-progress")
    weather.storms.clear()
    assert stored_answer(api).status == 201
    assert api.send().is_replay
    assert api.runs == 1


@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
def test_lease_that_ends_while_its_handler_runs(
    api: Api, weather: Weather, on_crash: Literal["rerun", "refuse"]
) -> None:
    """Where a lease has run out because the store was away, this process knows that its handler still runs: a retry is
    told to come back, and the handler's answer is the one.
    """
    api = api.under(Policy.ietf(on_crash=on_crash))
    weather.storms[Renew] = 10_000
    with Gate() as gate:
        api.shop.handler = gate
        first = api.start()
        gate.wait()
        end_lease(api)
        assert_problem(api.send(), 409, "idempotency-key-in-progress")
        gate.open()
        assert_replayed(first.result(HANG_SECONDS), api.send())
    assert api.runs == 1


def another_worker(api: Api, weather: Weather) -> Hold:
    """Have a worker of another process hold the key; its lease ends while the store is away."""
    api.send()
    api.world.store.age(timedelta(days=2))  # type: ignore[attr-defined]  # as in end_lease
    [record] = api.records()
    seen = Hold(record.scope, record.key, record.attempt, record.token)
    lease = timedelta(seconds=30)
    theirs = api.world.perform(
        TakeOver(Claim(record.scope, record.key, bytes(range(16)), record.fingerprint, lease, timedelta(1)), seen)
    )
    weather.storms[Claim] = 1
    assert_problem(api.send(), 503, "store-unavailable")
    end_lease(api)
    return theirs  # type: ignore[no-any-return]  # what a store says to any command


def test_lease_of_another_process_that_ended_while_the_store_was_away(api: Api, weather: Weather) -> None:
    """A key whose lease ran out while the store was away is left to its worker for a moment: if that lives, it renews
    its lease as soon as the store is back, and nothing runs twice.
    """
    theirs = another_worker(api, weather)
    assert_problem(api.send(), 409, "idempotency-key-in-progress")
    assert api.world.perform(Renew(((theirs, timedelta(seconds=30)),))) == frozenset()
    assert api.world.perform(Complete(theirs, Event.COMPLETE, Answer(200, (), b"theirs"))) is Verdict.DONE
    assert api.send().body == b"theirs"
    assert api.runs == 1


def test_worker_that_died_while_the_store_was_away(api: Api, weather: Weather, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose worker died while the store was away is free a moment after the store is back."""
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.1)
    another_worker(api, weather)
    assert eventually(api.send, lambda response: response.status == 201).json() == {"payment": 2}


@pytest.mark.usefixtures("impatience")
def test_answer_that_another_has_taken_over(api: Api, weather: Weather, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that waits is fenced as any other: where another worker has taken the key over, it is thrown away."""
    weather.storms |= {Complete: 10_000, Renew: 10_000}
    assert_problem(api.send(), 503, "answer-not-stored")
    end_lease(api)
    [record] = api.records()
    seen = Hold(record.scope, record.key, record.attempt, record.token)
    claim = Claim(record.scope, record.key, bytes(range(16)), record.fingerprint, timedelta(1), timedelta(1))
    theirs = api.world.perform(TakeOver(claim, seen))
    weather.storms.clear()
    wait_until(lambda: "Fenced" in caplog.text)
    assert api.world.perform(Complete(theirs, Event.COMPLETE, Answer(200, (), b"theirs"))) is Verdict.DONE
    assert api.send().body == b"theirs"


@pytest.mark.usefixtures("impatience")
def test_result_of_an_effect_that_waits_for_the_store(api: Api, weather: Weather) -> None:
    """A provider was called, and the store did not take the result: the worker keeps that, too. A retry goes on after
    the effect, and does not have to ask what became of it.
    """
    charges: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        charges.append(idempotency_key)
        weather.storms[Save] = 5
        return "ch_1"

    def pay(_call: Call) -> Reply:
        return Reply(201, semel.current().effect("charge", charge, on_unknown="park").encode())

    api.shop.handler = pay
    assert api.send().status == 503
    assert_problem(api.send(), 409, "idempotency-key-in-progress")
    retry = eventually(api.send, lambda response: response.code != "idempotency-key-in-progress")
    assert (retry.status, retry.body) == (201, b"ch_1")
    assert len(charges) == 1


class FullConnection(sqlite3.Connection):
    """To a file on a disk that is nearly full: what a claim takes is there, and not what an answer of 900 kB does."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.execute("PRAGMA max_page_count = 200").close()


#: As PostgreSQL says it of a full tablespace.
FULL_TABLE = """
CREATE FUNCTION be_full() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER full_disk BEFORE UPDATE ON semel_keys
FOR EACH ROW WHEN (length(NEW.body) > 1000) EXECUTE FUNCTION be_full();
"""


@pytest.fixture(params=["sqlite", "postgres"])
def full_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store in which claims still fit."""
    if request.param == "sqlite":
        monkeypatch.setattr(file, "connect", partial(file.connect, kind=FullConnection))
        monkeypatch.setattr(writer, "connect", partial(file.connect, kind=FullConnection))
        url: str = request.getfixturevalue("sqlite_url")
        return url
    url = request.getfixturevalue("migrated_postgres_url")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FULL_TABLE)
    return url


def test_store_without_room_for_an_answer(open_world: Any, full_store: str) -> None:
    """Where a claim fits and the answer does not, it is stored at once that the operation is done: no retry runs."""
    api = Api(open_world(lambda: semel.stores.store(full_store), lambda: semel.stores.async_store(full_store)))
    api.answer(Reply(201, bytes(900_000)))
    assert api.send().status == 201
    assert_problem(api.send(), 409, "response-not-replayable")
    assert api.runs == 1


@pytest.mark.usefixtures("impatience")
def test_store_without_room_for_anything(api: Api, weather: Weather) -> None:
    """Where not even that fits, the worker keeps the whole answer: its client has not seen it, and may get it yet."""
    weather.storms[Complete] = 10
    weather.is_full = True
    assert_problem(api.send(), 503, "answer-not-stored")
    assert stored_answer(api).status == 201
    retry = api.send()
    assert (retry.status, retry.is_replay, retry.body) == (201, True, b'{"payment": 1}')
    assert api.runs == 1


def test_store_that_loses_its_data(open_world: Any, redis_url: str) -> None:
    """Where the record is gone when the handler ends, the client is told that the outcome is unknown, and not to retry:
    a retry would be a new operation.
    """
    api = Api(open_world(lambda: semel.stores.store(redis_url), lambda: semel.stores.async_store(redis_url)))

    def pay_and_lose(_call: Call) -> Reply:
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()
        return Reply()

    api.shop.handler = pay_and_lose
    response = api.send()
    assert_problem(response, 409, "outcome-unknown")
    assert response.json()["retryable"] is False


def test_store_that_is_back_in_time_for_the_answer(api: Api, weather: Weather) -> None:
    """A short outage between claim and answer is waited out, and nobody notices."""
    weather.storms[Complete] = 2
    first = api.send()
    assert first.status == 201
    assert_replayed(first, api.send())


def test_store_that_fails_at_the_release(api: Api, weather: Weather) -> None:
    """A key that can't be freed is left to its lease; the answer leaves all the same."""
    api.answer(Reply(429, b"slow down"))
    weather.storms[Release] = 1
    assert api.send().status == 429
    assert_problem(api.send(), 409, "idempotency-key-in-progress")


def test_storm_does_not_touch_what_is_stored(api: Api, weather: Weather) -> None:
    """A replay needs the claim and nothing else."""
    first = api.send()
    weather.storms |= {Complete: 100, Release: 100}
    assert_replayed(first, api.send())


def test_two_requests_and_one_storm(api: Api, weather: Weather) -> None:
    """One key's misfortune is not another's."""
    weather.storms[Complete] = 4
    unlucky: Future[Any] = api.start(key="a")
    assert_problem(unlucky.result(HANG_SECONDS), 503, "answer-not-stored")
    assert api.send(key="b").status == 201

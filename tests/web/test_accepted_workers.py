"""Workers in the app itself (`work=True`): they are told of what was accepted there, and say no more than they may."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import semel
from semel import Policy, stores
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Browse, Discard
from semel.core.record import Hold
from semel.core.state import State
from semel.errors import ConfigurationError, LeaseLost, NotGuarded
from semel.flows.finish import FinishReport
from semel.work import backlog
from tests.web.accepted import ACCEPT, Office, ThreadWorld, World
from tests.web.harness import HANG_SECONDS, AsgiWorld, Call, Gate, Reply, wait_until


@pytest.fixture(params=["asgi", "wsgi"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    url, entry = "memory://", request.param
    opened: World
    opened = AsgiWorld(lambda: stores.async_store(url)) if entry == "asgi" else ThreadWorld(lambda: stores.store(url))
    yield opened
    opened.close()


@pytest.fixture
def working(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    """An app whose workers look once, and then only when they are told."""
    monkeypatch.setattr(backlog, "ACCEPT_INTERVAL", timedelta(days=1))
    office = Office(world, work=True, concurrency=2)
    yield office
    stopping = office.app.workers.stop
    if isinstance(world, AsgiWorld):
        world.submit(stopping()).result(HANG_SECONDS)
    else:
        stopping()


def test_told_at_once(working: Office) -> None:
    """What is accepted in this process is begun at once, though the next look is a day away."""
    for number in range(10):
        first = working.send(key=f"key-{number}")
        assert first.status == 202
        wait_until(lambda where=first: working.ask(where).status == 201)  # type: ignore[misc]
    assert working.runs == 10


def test_a_long_one_holds_up_nobody(working: Office) -> None:
    """One that takes its time occupies one worker, and the other goes on."""
    with Gate() as gate:
        working.shop.handler = lambda call: gate(call) if call.key == "long" else Reply()
        long = working.send(key="long")
        gate.wait()
        for number in range(3):
            short = working.send(key=f"key-{number}")
            wait_until(lambda where=short: working.ask(where).status == 201)  # type: ignore[misc]
        assert working.ask(long).json()["state"] == "processing"
        gate.open()
        wait_until(lambda: working.ask(long).status == 201)


async def test_the_app_ends_after_its_workers() -> None:
    """When a server stops, what is under way ends before the app closes what it had opened; nothing else is begun."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                told.append(word)
                await send({"type": f"lifespan.{word}.complete"})
            return
        begun.set()
        await go_on.wait()
        told.append("run")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body"})

    entry = IdempotencyMiddleware(
        app, store="memory://", scope=semel.SINGLE_TENANT, policy=ACCEPT, work=True, concurrency=1
    )

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def nowhere(_message: Any) -> None:
        pass

    async def stop() -> Any:
        if "startup" not in told:
            return {"type": "lifespan.startup"}
        for key in (b"key-1", b"key-2"):
            scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"idempotency-key", key)]}
            await entry(scope, receive, nowhere)
        await begun.wait()
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        return {"type": "lifespan.shutdown"}

    await asyncio.wait_for(entry({"type": "lifespan"}, stop, nowhere), HANG_SECONDS)
    assert told == ["startup", "run", "shutdown"]
    records = await entry.store.perform(Browse(9))
    assert sorted(each.state for each in records) == [State.COMPLETE, State.PENDING]


def test_nothing_is_begun_when_the_server_stops(world: World) -> None:
    """A server that is told to stop begins nothing that it has accepted, still tells its state, and accepts no more."""
    office = Office(world)
    first = office.send()
    office.app.drain()
    assert office.work() == FinishReport()
    assert office.ask(first).json()["state"] == "pending"
    assert office.send(key="key-2").code == "shutting-down"
    assert office.runs == 0


def test_progress_of_an_operation_that_is_lost(world: World) -> None:
    """A worker whose operation another has, or an operator has discarded, is told so when it says how far it is."""
    office = Office(world)
    raised: list[type[BaseException]] = []

    def discarded(_call: Call) -> Reply:
        hold: Hold = semel.current().hold
        office.perform(Discard(hold))
        for _ in range(2):
            try:
                semel.current().progress(0.5)
            except LeaseLost as error:
                raised.append(type(error))
        return Reply()

    office.shop.handler = discarded
    office.send()
    assert office.work() == FinishReport(failed=1)
    assert raised == [LeaseLost, LeaseLost]


@pytest.mark.parametrize("wrong", [(-0.1,), (1.1,), (True,), ("half",), (0.5, "x" * 201), (0.5, 7), (float("nan"),)])
def test_progress_that_can_not_be(world: World, wrong: tuple[object, ...]) -> None:
    """Progress is a number between 0 and 1, and a short text; all else is a mistake of the handler's."""
    office = Office(world, Policy.ietf())
    errors: list[str] = []

    def says(_call: Call) -> Reply:
        with pytest.raises(ConfigurationError) as caught:
            semel.current().progress(*wrong)  # type: ignore[arg-type]
        errors.append(str(caught.value))
        return Reply()

    office.shop.handler = says
    assert office.send().status == 201
    assert len(errors) == 1


def test_progress_of_an_ordinary_request(world: World) -> None:
    """A request that is run at once may say how far it is, too."""
    office = Office(world, Policy.ietf())

    def says(_call: Call) -> Reply:
        semel.current().progress(1, "done")
        (record,) = office.records()
        assert record.state is State.PROCESSING
        assert record.milestone is not None
        return Reply(200, record.milestone.note.encode() if record.milestone.note else b"")

    office.shop.handler = says
    assert office.send().body == b"done"


def test_progress_in_atomic_mode(world: World) -> None:
    """In atomic mode nobody could see it, which is said."""
    office = Office(world, Policy.ietf(mode="atomic"))

    def says(_call: Call) -> Reply:
        with pytest.raises(ConfigurationError, match='Use mode="guard"'):
            semel.current().progress(0.5)
        return Reply()

    office.shop.handler = says
    assert office.send().status == 201


def test_progress_inside_a_phase(world: World) -> None:
    """Inside a phase, whose transaction is open, it would wait for itself; before and after, it is fine."""
    office = Office(world)

    def inside(_connection: object) -> str:
        with pytest.raises(ConfigurationError, match="inside a phase"):
            semel.current().progress(0.5)
        return "done"

    def says(_call: Call) -> Reply:
        operation = semel.current()
        operation.progress(0.1)
        assert operation.phase("one", inside) == "done"
        operation.progress(0.2)
        assert operation.effect("two", lambda **_: operation.progress(0.3)) is None
        return Reply()

    office.shop.handler = says
    first = office.send()
    assert office.work() == FinishReport(finished=1)
    assert office.ask(first).status == 201


def test_progress_of_nobody(world: World) -> None:
    """Where no operation is, there is nobody to say it for."""
    with pytest.raises(NotGuarded):
        semel.current().progress(0.5)
    assert Office(world, ACCEPT).runs == 0

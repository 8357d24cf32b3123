"""Handlers that work in phases and effects, through both entry points: what a retry repeats, and what it never does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route, request_response

import semel
import semel.asgi
import semel.wsgi
from semel import CANT_TELL, NOT_APPLIED, Applied, NoEffect, Policy
from semel.cli.application import middleware_of, started
from semel.core.commands import Claim, Look, TakeOver, Unpark
from semel.core.record import Hold, Record
from semel.core.recovery import Done, read_back
from semel.core.state import State
from semel.errors import LeaseLost, RecoveryPointLost, StepInsideStep, StepRepeated, StoreUnavailable
from semel.stores.leases import Leases
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.work import AsyncCompleter, Completer
from tests.web.harness import HANG_SECONDS, Request, Response, call_asgi, call_wsgi

LEASE = timedelta(seconds=0.3)
SEND = Request(
    target="/rides",
    lines=(("Idempotency-Key", b"key-1"), ("Content-Type", b"application/json")),
    body=b'{"to": "Mars"}',
)


class Clock:
    """The memory store's own clock, put forward by tests."""

    def __init__(self) -> None:
        self.now = datetime(2025, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def move(self, duration: timedelta) -> None:
        self.now += duration


class Provider:
    """Somebody outside, who honours keys and remembers every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.charges: dict[str, int] = {}
        self.fails: list[Exception] = []

    def charge(self, amount: int, *, idempotency_key: str) -> dict[str, Any]:
        self.calls.append(idempotency_key)
        self.charges.setdefault(idempotency_key, amount)
        if self.fails:
            raise self.fails.pop(0)
        return {"charge": idempotency_key, "amount": amount}


@dataclass(frozen=True)
class Step:
    kind: str
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


class Api:
    """One guarded handler, on a store whose clock can be moved. It takes the test's steps, one by one."""

    def __init__(self, entry: str, **policy: Any) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(clock=self.clock)
        self.provider = Provider()
        self.log: list[str] = []
        self.errors: list[BaseException] = []
        self.steps = [
            Step("phase", "ride_created", self.create, ("Mars",)),
            Step("effect", "charged", self.provider.charge, (5,)),
            Step("phase", "noted", self.note),
        ]
        self.is_async = entry == "asgi"
        settings: dict[str, Any] = {"scope": lambda _: "alice", "policy": Policy.ietf(lease=LEASE, **policy)}
        if self.is_async:
            app = Starlette(routes=[Route("/rides", self._serve_async, methods=["POST"])])
            self.asgi = semel.asgi.IdempotencyMiddleware(app, store=AsyncMemoryStore(memory=self.memory), **settings)
        else:
            self.wsgi = semel.wsgi.IdempotencyMiddleware(self._serve, store=self.memory, **settings)
            _leases.append(self.wsgi.guard.leases)

    def send(self) -> Response:
        if self.is_async:
            return asyncio.run(asyncio.wait_for(call_asgi(self.asgi, SEND), HANG_SECONDS))
        return call_wsgi(self.wsgi, SEND)

    def complete(self) -> str:
        """Let the completer run once."""
        if self.is_async:
            return str(asyncio.run(AsyncCompleter(AsyncMemoryStore(memory=self.memory), self.asgi.finish).run_once()))
        return str(Completer(self.memory, self.wsgi.finish).run_once())

    def drain(self) -> None:
        if self.is_async:
            self.asgi.drain()
        else:
            self.wsgi.drain()

    def lose(self) -> None:
        """Another worker takes the operation over, after this one was silent for too long."""
        record = self.record
        self.clock.move(LEASE)
        claim = Claim("alice", "key-1", b"another-worker--", b"", timedelta(days=1), timedelta(days=2))
        got = self.memory.perform(TakeOver(claim, Hold("alice", "key-1", record.attempt, record.token)))
        assert isinstance(got, Hold)

    @property
    def record(self) -> Record:
        record = self.memory.perform(Look("alice", "key-1"))
        assert record is not None
        return record

    def create(self, _connection: None, to: str) -> dict[str, Any]:
        self.log.append(f"created {to}")
        return {"id": 7, "to": to, "stops": ("Moon",)}

    def note(self, _connection: None) -> None:
        self.log.append("noted")

    async def _serve_async(self, _request: StarletteRequest) -> JSONResponse:
        operation = semel.current()
        results = []
        try:
            for step in self.steps:
                take = getattr(operation, step.kind)
                results.append(await take(step.name, step.function, *step.args, **step.settings))
        except BaseException as error:
            self.errors.append(error)
            raise
        return JSONResponse(results, 201)

    def _serve(self, _environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        operation = semel.current()
        results = []
        try:
            for step in self.steps:
                take = getattr(operation, step.kind)
                results.append(take(step.name, step.function, *step.args, **step.settings))
        except BaseException as error:
            self.errors.append(error)
            raise
        start_response("201 Created", [("Content-Type", "application/json")])
        return [json.dumps(results).encode()]


#: Their threads end with their test.
_leases: list[Leases] = []


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    while _leases:
        _leases.pop().close()


@pytest.fixture
def api(entry: str) -> Api:
    return Api(entry)


@pytest.fixture(params=["asgi", "wsgi"])
def entry(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_steps_run_once_and_in_order(api: Api) -> None:
    """Each step runs once; what it returned is what JSON makes of it; the record tells how far it came."""
    response = api.send()
    assert response.status == 201
    charge = {"charge": api.provider.calls[0], "amount": 5}
    assert response.json() == [{"id": 7, "to": "Mars", "stops": ["Moon"]}, charge, None]
    assert api.log == ["created Mars", "noted"]
    assert api.record.recovery_point == "noted"
    assert api.send().is_replay
    assert len(api.provider.calls) == 1


def test_a_retry_goes_on_where_the_first_stopped(api: Api) -> None:
    """After an error the retry repeats no finished phase, and calls the provider with the same key as before."""
    api.provider.fails.append(ConnectionError("The answer was lost."))
    first = api.send()
    assert isinstance(first.error, ConnectionError) or first.status == 500
    assert api.record.state is State.PROCESSING
    assert api.record.recovery_point == "ride_created"
    second = api.send()
    assert second.status == 201
    assert not second.is_replay
    assert api.log == ["created Mars", "noted"]
    assert len(api.provider.calls) == 2
    assert len(api.provider.charges) == 1
    assert api.record.attempt == 2
    assert api.send().body == second.body


def test_the_derived_key_is_the_one_of_derive(api: Api) -> None:
    """An effect's key is operation.derive(its name)."""
    wanted: list[str] = []
    api.steps.insert(0, Step("phase", "asked", lambda _: wanted.append(semel.current().derive("charged"))))
    api.send()
    assert wanted == api.provider.calls


def test_no_effect_in_an_effect(api: Api) -> None:
    """A provider that could not be reached did nothing: the intent is taken back, and the first phase stays."""
    api.provider.fails.append(NoEffect("No connection."))
    first = api.send()
    assert (first.status, first.code) in {(503, "no-effect"), (500, None)}
    assert read_back(api.record.steps).names == ("ride_created",)
    assert api.send().status == 201
    assert api.log == ["created Mars", "noted"]


def test_nothing_done_frees_the_key(api: Api) -> None:
    """An error in the first phase leaves nothing behind, not even the key."""
    api.steps = [Step("phase", "broken", _raise)]
    api.send()
    assert api.memory.perform(Look("alice", "key-1")) is None


def test_parked(api: Api) -> None:
    """With on_unknown="park" nobody calls twice: a retry is told that the outcome is unknown, until it is resolved."""
    api.steps[1] = Step("effect", "charged", api.provider.charge, (5,), {"on_unknown": "park"})
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    for _ in range(2):
        parked = api.send()
        assert (parked.status, parked.code) == (409, "outcome-unknown")
    assert len(api.provider.calls) == 1
    record = api.record
    assert record.state is State.UNKNOWN
    hold = Hold("alice", "key-1", record.attempt, record.token)
    resolved = read_back(record.steps).plus(Done("effect", "charged", {"charge": "by hand", "amount": 5}))
    api.memory.perform(Unpark(hold, resolved))
    after = api.send()
    assert after.status == 201
    assert after.json()[1] == {"charge": "by hand", "amount": 5}
    assert len(api.provider.calls) == 1


@pytest.mark.parametrize("is_known", [True, False, None])
def test_verify(api: Api, is_known: bool | None) -> None:
    """With verify= the provider is asked: done is taken over, not done is called, can't tell is parked."""
    asked: list[str] = []

    def ask(amount: int, *, idempotency_key: str) -> Any:
        asked.append(idempotency_key)
        return {True: Applied({"charge": "found", "amount": amount}), False: NOT_APPLIED, None: CANT_TELL}[is_known]

    api.steps[1] = Step("effect", "charged", api.provider.charge, (5,), {"verify": ask})
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    response = api.send()
    assert asked == api.provider.calls[:1]
    assert response.status == (409 if is_known is None else 201)
    assert len(api.provider.calls) == (2 if is_known is False else 1)
    if is_known:
        assert response.json()[1]["charge"] == "found"


def test_nested(api: Api) -> None:
    """A call to others inside a phase is refused where it can be seen, and says what to do."""
    api.steps = [Step("phase", "outer", lambda _: _inner(api))]
    api.send()
    assert isinstance(api.errors[0], StepInsideStep)
    assert api.provider.calls == []


def test_repeated_name(api: Api) -> None:
    """Two steps of one name are an error: the second would be given the result of the first."""
    api.steps.append(api.steps[0])
    api.send()
    assert isinstance(api.errors[0], StepRepeated)


def test_changed_code(api: Api) -> None:
    """A recovery point that the code no longer has is a loud error with both lists, not a restart."""
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    api.steps = [Step("phase", "trip_created", api.create, ("Venus",))]
    api.send()
    assert isinstance(api.errors[-1], RecoveryPointLost)
    assert "Stored: ride_created, charged. In the code: trip_created" in str(api.errors[-1])
    assert "created Venus" not in api.log


def test_code_that_takes_no_more_steps(api: Api) -> None:
    """Nor may a handler end as if the stored steps had never been taken."""
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    api.steps = []
    response = api.send()
    assert response.status != 201
    assert isinstance(response.error, RecoveryPointLost) or response.status == 500
    assert api.record.state is State.PROCESSING


async def test_step_that_nobody_waited_for() -> None:
    """A handler that ends before its step is refused, whatever it answered; the step is stopped, and nothing kept."""
    api = Api("asgi")
    stopped: list[str] = []
    called = asyncio.Event()

    async def slow(*, idempotency_key: str) -> None:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(idempotency_key)

    async def handle(_request: StarletteRequest) -> JSONResponse:
        step = asyncio.ensure_future(semel.current().effect("charged", slow))
        await called.wait()
        assert not step.done()
        return JSONResponse({}, 201)

    api.asgi.guard.app.routes[0].app = request_response(handle)  # type: ignore[attr-defined]  # the one route there is
    response = await asyncio.wait_for(call_asgi(api.asgi, SEND), HANG_SECONDS)
    assert response.status != 201
    assert len(stopped) == 1
    assert (api.record.state, read_back(api.record.steps).names) == (State.PROCESSING, ("charged",))


async def test_forgotten_await() -> None:
    """A step that was asked for and never awaited is an error, and not an answer that is kept."""
    api = Api("asgi")

    async def handle(_request: StarletteRequest) -> JSONResponse:
        forgotten: Any = semel.current().phase("noted", api.note)
        forgotten.close()
        return JSONResponse({}, 201)

    api.asgi.guard.app.routes[0].app = request_response(handle)  # type: ignore[attr-defined]  # as above
    response = await asyncio.wait_for(call_asgi(api.asgi, SEND), HANG_SECONDS)
    assert response.status != 201
    assert api.memory.perform(Look("alice", "key-1")) is None


def test_stop_iteration(api: Api) -> None:
    """A function that raises StopIteration ends with an error, in a thread too."""
    api.steps = [Step("phase", "empty", lambda _: next(iter(())))]
    response = api.send()
    assert response.error is not None or response.status == 500
    assert api.memory.perform(Look("alice", "key-1")) is None


def test_store_trouble_in_a_step(api: Api) -> None:
    """A store that fails inside a step is a 503 with Retry-After, like one that fails before it."""
    api.steps = [Step("phase", "broken", _store_trouble)]
    response = api.send()
    assert (response.status, response.code) == (503, "store-unavailable")
    assert response.header("retry-after") is not None


def test_store_trouble_after_a_step(api: Api) -> None:
    """A store that fails once a card is charged is no refusal of a request that was not run: the retry goes on."""
    charge = Step("effect", "card_charged", api.provider.charge, (5,))
    api.steps = [charge, Step("phase", "broken", _store_trouble)]
    response = api.send()
    assert (response.status, response.code) == (503, "operation-unfinished")
    assert response.header("retry-after") is not None
    api.steps = [charge, Step("phase", "broken", lambda _: None)]
    assert api.send().status == 201
    assert len(api.provider.charges) == 1


def test_completer_ends_with_the_server(entry: str) -> None:
    """A server that is told to stop takes nothing over any more."""
    api = Api(entry, store_request=True)
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    api.clock.move(timedelta(minutes=1))
    api.drain()
    assert "0 finished, 0 failed" in api.complete()
    assert api.record.attempt == 1


def test_lost_lease_stops_the_next_step(api: Api) -> None:
    """A worker that was silent for too long takes no further step, and its client is told to come back."""
    api.steps.insert(1, Step("phase", "slow", lambda _: api.lose()))
    response = api.send()
    assert isinstance(api.errors[0], LeaseLost)
    assert (response.status, response.code) == (409, "idempotency-key-in-progress")
    assert read_back(api.record.steps).names == ("ride_created",)
    assert api.provider.calls == []


def test_completer_inside_the_app() -> None:
    """A guard among a framework's own middleware finishes requests whose handlers ask for their app and its state."""
    seen: list[Any] = []
    clock = Clock()
    memory = MemoryStore(clock=clock)

    async def handle(request: StarletteRequest) -> JSONResponse:
        seen.append((request.app, request.state.rate))
        await semel.current().phase("seen", semel.in_thread(lambda _: None))
        return JSONResponse({}, 201 if len(seen) > 1 else 503)

    async def lifespan(_app: Starlette) -> AsyncIterator[dict[str, int]]:
        yield {"rate": 5}

    settings: dict[str, Any] = {"scope": lambda _: "alice", "policy": Policy.ietf(lease=LEASE, store_request=True)}
    app = Starlette(
        routes=[Route("/rides", handle, methods=["POST"])],
        middleware=[
            Middleware(semel.asgi.IdempotencyMiddleware, store=AsyncMemoryStore(memory=memory), **settings),
        ],
        lifespan=asynccontextmanager(lifespan),
    )

    async def scenario() -> str:
        guard = middleware_of(app)
        assert isinstance(guard, semel.asgi.IdempotencyMiddleware)
        async with started(app) as state:
            await call_asgi(app, SEND, state=state)
            clock.move(timedelta(minutes=1))
            return str(await AsyncCompleter(AsyncMemoryStore(memory=memory), guard.finish).run_once())

    assert "1 finished" in asyncio.run(scenario())
    assert seen == [(app, 5)] * 2


async def test_lost_lease_cancels_a_handler_on_the_loop() -> None:
    """On an event loop the handler is stopped as soon as a renewal finds that another worker has the operation."""
    api = Api("asgi")
    started = asyncio.Event()

    async def wait(*, idempotency_key: str) -> None:
        started.set()
        await asyncio.Event().wait()

    api.steps = [Step("effect", "charged", wait)]
    request = asyncio.ensure_future(call_asgi(api.asgi, SEND))
    await asyncio.wait_for(started.wait(), HANG_SECONDS)
    api.lose()
    response = await asyncio.wait_for(request, HANG_SECONDS)
    assert (response.status, response.code) == (409, "idempotency-key-in-progress")
    assert isinstance(api.errors[0], asyncio.CancelledError)


def test_drained(api: Api) -> None:
    """A server that is about to stop refuses new operations with 503 and Retry-After, and stores nothing of them."""
    api.drain()
    response = api.send()
    assert (response.status, response.code) == (503, "shutting-down")
    assert response.header("retry-after") is not None
    assert api.memory.perform(Look("alice", "key-1")) is None
    assert api.log == []


def test_drained_while_it_runs(api: Api) -> None:
    """What was begun before that is finished."""
    api.steps.insert(0, Step("phase", "told_to_stop", lambda _: api.drain()))
    assert api.send().status == 201


def test_completer(entry: str) -> None:
    """An operation whose client never comes back is finished without it, on from its recovery point."""
    api = Api(entry, store_request=True)
    api.provider.fails.append(ConnectionError("The answer was lost."))
    api.send()
    assert "0 finished" in api.complete()
    api.clock.move(timedelta(minutes=1))
    assert "1 finished" in api.complete()
    assert api.log == ["created Mars", "noted"]
    assert len(api.provider.charges) == 1
    late = api.send()
    assert late.is_replay
    assert late.status == 201


def test_completer_gives_up(entry: str) -> None:
    """One that fails every time is parked after a bounded number of attempts."""
    api = Api(entry, store_request=True)
    api.provider.fails.extend(ConnectionError("The answer was lost.") for _ in range(100))
    api.send()
    reports = []
    while api.record.state is not State.UNKNOWN:
        api.clock.move(timedelta(minutes=15))
        reports.append(api.complete())
        assert len(reports) < 20
    assert "1 parked" in reports[-1]
    assert api.record.attempt == 9
    assert len(api.provider.charges) == 1


def _raise(_connection: None) -> None:
    raise RuntimeError("This phase is broken.")


def _store_trouble(_connection: None) -> None:
    raise StoreUnavailable("It is away.")


def _inner(api: Api) -> Any:
    taken = semel.current().effect("inner", api.provider.charge, 5)
    if asyncio.iscoroutine(taken):
        taken.close()
    return taken

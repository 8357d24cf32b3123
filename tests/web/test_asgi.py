"""What is special to the ASGI entry point: messages, tasks, disconnects, and the other middleware around it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import fastapi
import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.responses import Response as StarletteResponse
from starlette.routing import Mount, Route

import semel
from semel import NoEffect, Policy
from semel.asgi import PER_ROUTE, IdempotencyMiddleware, claim
from semel.core.commands import Browse, Command, Complete, Look, Undo
from semel.core.record import Record
from semel.core.state import State
from semel.errors import StoreUnavailable
from semel.flows import handle
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.memory.transaction import AsyncMemoryTransaction
from semel.stores.step import Step
from tests.web.harness import HANG_SECONDS, AsgiClient, Message, Request, Response, asgi_scope, call_asgi

T = TypeVar("T")

KEYED = Request(lines=(("Idempotency-Key", b"key-1"), ("Content-Type", b"text/plain")), body=b"amount=5")


class Entry:
    """An app behind the entry point, on a store that can be looked into."""

    def __init__(self, app: Any, **policy: Any) -> None:
        self.memory = MemoryStore()
        store = AsyncMemoryStore(memory=self.memory)
        self.app = IdempotencyMiddleware(app, store=store, scope=lambda _: "alice", policy=Policy.ietf(**policy))

    async def send(self, request: Request = KEYED) -> Response:
        return await asyncio.wait_for(call_asgi(self.app, request), HANG_SECONDS)

    def record(self) -> Record | None:
        return self.memory.perform(Look("alice", "key-1"))

    @property
    def is_empty(self) -> bool:
        return self.memory.perform(Browse(limit=1)) == ()

    async def until(self, state: State) -> None:
        for _ in range(1000):
            record = self.record()
            if record is not None and record.state is state:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"It never was {state}.")


class Counted:
    """A Starlette endpoint that counts its runs."""

    def __init__(self, answer: Callable[[], StarletteResponse] | None = None) -> None:
        self.runs = 0
        self._answer = answer or (lambda: PlainTextResponse("made", 201))

    async def endpoint(self, request: StarletteRequest) -> StarletteResponse:
        await request.body()
        self.runs += 1
        return self._answer()

    def app(self, *middleware: Middleware) -> Starlette:
        return Starlette(routes=[Route("/pay", self.endpoint, methods=["POST", "GET"])], middleware=middleware)


class TestPassingThrough:
    @pytest.mark.parametrize(
        "scope",
        [
            asgi_scope(Request("GET", lines=KEYED.lines)),
            asgi_scope(Request("POST")),
            asgi_scope(Request("DELETE", lines=KEYED.lines)),
            {"type": "websocket", "path": "/pay", "headers": [(b"idempotency-key", b"k")]},
        ],
        ids=["GET", "no key", "DELETE", "websocket"],
    )
    async def test_unguarded_requests_are_untouched(self, scope: Message) -> None:
        """What is not guarded reaches the app with the server's own objects."""
        seen: list[Any] = []

        async def app(*given: Any) -> None:
            seen.extend(given)

        async def receive() -> Message:
            raise AssertionError("nothing may be read")

        async def send(message: Message) -> None: ...

        before = dict(scope)
        await Entry(app).app(scope, receive, send)
        assert seen[0] is scope
        assert seen[1] is receive
        assert seen[2] is send
        assert scope == before

    async def test_events_of_another_route_are_neither_buffered_nor_cut(self) -> None:
        """A stream of events beside the guarded routes flows as if there were no middleware."""
        arrived = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                arrived.clear()
                yield b"data: %d\n\n" % number
                # The next one is made only when this one has arrived.
                await asyncio.wait_for(arrived.wait(), HANG_SECONDS)

        async def endpoint(request: StarletteRequest) -> StreamingResponse:
            return StreamingResponse(events(), media_type="text/event-stream")

        entry = Entry(Starlette(routes=[Route("/events", endpoint)]))
        client = AsgiClient(Request("GET", "/events"))

        async def send(message: Message) -> None:
            await client.send(message)
            arrived.set()

        await entry.app(asgi_scope(Request("GET", "/events")), client.receive, send)
        assert client.response().body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"

    async def test_lifespan_opens_and_closes_the_store(self) -> None:
        """The server's start opens the store, its end closes it; the app hears of both."""
        heard: list[str] = []

        class Store(AsyncMemoryStore):
            async def open(self) -> None:
                heard.append("open")

            async def close(self) -> None:
                heard.append("close")

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            for word in ("startup", "shutdown"):
                heard.append((await receive())["type"])
                await send({"type": f"lifespan.{word}.complete"})

        incoming = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> Message:
            return next(incoming)

        async def send(message: Message) -> None:
            heard.append(message["type"])

        entry = IdempotencyMiddleware(app, store=Store(), scope=semel.SINGLE_TENANT)
        await entry({"type": "lifespan"}, receive, send)
        started, ended = "lifespan.startup", "lifespan.shutdown"
        assert heard == [started, "open", f"{started}.complete", ended, "close", f"{ended}.complete"]

    async def test_answer_that_waits_at_the_end_of_the_app(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An answer that waits for the store is stored before the app closes what is its own: a pool, for example."""
        monkeypatch.setattr(handle, "COMPLETE_PAUSES", ())
        is_away = True

        class Store(AsyncMemoryStore):
            def perform(self, command: Command[T]) -> Step[T]:
                if is_away and isinstance(command, Complete):
                    raise StoreUnavailable("It is away.")
                return super().perform(command)

        counted = Counted()
        inner, store = counted.app(), Store()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal is_away
            if scope["type"] != "lifespan":
                await inner(scope, receive, send)
                return
            await receive()
            is_away = True
            await send({"type": "lifespan.shutdown.complete"})

        async def receive() -> Message:
            nonlocal is_away
            is_away = False
            return {"type": "lifespan.shutdown"}

        async def send(_message: Message) -> None:
            """Hear that the app has ended."""

        guarded = IdempotencyMiddleware(app, store=store, scope=lambda _: "alice")
        assert (await call_asgi(guarded, KEYED)).status == 503
        await guarded({"type": "lifespan"}, receive, send)
        record = await store.perform(Look("alice", "key-1"))
        assert record is not None
        assert record.state is State.COMPLETE


class Passing(BaseHTTPMiddleware):
    """What ``@app.middleware("http")`` makes: every answer becomes a stream."""

    async def dispatch(self, request: StarletteRequest, call_next: RequestResponseEndpoint) -> StarletteResponse:
        response = await call_next(request)
        response.headers["x-passed"] = "yes"
        return response


class TestNeighbours:
    async def test_inner_base_http_middleware(self) -> None:
        """Inside, a BaseHTTPMiddleware changes nothing: of three requests with one key, one runs."""
        counted = Counted()
        entry = Entry(counted.app(Middleware(Passing)))
        responses = [await entry.send() for _ in range(3)]
        assert [response.is_replay for response in responses] == [False, True, True]
        assert {response.body for response in responses} == {b"made"}
        assert counted.runs == 1

    async def test_outer_base_http_middleware(self) -> None:
        """Outside, a BaseHTTPMiddleware sees replays as it sees answers."""
        counted = Counted()
        app = counted.app(
            Middleware(Passing),
            Middleware(IdempotencyMiddleware, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT),
        )
        responses = [await call_asgi(app, KEYED) for _ in range(3)]
        assert [response.header("x-passed") for response in responses] == ["yes"] * 3
        assert counted.runs == 1

    async def test_fastapi(self) -> None:
        """A FastAPI app gets the middleware as any other, and its handlers know their operation."""
        app = fastapi.FastAPI()
        keys: list[str] = []

        @app.post("/pay", status_code=201)
        def pay(order: dict[str, int]) -> dict[str, int]:
            keys.append(semel.current().key)
            return order

        app.add_middleware(IdempotencyMiddleware, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            first, again, other = [
                await client.post("/pay", json=order, headers={"Idempotency-Key": "k"})
                for order in ({"amount": 5}, {"amount": 5}, {"amount": 6})
            ]
        assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
        assert first.content == again.content
        assert again.headers["idempotent-replayed"] == "true"
        assert keys == ["k"]

    @pytest.mark.parametrize("is_per_route", [False, True])
    async def test_a_method_in_small_letters_is_guarded(self, *, is_per_route: bool) -> None:
        """A server may leave ``patch`` as it came, and an app take it for PATCH: it is guarded all the same."""
        runs: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if is_per_route:
                await claim(scope, "alice")
            runs.append(scope["method"])
            await StarletteResponse(status_code=201)(scope, receive, send)

        scope = PER_ROUTE if is_per_route else semel.SINGLE_TENANT
        entry = IdempotencyMiddleware(app, store=AsyncMemoryStore(), scope=scope)
        for method in ("patch", "patch", "PATCH"):
            request = Request(method=method, lines=(("Idempotency-Key", b"k"),))
            assert (await call_asgi(entry, request)).status == 201
        assert runs == ["patch"]

    @pytest.mark.parametrize("limit", [100, 4])
    async def test_messages_are_the_apps_again_once_they_are_sent(self, limit: int) -> None:
        """An app may send one dictionary over and over, and headers that can be read once, as to a server."""
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = iter([(b"content-type", b"text/plain")])
            await send({"type": "http.response.start", "status": 201, "headers": headers})
            message: Message = {"type": "http.response.body", "more_body": True}
            for message["body"] in (b"one", b"two"):
                await send(message)
            await send({"type": "http.response.body"})

        async def send(message: Message) -> None:
            sent.append({**message})

        entry = IdempotencyMiddleware(
            app, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT, policy=Policy(max_response_body=limit)
        )
        request = Request(lines=(("Idempotency-Key", b"k"),))
        await entry(asgi_scope(request), AsgiClient(request).receive, send)
        start, *parts = sent
        assert list(start["headers"]) == [(b"content-type", b"text/plain")]
        assert b"".join(each.get("body", b"") for each in parts) == b"onetwo"

    async def test_fastapi_validation_frees_the_key(self) -> None:
        """Parameters that FastAPI refuses reach no handler, so the key is free for the request that is put right."""
        app = fastapi.FastAPI()

        @app.post("/pay", status_code=201)
        def pay(order: dict[str, int]) -> dict[str, int]:
            return order

        app.add_middleware(IdempotencyMiddleware, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            wrong, right = [
                await client.post("/pay", json=order, headers={"Idempotency-Key": "k"})
                for order in ({"amount": "much"}, {"amount": 5})
            ]
        assert (wrong.status_code, right.status_code) == (422, 201)

    async def test_fastapi_error_raised_by_the_handler_is_kept(self) -> None:
        """A handler may raise FastAPI's own validation error after its effect: that is an answer, and it is kept."""
        app = fastapi.FastAPI()
        effects: list[int] = []

        @app.post("/pay")
        def pay(order: dict[str, int]) -> None:
            effects.append(order["amount"])
            raise RequestValidationError([])

        app.add_middleware(IdempotencyMiddleware, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answers = [
                await client.post("/pay", json={"amount": 5}, headers={"Idempotency-Key": "k"}) for _ in range(2)
            ]
        assert [answer.status_code for answer in answers] == [422, 422]
        assert effects == [5]

    async def test_an_error_of_the_same_name_as_fastapis_is_kept(self) -> None:
        """An application's own RequestValidationError says nothing of whether a handler was reached."""
        effects: list[int] = []
        own_error = type("RequestValidationError", (Exception,), {})

        async def pay(_request: Any) -> Any:
            effects.append(5)
            raise own_error

        async def explain(_request: Any, _error: Exception) -> Any:
            return PlainTextResponse("No.", 422)

        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])], exception_handlers={own_error: explain})
        app.add_middleware(IdempotencyMiddleware, store=AsyncMemoryStore(), scope=semel.SINGLE_TENANT)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            answers = [await client.post("/pay", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [422, 422]
        assert effects == [5]


class TestLeases:
    async def test_lease_ends_with_the_flow_however_it_ends(self) -> None:
        """When storing fails in a way that nobody foresaw, the lease is left to run out: renewed, it never would."""

        class Unforeseen(AsyncMemoryStore):
            def perform(self, command: Any) -> Any:
                if isinstance(command, Complete):
                    raise ZeroDivisionError
                return super().perform(command)

        app = IdempotencyMiddleware(Counted().app(), store=Unforeseen(), scope=lambda _: "alice")
        answer = await call_asgi(app, KEYED)
        assert isinstance(answer.error, ZeroDivisionError)
        assert app.guard.leases._leases == {}


class TestGarbage:
    async def test_requests_leave_no_cycles_behind(self) -> None:
        """What a request needed is freed when it ends. Left to the collector, it cost a sixth of a first execution."""
        entry = Entry(Counted().app())
        requests = [Request(lines=(("Idempotency-Key", b"key-%d" % number),), body=b"5") for number in range(20)]
        gc.collect()
        gc.disable()
        gc.freeze()  # What other tests have left, and is let go of only now, is not looked at.
        try:
            for request in requests * 2:
                await call_asgi(entry.app, request)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            # Other tests' threads go on making garbage: only what Semel's own modules made is counted.
            left = [thing for thing in gc.garbage if maker_of(thing).startswith("semel.")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()
        assert left == []


def maker_of(thing: object) -> str:
    """Name the module whose class or function made this object."""
    frame = getattr(thing, "cr_frame", None) or getattr(thing, "gi_frame", None)
    module = frame.f_globals.get("__name__") if frame else type(thing).__module__
    return module if isinstance(module, str) else ""


class TestBackground:
    async def test_background_tasks_run_once_and_after_the_answer(self) -> None:
        """A background task runs once, when its answer is stored and has left."""
        seen: list[Any] = []
        client = AsgiClient(KEYED)

        def look() -> None:
            record = entry.record()
            seen.append((record and record.state, len(client.sent)))

        entry = Entry(Counted(lambda: PlainTextResponse("made", 201, background=BackgroundTask(look))).app())
        await entry.app(asgi_scope(KEYED), client.receive, client.send)
        assert (await entry.send()).is_replay
        assert seen == [(State.COMPLETE, 2)]

    async def test_a_failing_background_task_does_not_free_the_key(self) -> None:
        """What fails after the answer is reported, and changes nothing about the answer."""

        def fail() -> None:
            raise RuntimeError("the mail server is down")

        counted = Counted(lambda: PlainTextResponse("made", 201, background=BackgroundTask(fail)))
        entry = Entry(counted.app())
        first = await entry.send()
        assert (first.status, first.body) == (201, b"made")
        assert isinstance(first.error, RuntimeError)
        assert (await entry.send()).is_replay
        assert counted.runs == 1


class TestRouter:
    def routed(self) -> tuple[Counted, Entry]:
        counted = Counted()
        routes = [Route("/pay/", counted.endpoint, methods=["POST"]), Mount("/sub", counted.app())]
        return counted, Entry(Starlette(routes=routes))

    @pytest.mark.parametrize("path, status", [("/nowhere", 404), ("/pay", 307)])
    async def test_what_the_router_answers_frees_the_key(self, path: str, status: int) -> None:
        """A path that no endpoint has, or that is spelled otherwise, was seen by none: the key is free."""
        counted, entry = self.routed()
        response = await entry.send(Request("POST", path, KEYED.lines))
        assert response.status == status
        assert entry.is_empty
        assert (await entry.send(Request("POST", "/pay/", KEYED.lines))).status == 201
        assert counted.runs == 1

    async def test_405_frees_the_key(self) -> None:
        """A method that a path does not have was seen by no handler."""
        _, entry = self.routed()
        assert (await entry.send(Request("PATCH", "/pay/", KEYED.lines))).status == 405
        assert entry.is_empty

    async def test_mounted_apps(self) -> None:
        """A mounted app's routes are guarded by the middleware around the whole."""
        counted, entry = self.routed()
        responses = [await entry.send(Request("POST", "/sub/pay", KEYED.lines)) for _ in range(2)]
        assert [response.is_replay for response in responses] == [False, True]
        assert counted.runs == 1

    @pytest.mark.parametrize("path", ["/v1/pay", "/pay"])
    async def test_old_servers_leave_the_mount_point_out_of_the_path(self, path: str) -> None:
        """The path is the whole one, whether or not the server puts root_path in front of it."""
        paths: list[str] = []

        def principal(request: Any) -> str:
            paths.append(request.path)
            return "alice"

        entry = IdempotencyMiddleware(Counted().app(), store=AsyncMemoryStore(), scope=principal)
        scope = {**asgi_scope(KEYED), "root_path": "/v1", "path": path, "raw_path": None}
        client = AsgiClient(KEYED)
        await entry(scope, client.receive, client.send)
        assert paths == ["/v1/pay"]


class TestErrors:
    async def test_no_effect_in_an_endpoint(self) -> None:
        """Starlette answers NoEffect with a 500 of its own; the client gets our 503, and the key is free."""

        def refuse() -> StarletteResponse:
            raise NoEffect("closed")

        entry = Entry(Counted(refuse).app())
        response = await entry.send()
        assert (response.status, response.code, response.error) == (503, "no-effect", None)
        assert entry.is_empty

    async def test_no_effect_with_a_handler_of_its_own(self) -> None:
        """An exception handler for NoEffect gives its own answer, and the key is free all the same."""

        def refuse() -> StarletteResponse:
            raise NoEffect("closed")

        async def closed(_request: StarletteRequest, error: Exception) -> StarletteResponse:
            return PlainTextResponse(str(error), 503)

        app = Counted(refuse).app()
        app.add_exception_handler(NoEffect, closed)
        entry = Entry(app)
        response = await entry.send()
        assert (response.status, response.body) == (503, b"closed")
        assert entry.is_empty

    async def test_an_app_that_sends_nothing(self) -> None:
        """An app that returns without an answer counts as one that raised."""

        async def app(scope: Any, receive: Any, send: Any) -> None: ...

        entry = Entry(app)
        first, again = await entry.send(), await entry.send()
        assert isinstance(first.error, RuntimeError)
        assert (first.status, again.status, again.is_replay) == (500, 500, True)

    async def test_a_handler_that_is_cancelled_is_left_to_its_lease(self) -> None:
        """A handler ended by CancelledError has an unknown outcome: its lease runs out, and the retry is attempt 2."""
        attempts: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            attempts.append(semel.current().attempt)
            if len(attempts) == 1:
                raise asyncio.CancelledError
            await PlainTextResponse("made", 201)(scope, receive, send)

        entry = Entry(app, lease=timedelta(seconds=1))
        client = AsgiClient(KEYED)
        with pytest.raises(asyncio.CancelledError):
            await entry.app(asgi_scope(KEYED), client.receive, client.send)
        assert (await entry.send()).code == "idempotency-key-in-progress"
        for _ in range(1000):
            response = await entry.send()
            if response.status != 409:
                break
            await asyncio.sleep(0.005)
        assert response.status == 201
        assert attempts == [1, 2]

    async def test_ways_round_the_body_are_not_offered(self) -> None:
        """A guarded app can't answer in a way that the middleware would not see."""
        offered: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            offered.extend(scope["extensions"])
            await PlainTextResponse("made", 201)(scope, receive, send)

        client = AsgiClient(KEYED)
        extensions: dict[str, Any] = {"http.response.pathsend": {}, "http.response.debug": {}}
        await Entry(app).app({**asgi_scope(KEYED), "extensions": extensions}, client.receive, client.send)
        assert offered == ["http.response.debug"]


class Slow:
    """An app that answers in two parts when it is told to, and notes whether it heard of a disconnect."""

    def __init__(self) -> None:
        self.runs = 0
        self.entered = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self.heard: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        more = True
        while more:
            more = (await receive()).get("more_body", False)
        listening = asyncio.create_task(receive())
        self.entered.set()
        await self.go.wait()
        self.heard.extend(listening.result()["type"] for _ in range(1) if listening.done())
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"ma", "more_body": True})
        await send({"type": "http.response.body", "body": b"de"})
        listening.cancel()
        self.ended.set()


class TestDisconnects:
    async def test_before_the_whole_body_nothing_runs(self) -> None:
        """A client that leaves before its request is whole has asked for nothing."""
        slow = Slow()
        entry = Entry(slow)
        incoming: Iterator[Message] = iter(
            [{"type": "http.request", "body": b"am", "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> Message:
            return next(incoming)

        async def send(message: Message) -> None:
            raise AssertionError("nobody listens")

        await entry.app(asgi_scope(KEYED), receive, send)
        assert slow.runs == 0
        assert entry.is_empty

    async def test_while_the_handler_runs_it_is_not_told(self) -> None:
        """A client that hangs up does not stop a guarded handler half-way; its retry gets the answer."""
        slow = Slow()
        entry = Entry(slow)
        client = AsgiClient(KEYED)
        serving = asyncio.create_task(entry.app(asgi_scope(KEYED), client.receive, client.send))
        await slow.entered.wait()
        client.gone.set()
        await asyncio.sleep(0)
        slow.go.set()
        await serving
        assert slow.heard == []
        again = await entry.send()
        assert (again.is_replay, again.body) == (True, b"made")
        assert slow.runs == 1

    @pytest.mark.parametrize("boundary", ["start", "body"])
    async def test_a_send_that_fails(self, boundary: str) -> None:
        """A server that raises OSError because the client has gone takes nothing back: the answer is stored."""
        slow = Slow()
        slow.go.set()
        entry = Entry(slow)
        client = AsgiClient(KEYED)

        async def send(message: Message) -> None:
            if message["type"] == f"http.response.{boundary}":
                raise OSError("The client has gone.")
            await client.send(message)

        with pytest.raises(OSError, match="gone"):
            await entry.app(asgi_scope(KEYED), client.receive, send)
        await asyncio.wait_for(slow.ended.wait(), HANG_SECONDS)
        assert (await entry.send()).is_replay
        assert slow.runs == 1

    @pytest.mark.parametrize("boundary", range(5))
    async def test_a_server_that_cancels(self, boundary: int) -> None:
        """Cancelled at any message, a request either ran and is stored, or did not run and is free."""
        slow = Slow()
        slow.go.set()
        entry = Entry(slow)
        client = AsgiClient(KEYED, chunk=4)
        passed = 0

        async def cancelling(call: Any, *message: Message) -> Any:
            nonlocal passed
            passed += 1
            if passed == boundary + 1:
                serving.cancel()
                await asyncio.sleep(0)
            return await call(*message)

        serving = asyncio.create_task(
            entry.app(
                asgi_scope(KEYED),
                lambda: cancelling(client.receive),
                lambda message: cancelling(client.send, message),
            )
        )
        done, _ = await asyncio.wait([serving], timeout=HANG_SECONDS)
        assert done
        if slow.runs:
            await entry.until(State.COMPLETE)
        retried = await entry.send()
        assert (retried.status, retried.body) == (201, b"made")
        assert slow.runs == 1

    async def test_cancelled_while_the_transaction_is_undone(self) -> None:
        """A server that cancels the request in the middle of a rollback leaves no app behind that waits for its end."""
        undoing, go = asyncio.Event(), asyncio.Event()

        class SlowToUndo(AsyncMemoryTransaction):
            async def perform(self, command: Any) -> Any:
                if isinstance(command, Undo):
                    undoing.set()
                    await go.wait()
                return await super().perform(command)

        class SlowStore(AsyncMemoryStore):
            def transaction(self) -> AsyncMemoryTransaction:
                return SlowToUndo(self._memory)

        async def app(_scope: Message, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"not now"})

        store = SlowStore(memory=MemoryStore())
        guarded = IdempotencyMiddleware(app, store=store, scope=lambda _: "alice", policy=Policy.ietf(mode="atomic"))
        client = AsgiClient(KEYED)
        before = asyncio.all_tasks()
        serving = asyncio.create_task(guarded(asgi_scope(KEYED), client.receive, client.send))
        await asyncio.wait_for(undoing.wait(), HANG_SECONDS)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        go.set()
        done, waiting = await asyncio.wait(asyncio.all_tasks() - before, timeout=HANG_SECONDS)
        assert done
        assert not waiting
        assert (await asyncio.wait_for(call_asgi(guarded, KEYED), HANG_SECONDS)).status == 503

    async def test_cancelled_while_the_handler_runs(self) -> None:
        """A server that cancels the request does not cancel its handler: the answer is stored behind it."""
        slow = Slow()
        entry = Entry(slow)
        client = AsgiClient(KEYED)
        serving = asyncio.create_task(entry.app(asgi_scope(KEYED), client.receive, client.send))
        await slow.entered.wait()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert (await entry.send()).code == "idempotency-key-in-progress"
        slow.go.set()
        await entry.until(State.COMPLETE)
        assert slow.heard == []
        await asyncio.wait_for(slow.ended.wait(), HANG_SECONDS)
        assert (await entry.send()).is_replay
        assert slow.runs == 1

    async def test_an_endless_stream_ends_with_its_listener(self) -> None:
        """A stream whose request was cancelled is told that nobody listens, and leaves its tombstone."""
        ended = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            try:
                await started.wait()
                await send(start)
                while True:
                    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            except OSError:
                ended.set()

        started = asyncio.Event()
        entry = Entry(app)
        client = AsgiClient(KEYED)
        serving = asyncio.create_task(entry.app(asgi_scope(KEYED), client.receive, client.send))
        await entry.until(State.PROCESSING)
        serving.cancel()
        await asyncio.wait([serving])
        started.set()
        await asyncio.wait_for(ended.wait(), HANG_SECONDS)
        assert (await entry.send()).code == "response-not-replayable"

    async def test_a_large_body_behind_a_cancelled_request(self) -> None:
        """A handler that runs on behind its client still has the whole body, and the file is closed after it."""
        seen: list[int] = []
        entered, go = asyncio.Event(), asyncio.Event()

        async def endpoint(request: StarletteRequest) -> StarletteResponse:
            entered.set()
            await go.wait()
            seen.append(len(await request.body()))
            return PlainTextResponse("made", 201)

        entry = Entry(Starlette(routes=[Route("/pay", endpoint, methods=["POST"])]))
        large = Request(lines=KEYED.lines, body=b"x" * 400_000)
        client = AsgiClient(large)
        serving = asyncio.create_task(entry.app(asgi_scope(large), client.receive, client.send))
        await entered.wait()
        serving.cancel()
        await asyncio.wait([serving])
        go.set()
        await entry.until(State.COMPLETE)
        assert seen == [400_000]

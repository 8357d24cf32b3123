"""Report mode through both entry points: the app answers as if nobody watched, and what is counted is right."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any, TypeVar
from uuid import uuid4

import pytest

import semel.asgi
import semel.wsgi
from semel import Policy
from semel.asgi import PER_ROUTE, claim
from semel.core.commands import Browse, Command
from semel.core.events import ReportFailed
from semel.core.record import Record
from semel.core.state import State
from semel.errors import StoreUnavailable
from semel.guard.request import RequestView
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.step import Step
from semel.telemetry import tally
from tests.web.harness import (
    HANG_SECONDS,
    Api,
    AsgiClient,
    AsgiWorld,
    Call,
    Gate,
    Reply,
    Request,
    Response,
    Shop,
    WsgiWorld,
    asgi_scope,
    call_asgi,
    call_wsgi,
    plain,
    serve_wsgi,
    starlette,
    wait_until,
    wsgi_environ,
)

T = TypeVar("T")

REPORT = Policy(enforcement="report", required=True, max_request_body=100)
JSON = ("Content-Type", b"application/json")
KEY = ("Idempotency-Key", b"key-1")

World = AsgiWorld | WsgiWorld


class Reported:
    """A shop behind an entry point that only reports."""

    def __init__(self, world: World, policy: Policy = REPORT) -> None:
        self.world = world
        self.shop = Shop(handler)
        self.tenant = uuid4().hex
        settings: dict[str, Any] = {"scope": self.principal, "policy": policy}
        self.middleware: Any
        if isinstance(world, AsgiWorld):
            self.middleware = semel.asgi.IdempotencyMiddleware(starlette(self.shop), store=world.store, **settings)
        else:
            self.middleware = semel.wsgi.IdempotencyMiddleware(plain(self.shop), store=world.store, **settings)

    def principal(self, request: RequestView) -> str | None:
        account = request.headers.get("x-account", "alice")
        if account == "broken":
            raise ZeroDivisionError
        return f"{self.tenant}/{account}" if account else None

    def send(self, request: Request) -> Response:
        return send(self.world, self.middleware, request)

    def records(self) -> list[Record]:
        found: Iterable[Record] = self.world.perform(Browse(limit=10_000))
        return [record for record in found if self.tenant in record.scope]

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.middleware.tally.snapshot().total)


def send(world: World, app: Any, request: Request) -> Response:
    if isinstance(world, AsgiWorld):
        response: Response = world.submit(call_asgi(app, request)).result(HANG_SECONDS)
        return response
    return call_wsgi(app, request)


def bare(world: World) -> tuple[Shop, Callable[[Request], Response]]:
    shop = Shop(handler)
    app = starlette(shop) if isinstance(world, AsgiWorld) else plain(shop)
    return shop, lambda request: send(world, app, request)


def handler(call: Call) -> Reply:
    """Do what the body says."""
    if b"stream" in call.body:
        return Reply(200, (b"part %d\n" % number for number in range(3)))
    if b"fail" in call.body:
        return Reply(500, b"no")
    if b"raise" in call.body:
        raise RuntimeError("as the client asked")
    cookies = (("content-type", "text/plain"), ("set-cookie", "a=1"), ("set-cookie", "b=2"))
    return Reply(201, b"read %d bytes at %s" % (len(call.body), call.path.encode()), cookies)


def pay(body: bytes = b"{}", *lines: tuple[str, bytes], key: str | None = "key-1", target: str = "/pay") -> Request:
    keys = () if key is None else (("Idempotency-Key", key.encode()),)
    return Request("POST", target, (JSON, *keys, *lines), body)


# In this order: each with what enforcing would have made of it.
REQUESTS: list[tuple[str, Request]] = [
    ("new", pay()),
    ("replay", pay()),
    ("replay", pay()),
    ("mismatch", pay(b'{"amount": 6}')),
    ("missing", pay(key=None)),
    ("malformed", pay(key="a,b")),
    ("malformed", pay(b"{}", KEY)),
    ("unscoped", pay(b"{}", ("X-Account", b""))),
    ("failed", pay(b"{}", ("X-Account", b"broken"))),
    ("too_large", pay(b"x" * 101)),
    ("too_large", pay(b"x" * 300_000)),
    ("new", pay(b"x" * 100, key="long")),
    ("new", pay(b"", key="empty")),
    ("new", pay(b"stream", key="stream")),
    ("replay", pay(b"stream", key="stream")),
    ("new", pay(b"fail", key="fail")),
    ("replay", pay(b"fail", key="fail")),
    ("new", pay(b"raise", key="raise")),
    ("replay", pay(b"raise", key="raise")),
    ("new", pay(key="elsewhere", target="/pay/elsewhere")),
]


def seen(response: Response) -> tuple[Any, ...]:
    return response.status, response.headers, response.body, repr(response.error)


def test_nothing_changes(world: World) -> None:
    """Every answer is that of the bare app, byte for byte, and the handler sees what it would see without Semel."""
    shop, send_bare = bare(world)
    reported = Reported(world)
    for outcome, request in REQUESTS:
        before = reported.counts.get(outcome, 0)
        assert seen(reported.send(request)) == seen(send_bare(request)), request
        assert reported.counts[outcome] == before + 1, request
    assert reported.shop.runs == shop.runs
    assert all(run.key is None for run in shop.runs)
    assert sum(reported.counts.values()) == len(REQUESTS)


def test_what_is_not_guarded_is_not_counted(world: World) -> None:
    """A method that is not guarded is none of report mode's business."""
    reported = Reported(world)
    assert reported.send(Request("GET", "/pay", (KEY,))).status == 201
    assert reported.counts == {}


def test_keyless(world: World) -> None:
    """Where a key is optional, requests without one are counted as such: that many clients send none."""
    reported = Reported(world, replace(REPORT, required=False))
    assert reported.send(pay(key=None)).status == 201
    assert reported.counts == {"keyless": 1}


def test_by_endpoint(world: World) -> None:
    """Counts are by endpoint too: by the template of a route, or by the path with ids left out."""
    reported = Reported(world)
    for number in (17, 18):
        reported.send(pay(key=f"key-{number}", target=f"/pay/{number}/refund"))
    [(route, counts)] = reported.middleware.tally.snapshot().routes.items()
    assert (route, counts) in (("POST /pay/*/refund", {"new": 2}), ("POST /pay/{rest:path}", {"new": 2}))


def test_the_log_has_no_path(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A path may name a person, or hold a secret: the log has the route's template, or nothing of it."""
    reported = Reported(world)
    with caplog.at_level(logging.DEBUG, logger="semel"):
        for _ in range(2):
            reported.send(pay(target="/pay/alice@example.org/refund"))
    said = [each for each in caplog.records if getattr(each, "semel_event", "") == "Reported"]
    assert [getattr(each, "semel_outcome", "") for each in said] == ["new", "replay"]
    assert not [each for each in said if "alice" in each.getMessage() or "alice" in str(vars(each))]
    assert {getattr(each, "semel_endpoint", "") for each in said} <= {None, "POST /pay/{rest:path}"}


def test_two_at_once(world: World) -> None:
    """A duplicate that comes while the first runs is counted as a conflict, and runs beside it as it does today."""
    reported = Reported(world)
    with Gate() as gate:
        reported.shop.handler = gate
        answers: list[Response] = []
        first = threading.Thread(target=lambda: answers.append(reported.send(pay())))
        first.start()
        gate.wait()
        reported.shop.handler = handler
        assert reported.send(pay()).status == 201
        assert reported.counts == {"conflict": 1}
        gate.open()
        first.join(HANG_SECONDS)
    assert [answer.status for answer in answers] == [201]
    reported.send(pay())
    assert reported.counts == {"new": 1, "conflict": 1, "replay": 1}


def test_freed_as_it_would_be(world: World) -> None:
    """An answer that would not be kept frees its key: the next request is new again."""
    reported = Reported(world)
    reported.shop.handler = lambda _: Reply(429)
    for _ in range(2):
        assert reported.send(pay()).status == 429
    assert reported.counts == {"new": 2}


def test_about_to_stop(world: World) -> None:
    """A server that is about to stop runs what still comes, as it would without Semel."""
    reported = Reported(world)
    reported.middleware.drain()
    assert reported.send(pay()).status == 201
    assert reported.counts == {"shutting_down": 1}


# Enforcing afterwards


def test_enforcing_starts_with_a_clean_table(world: World) -> None:
    """When enforcing begins, no client meets what report mode has left: a key is new, and guarded from there on."""
    api = Api(world, Policy(enforcement="report"))
    assert [api.send().is_replay for _ in range(2)] == [False, False]
    enforced = api.under(Policy())
    first, again = enforced.send(), enforced.send()
    assert (first.status, first.is_replay, again.status, again.is_replay) == (201, False, 201, True)
    assert enforced.send(body=b"{}").status == 422
    assert api.runs == 3


def test_reporting_again_leaves_what_is_guarded(world: World) -> None:
    """Going back to report mode touches no record of what was enforced: enforced again, its answers are still there."""
    api = Api(world, Policy())
    first = api.send()
    assert api.under(Policy(enforcement="report")).send().status == 201
    again = api.send()
    assert (again.is_replay, again.body) == (True, first.body)
    assert api.runs == 2


def test_what_is_left_in_the_store(world: World) -> None:
    """A report's records hold no answer and no request, and say what they are by their scope."""
    reported = Reported(world, replace(REPORT, store_request=True, on_crash="refuse"))
    reported.send(pay())
    (record,) = reported.records()
    assert record.scope == f"\treport\t{reported.tenant}/alice"
    assert (record.state, record.attempt) == (State.COMPLETE, 1)
    assert record.answer is not None
    assert (record.answer.status, record.answer.headers, record.answer.body) == (201, (), None)


# The store fails


class Weather:
    """Whether the store fails, and how often it was asked."""

    def __init__(self) -> None:
        self.fails: tuple[str, ...] = ()
        self.asked = 0

    def blow(self, command: Command[Any]) -> None:
        self.asked += 1
        if type(command).__name__ in self.fails:
            raise StoreUnavailable("a storm")


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
        self._weather.blow(command)
        return super().perform(command)


@pytest.fixture
def weather() -> Weather:
    return Weather()


@pytest.fixture(params=["asgi", "wsgi"])
def stormy(request: pytest.FixtureRequest, weather: Weather) -> Iterator[World]:
    world = AsgiWorld(lambda: AsyncFlakyStore(weather)) if request.param == "asgi" else None
    opened: World = world or WsgiWorld(lambda: FlakyStore(weather))
    yield opened
    opened.close()


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a store that failed is not yet asked again, and its failure not told again."""
    for name in ("REST_SECONDS", "TELL_AGAIN_SECONDS"):
        monkeypatch.setattr(tally, name, 3600.0)


@pytest.mark.parametrize("fails", ["Claim", "Complete"])
@pytest.mark.usefixtures("long_rests")
def test_store_is_down(stormy: World, weather: Weather, fails: str, caplog: pytest.LogCaptureFixture) -> None:
    """A store that fails changes no answer; it is told of once, and left alone for a moment."""
    caplog.set_level(logging.ERROR, "semel")
    weather.fails = (fails,)
    shop, send_bare = bare(stormy)
    reported = Reported(stormy)
    for _, request in REQUESTS:
        assert seen(reported.send(request)) == seen(send_bare(request))
    assert reported.shop.runs == shop.runs
    told = [record for record in caplog.records if record.__dict__.get("semel_fault") == "store"]
    assert [record.__dict__["semel_reason"] for record in told] == ["a storm"]
    assert weather.asked == (1 if fails == "Claim" else 2)


@pytest.mark.usefixtures("long_rests")
def test_store_is_down_for_good(stormy: World, weather: Weather) -> None:
    """While it rests, requests are counted as failed: nobody can tell what would have become of them."""
    weather.fails = ("Claim",)
    reported = Reported(stormy)
    for _ in range(3):
        assert reported.send(pay()).status == 201
    assert reported.counts == {"failed": 3}
    assert weather.asked == 1


# As it comes


async def test_asgi_holds_nothing_back() -> None:
    """Each message of the app's has been sent when its send returns; and the request's extensions are left to it."""
    sizes: list[int] = []
    extensions: dict[str, Any] = {"http.response.pathsend": {}, "http.response.trailers": {}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["extensions"] == extensions
        message = await receive()
        assert message == {"type": "http.request", "body": b"{}", "more_body": False}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            sizes.append(len(client.sent))
        await send({"type": "http.response.body"})
        assert (await receive())["type"] == "http.disconnect"

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, policy=REPORT)
    client = AsgiClient(pay())
    await middleware({**asgi_scope(pay()), "extensions": extensions}, client.receive, client.send)
    assert sizes == [2, 3]
    await middleware.store.close()


async def test_asgi_background_work() -> None:
    """What an app does after its answer is no part of the operation: a retry meanwhile would be a replay."""
    go_on = asyncio.Event()
    behind: asyncio.Queue[None] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})
        behind.put_nowait(None)
        await go_on.wait()

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, policy=REPORT)
    async with asyncio.timeout(HANG_SECONDS):
        first = asyncio.ensure_future(call_asgi(middleware, pay()))
        await behind.get()
        second = asyncio.ensure_future(call_asgi(middleware, pay()))
        await behind.get()
        go_on.set()
        await asyncio.gather(first, second)
    assert middleware.tally.snapshot().total == {"new": 1, "replay": 1}
    await middleware.store.close()


@pytest.mark.parametrize("body", [[], [b"half of it"], [b"x" * 300_000]], ids=["none", "some", "much"])
async def test_asgi_client_hangs_up(body: list[bytes]) -> None:
    """A client that hangs up in the middle of its body is what the app sees, and nothing else."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            assert message["more_body"]
            seen.append(message["body"])
        assert (await receive())["type"] == "http.disconnect"

    messages = [{"type": "http.request", "body": part, "more_body": True} for part in body]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    policy = Policy(enforcement="report")
    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, policy=policy)
    await middleware(asgi_scope(pay()), receive, AsgiClient(pay()).send)
    assert b"".join(seen) == b"".join(body)
    await middleware.store.close()


async def test_asgi_cancelled() -> None:
    """A server that cancels the app's task cancels just that: nothing goes on behind it, and no lease is renewed."""
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, policy=REPORT)
    client = AsgiClient(pay())
    running = asyncio.ensure_future(middleware(asgi_scope(pay()), client.receive, client.send))
    await asyncio.wait_for(begun.wait(), HANG_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not middleware.guard.leases._leases
    await middleware.store.close()


async def test_asgi_cancelled_while_the_body_is_read() -> None:
    """A server that cancels its task before the whole request has come leaves no task behind."""
    begun = asyncio.Event()

    async def receive() -> Any:
        begun.set()
        await asyncio.Event().wait()

    async def never(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError

    middleware = semel.asgi.IdempotencyMiddleware(never, store="memory://", scope=semel.SINGLE_TENANT, policy=REPORT)
    before = asyncio.all_tasks()
    running = asyncio.ensure_future(middleware(asgi_scope(pay()), receive, AsgiClient(pay()).send))
    await asyncio.wait_for(begun.wait(), HANG_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    left = asyncio.all_tasks() - before
    if left:
        await asyncio.wait(left, timeout=HANG_SECONDS)
    assert asyncio.all_tasks() == before
    await middleware.store.close()


def wsgi(app: Any, policy: Policy = REPORT) -> semel.wsgi.IdempotencyMiddleware:
    return semel.wsgi.IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, policy=policy)


def test_wsgi_holds_nothing_back() -> None:
    """A generator is asked for each chunk when the server wants it, and closed once."""
    steps: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        try:
            start_response("200 OK", [])
            for part in ("one", "two"):
                steps.append(part)
                yield part.encode()
        finally:
            steps.append("closed")

    middleware = wsgi(app)
    started: list[str] = []
    answer = middleware(wsgi_environ(pay()), lambda status, headers, exc_info=None: started.append(status))  # type: ignore[arg-type]  # it is no more than a test needs
    assert (started, steps) == ([], [])
    chunks = iter(answer)
    assert (next(chunks), started, steps) == (b"one", ["200 OK"], ["one"])
    answer.close()  # type: ignore[attr-defined]  # as a server does
    del chunks
    assert steps == ["one", "closed"]
    serve_wsgi(middleware, wsgi_environ(pay()))
    assert middleware.tally.snapshot().total == {"new": 1, "replay": 1}
    middleware.store.close()


def test_wsgi_iterable_is_as_it_was() -> None:
    """A server gets lists, and files in its own wrapper, as they are; others say how many chunks they have."""

    class Wrapper:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __iter__(self) -> Iterator[bytes]:
            return iter(self.file)

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        if environ["wsgi.input"].read(4) == b"file":
            return environ["wsgi.file_wrapper"](BytesIO(b"a file"))
        return parts if environ["HTTP_IDEMPOTENCY_KEY"] == "list" else deque(parts)

    parts = [b"one", b"two"]
    middleware = wsgi(app)
    answer: Any = middleware(wsgi_environ(pay()), lambda *_: None)  # type: ignore[arg-type]  # as above
    assert (len(answer), list(answer)) == (2, [b"one", b"two"])
    answer.close()
    assert middleware(wsgi_environ(pay(key="list")), lambda *_: None) is parts  # type: ignore[arg-type]  # as above
    file = middleware(wsgi_environ(pay(b"file", key="file")) | {"wsgi.file_wrapper": Wrapper}, lambda *_: None)  # type: ignore[arg-type]  # as above
    assert type(file) is Wrapper
    middleware.store.close()


@pytest.mark.parametrize("late", [False, True])
def test_wsgi_old_ways(late: bool) -> None:
    """write(), exc_info and an error in the middle pass as they are."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        write = start_response("200 OK", [])
        if late:
            write(b"too late")
        error = LookupError("in the middle")
        start_response("500 Oh", [], (LookupError, error, None))
        return [b"sorry"]

    middleware = wsgi(app)
    for outcome in ("new", "replay"):
        assert seen(call_wsgi(middleware, pay())) == seen(call_wsgi(app, pay()))
        assert dict(middleware.tally.snapshot().total)[outcome] == 1
    middleware.store.close()


def test_wsgi_error_in_the_middle_of_an_answer() -> None:
    """An iterable that raises half-way raises just that; its status was given, and counts."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"half"
        raise LookupError("half-way")

    middleware = wsgi(app)
    assert [seen(call_wsgi(each, pay())) for each in (middleware, middleware)] == [seen(call_wsgi(app, pay()))] * 2
    assert middleware.tally.snapshot().total == {"new": 1, "replay": 1}
    middleware.store.close()


class Socket(BytesIO):
    """A connection that has no end: whoever reads behind the body hangs."""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert 0 <= size <= len(self.getvalue()) - self.tell()
        return super().read(size)


def test_wsgi_body_of_a_socket() -> None:
    """Behind the body nothing is read, and what the server said of it stays as it was."""
    body = b"x" * 50 + b"\n" + b"y" * 49

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        assert environ["CONTENT_LENGTH"] == "100"
        assert "wsgi.input_terminated" not in environ
        start_response("200 OK", [])
        return [environ["wsgi.input"].read(100)]

    middleware = wsgi(app)
    environ = wsgi_environ(pay(body)) | {"wsgi.input": Socket(body)}
    assert serve_wsgi(middleware, environ).body == body
    middleware.store.close()


READERS: list[Callable[[Any], Any]] = [
    lambda file: file.read(),
    lambda file: file.read(-1),
    lambda file: file.read(None),
    lambda file: [file.read(70), file.read(70), file.read(500)],
    lambda file: [file.readline(), file.readline(5), file.readline(100), file.readline(None), file.read()],
    lambda file: file.readlines(),
    lambda file: file.readlines(60),
    lambda file: file.readlines(None),
    list,
]


@pytest.mark.parametrize("read", READERS)
def test_wsgi_body_in_two_parts(read: Callable[[Any], Any]) -> None:
    """A body of unknown length that turns out too large is given to the app as one, however it reads."""
    body = b"".join(b"line %d\n" % number for number in range(20)) * 2000 + b"the end"
    found: list[Any] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        found.append(read(environ["wsgi.input"]))
        start_response("200 OK", [])
        return []

    middleware = wsgi(app)
    for each in (app, middleware):
        environ = wsgi_environ(pay(body)) | {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        del environ["CONTENT_LENGTH"]
        serve_wsgi(each, environ)
    assert found[0] == found[1]
    assert middleware.tally.snapshot().total == {"too_large": 1}
    middleware.store.close()


def test_wsgi_thread_is_killed() -> None:
    """A thread that is killed in the middle leaves no lease that is renewed for ever."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise SystemExit

    middleware = wsgi(app)
    with pytest.raises(SystemExit):
        middleware(wsgi_environ(pay()), lambda *_: None)  # type: ignore[arg-type]  # as above
    assert not middleware.guard.leases._leases
    middleware.store.close()


# A route's own word


@pytest.mark.parametrize("fails", [False, True])
async def test_route_that_only_reports(fails: bool) -> None:
    """A route under a policy that reports runs each time, is no operation, and is counted."""
    operations: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        operations.append(await claim(scope, "alice", REPORT))
        if fails:
            raise LookupError("as told")
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=PER_ROUTE, policy=Policy())
    answers = [await call_asgi(middleware, pay(b"{ }")) for _ in range(2)]
    assert [(answer.body, type(answer.error)) for answer in answers] == [
        (b"", LookupError) if fails else (b"{ }", type(None))
    ] * 2
    assert operations == [None, None]
    assert middleware.tally.snapshot().total == {"new": 1, "replay": 1}
    await middleware.store.close()


@pytest.mark.usefixtures("long_rests")
async def test_route_that_is_guarded_where_others_only_report() -> None:
    """A store that rests after a failure in report mode is asked all the same for a route that is guarded."""
    ran: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        operation = await claim(scope, "alice", replace(REPORT, enforcement="enforce"))
        assert operation is not None
        ran.append(operation.key)
        middleware.tally.tell(ReportFailed(None, "store", "a storm, at another route"))
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=PER_ROUTE, policy=REPORT)
    answers = [await call_asgi(middleware, pay()) for _ in range(2)]
    assert [(answer.status, answer.body, answer.is_replay) for answer in answers] == [
        (201, b"paid", False),
        (201, b"paid", True),
    ]
    assert ran == ["key-1"]
    await middleware.store.close()


@pytest.mark.usefixtures("long_rests")
async def test_route_that_only_reports_leaves_a_failing_store_alone(weather: Weather) -> None:
    """A store that failed a route which only reports is not asked again for a moment, whatever other routes do."""
    weather.fails = ("Claim",)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await claim(scope, "alice", REPORT) is None
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})

    store = AsyncFlakyStore(weather)
    middleware = semel.asgi.IdempotencyMiddleware(app, store=store, scope=PER_ROUTE, policy=Policy())
    assert [(await call_asgi(middleware, pay())).status for _ in range(3)] == [201] * 3
    assert weather.asked == 1
    await store.close()


async def test_route_whose_client_hangs_up() -> None:
    """A client that hangs up in the middle of its body is the route's to see, as without Semel."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await claim(scope, "alice", REPORT) is None
        seen.extend([(await receive())["type"] for _ in range(2)])

    messages = [{"type": "http.request", "body": b"half", "more_body": True}]

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=PER_ROUTE, policy=Policy())
    await middleware(asgi_scope(pay()), receive, AsgiClient(pay()).send)
    assert seen == ["http.request", "http.disconnect"]
    await middleware.store.close()


async def test_route_is_cancelled() -> None:
    """A server that cancels its task leaves no lease that is renewed for nobody."""
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await claim(scope, "alice", REPORT)
        begun.set()
        await asyncio.Event().wait()

    middleware = semel.asgi.IdempotencyMiddleware(app, store="memory://", scope=PER_ROUTE, policy=Policy())
    client = AsgiClient(pay())
    running = asyncio.ensure_future(middleware(asgi_scope(pay()), client.receive, client.send))
    await asyncio.wait_for(begun.wait(), HANG_SECONDS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    wait_until(lambda: not middleware.guard.leases._leases)
    await middleware.store.close()

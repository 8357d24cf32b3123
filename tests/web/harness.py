"""One way to call an app through either entry point, in process: exact header lines in, exact header lines out.

The ASGI app is Starlette's, the WSGI app is a plain function; both do whatever the test's ``handler`` does. No server
is between: what servers make of it is in ``test_servers.py``.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Protocol, Self
from urllib.parse import unquote, unquote_to_bytes
from uuid import uuid4
from wsgiref.types import StartResponse, WSGIEnvironment

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as StarletteRequest
from starlette.responses import Response as StarletteResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

import semel.asgi
import semel.wsgi
from semel import Policy
from semel.core.commands import Browse, Command
from semel.core.record import Record
from semel.guard.request import Paths, RequestView
from semel.stores.base import AsyncStore, Store

#: Nothing here takes a second; what takes this long hangs.
HANG_SECONDS = 60
POLL_SECONDS = 0.02

METHODS = ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "POST", "PATCH", "PUT", "DELETE"]

Lines = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Request:
    method: str = "POST"
    target: str = "/pay"
    #: Header lines as a client writes them.
    lines: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""
    mount: str = ""


@dataclass(frozen=True)
class Response:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    #: What came out of the middleware instead of an answer, or after it.
    error: BaseException | None = None

    def values(self, name: str) -> list[str]:
        return [value.decode() for each, value in self.headers if each.lower() == name.encode()]

    def header(self, name: str) -> str | None:
        values = self.values(name)
        assert len(values) < 2, f"{name} was sent more than once: {values}"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_replay(self) -> bool:
        return self.values("idempotent-replayed") == ["true"]

    @property
    def code(self) -> str | None:
        """The ``code`` of a problem of ours."""
        ours = self.header("content-type") == "application/problem+json" and self.json().get("type")
        return str(self.json()["code"]) if ours else None


@dataclass(frozen=True)
class Call:
    """One run of the handler."""

    method: str
    path: str
    body: bytes
    key: str | None
    attempt: int | None


@dataclass(frozen=True)
class Reply:
    """What the handler answers."""

    status: int = 201
    body: bytes | Iterable[bytes] = b"ok"
    headers: tuple[tuple[str, str], ...] = (("content-type", "text/plain"),)


@dataclass
class Shop:
    """The application behind both entry points: it counts its runs, and does what the test says."""

    handler: Callable[[Call], Reply] | None = None
    runs: list[Call] = field(default_factory=list)
    #: Whether the authentication in front of everything lets anybody in.
    is_locked: bool = False

    def __call__(self, method: str, path: str, body: bytes) -> Reply:
        try:
            operation = semel.current()
        except LookupError:
            call = Call(method, path, body, None, None)
        else:
            call = Call(method, path, body, operation.key, operation.attempt)
        self.runs.append(call)
        if self.handler is not None:
            return self.handler(call)
        number = str(len(self.runs))
        headers = (("content-type", "application/json"), ("location", f"/payments/{number}"))
        return Reply(201, f'{{"payment": {number}}}'.encode(), headers)


class World(Protocol):
    """An entry point and a store, open for the whole session."""

    def guard(self, shop: Shop, scope: Callable[[RequestView], str | None], policy: Policy, paths: Paths) -> "Send": ...

    def perform(self, command: Command[Any]) -> Any: ...


Send = Callable[[Request], "Future[Response]"]


class Api:
    """A shop behind an entry point, as a client sees it. Its keys are its own, whatever else is in the store."""

    def __init__(
        self, world: World, policy: Policy | None = None, paths: Paths = None, *, like: "Api | None" = None
    ) -> None:
        self.world = world
        self.shop: Shop = like.shop if like else Shop()
        self.tenant: str = like.tenant if like else uuid4().hex
        self._send = world.guard(self.shop, self.principal, policy or Policy.ietf(), paths)

    def under(self, policy: Policy) -> "Api":
        """The same shop and the same keys, behind another middleware: another node, or a later deployment."""
        return Api(self.world, policy, like=self)

    def principal(self, request: RequestView) -> Any:
        names = request.headers.get("x-names")
        if names is not None:
            return (self.tenant, *names.split(","))
        account = request.headers.get("x-account", "alice")
        mode = request.headers.get("x-mode", "live")
        return f"{self.tenant}/{account}/{mode}" if account else None

    def start(
        self,
        target: str = "/pay",
        *,
        key: str | bytes | None = "key-1",
        method: str = "POST",
        lines: Lines = (),
        body: bytes = b'{"amount": 5}',
        content_type: str | None = "application/json",
        mount: str = "",
    ) -> "Future[Response]":
        every = [*lines]
        if content_type is not None:
            every.append(("Content-Type", content_type))
        if key is not None:
            every.append(("Idempotency-Key", key))
        sent = tuple((name, value.encode() if isinstance(value, str) else value) for name, value in every)
        return self._send(Request(method, target, sent, body, mount))

    def send(self, target: str = "/pay", **request: Any) -> Response:
        return self.start(target, **request).result(HANG_SECONDS)

    @property
    def runs(self) -> int:
        return len(self.shop.runs)

    def answer(self, *replies: Reply) -> None:
        """Answer with these in turn, and for ever with the last."""
        left = list(replies)
        self.shop.handler = lambda _: left.pop(0) if len(left) > 1 else left[0]

    def records(self) -> list[Record]:
        found: Iterable[Record] = self.world.perform(Browse(limit=10_000))
        return [record for record in found if record.scope.startswith(self.tenant)]


class Gate:
    """Holds a handler in the middle until it is opened, and says when it has come in."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, _call: Call) -> Reply:
        self.entered.set()
        assert self._opened.wait(HANG_SECONDS)
        return Reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.set()

    def wait(self) -> None:
        assert self.entered.wait(HANG_SECONDS)

    def open(self) -> None:
        self._opened.set()

    def wait_opened(self, seconds: float) -> bool:
        """Wait for a moment, and say whether it is open."""
        return self._opened.wait(seconds)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again and again, until it is so."""
    pause = threading.Event()
    for _ in range(int(HANG_SECONDS / POLL_SECONDS)):
        if is_so():
            return
        pause.wait(POLL_SECONDS)
    raise AssertionError("It never happened.")


def eventually(ask: Callable[[], Response], until: Callable[[Response], bool]) -> Response:
    """Ask again and again, until the answer is the one waited for."""
    responses: list[Response] = []

    def is_so() -> bool:
        responses.append(ask())
        return until(responses[-1])

    wait_until(is_so)
    return responses[-1]


# ASGI

Message = MutableMapping[str, Any]


class AsgiWorld:
    """The ASGI entry point, on a loop in a thread of its own."""

    def __init__(self, open_store: Callable[[], AsyncStore]) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.store = open_store()

    def guard(self, shop: Shop, scope: Callable[[RequestView], str | None], policy: Policy, paths: Paths) -> Send:
        app = semel.asgi.IdempotencyMiddleware(
            starlette(shop), store=self.store, scope=scope, policy=policy, paths=paths
        )

        async def authenticated(scope: Any, receive: Any, send: Any) -> None:
            if shop.is_locked:
                await StarletteResponse("Who are you?", 401)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return lambda request: self.submit(call_asgi(authenticated, request))

    def submit(self, running: Awaitable[Any]) -> "Future[Any]":
        async def awaited() -> Any:
            return await running

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop)

    def perform(self, command: Command[Any]) -> Any:
        async def performed() -> Any:
            return await self.store.perform(command)

        return self.submit(performed()).result(HANG_SECONDS)

    def close(self) -> None:
        self.submit(self.store.close()).result(HANG_SECONDS)
        self.submit(self.loop.shutdown_default_executor()).result(HANG_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def starlette(shop: Shop) -> Starlette:
    async def endpoint(request: StarletteRequest) -> StarletteResponse:
        body = await request.body()
        reply = await run_in_threadpool(shop, request.method, request.url.path, body)
        if isinstance(reply.body, bytes):
            response = StarletteResponse(reply.body, reply.status)
        else:
            response = StreamingResponse(reply.body, reply.status)
        for name, value in reply.headers:
            response.headers.append(name, value)
        return response

    return Starlette(routes=[Route(path, endpoint, methods=METHODS) for path in ("/pay", "/pay/{rest:path}")])


def asgi_scope(request: Request) -> Message:
    path, _, query = request.target.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.mount + unquote(path),
        "raw_path": (request.mount + path).encode(),
        "root_path": request.mount,
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value) for name, value in request.lines],
        "client": ("127.0.0.1", 50_000),
        "server": ("testserver", 80),
    }


class AsgiClient:
    """The server's side of one ASGI request: it remembers what it was sent, and may hang up."""

    def __init__(self, request: Request, chunk: int = 64 * 1024) -> None:
        starts = range(0, max(len(request.body), 1), chunk)
        bodies = [request.body[start : start + chunk] for start in starts]
        self._incoming: list[Message] = [
            {"type": "http.request", "body": body, "more_body": index + 1 < len(bodies)}
            for index, body in enumerate(bodies)
        ]
        self.received = 0
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        if self.received < len(self._incoming):
            self.received += 1
            return self._incoming[self.received - 1]
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.gone.set()

    def response(self, error: BaseException | None = None) -> Response:
        if not self.sent:
            return Response(500, (), b"", error)
        start, *bodies = self.sent
        headers = tuple((bytes(name), bytes(value)) for name, value in start.get("headers", ()))
        return Response(start["status"], headers, b"".join(body.get("body", b"") for body in bodies), error)


async def call_asgi(app: Any, request: Request, **more: Any) -> Response:
    client = AsgiClient(request)
    try:
        await app({**asgi_scope(request), **more}, client.receive, client.send)
    except Exception as error:  # noqa: BLE001 - a server logs it; a test looks at it
        return client.response(error)
    return client.response()


# WSGI


class WsgiWorld:
    """The WSGI entry point, on a few threads."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self.store = open_store()
        self._threads = ThreadPoolExecutor(12)

    def guard(self, shop: Shop, scope: Callable[[RequestView], str | None], policy: Policy, paths: Paths) -> Send:
        app = semel.wsgi.IdempotencyMiddleware(plain(shop), store=self.store, scope=scope, policy=policy, paths=paths)

        def authenticated(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if shop.is_locked:
                start_response("401 Unauthorized", [("Content-Type", "text/plain")])
                return [b"Who are you?"]
            return app(environ, start_response)

        return lambda request: self._threads.submit(call_wsgi, authenticated, request)

    def perform(self, command: Command[Any]) -> Any:
        return self.store.perform(command)

    def close(self) -> None:
        self._threads.shutdown()
        self.store.close()


def plain(shop: Shop) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        reply = shop(environ["REQUEST_METHOD"], environ["SCRIPT_NAME"] + environ["PATH_INFO"], body)
        start_response(f"{reply.status} Said by the app", list(reply.headers))
        return [reply.body] if isinstance(reply.body, bytes) else reply.body

    return app


def wsgi_environ(request: Request) -> WSGIEnvironment:
    """Make what wsgiref makes: repeated lines are joined, and an underscore is as good as a hyphen."""
    path, _, query = request.target.partition("?")
    environ: WSGIEnvironment = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": request.mount,
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "RAW_URI": request.mount + request.target,
        "QUERY_STRING": query,
        "SERVER_NAME": "testserver",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(request.body),
        "wsgi.errors": None,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in request.lines:
        variable = name.upper().replace("-", "_")
        if variable not in {"CONTENT_TYPE", "CONTENT_LENGTH"}:
            variable = f"HTTP_{variable}"
        before = f"{environ[variable]}," if variable.startswith("HTTP_") and variable in environ else ""
        environ[variable] = before + value.decode("latin-1")
    return environ


def call_wsgi(app: Any, request: Request) -> Response:
    return serve_wsgi(app, wsgi_environ(request))


def serve_wsgi(app: Any, environ: WSGIEnvironment) -> Response:
    """Do what a WSGI server does."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    parts: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
        if exc_info is not None and parts:
            raise exc_info[1]
        assert exc_info is not None or not started
        started[:] = [(status, headers)]
        return parts.append

    error: BaseException | None = None
    result: Iterable[bytes] = ()
    try:
        result = app(environ, start_response)
        # Never parts.extend(result): what came before an error counts.
        for part in result:
            parts.append(part)  # noqa: PERF402 - as above
    except Exception as caught:  # noqa: BLE001 - a server logs it; a test looks at it
        error = caught
    finally:
        if hasattr(result, "close"):
            result.close()
    if not started:
        return Response(500, (), b"", error)
    status, headers = started[0]
    lines = tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers)
    return Response(int(status[:3]), lines, b"".join(parts), error)


def chunks(size: int, count: int) -> Iterator[bytes]:
    """Yield *count* different chunks of *size* bytes each."""
    for index in range(count):
        yield bytes([index % 251]) * size

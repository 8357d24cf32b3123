"""A client of an ASGI or WSGI application in the same process: no server, no port. It retries nothing by itself."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import json as json_module
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from semel.errors import ConfigurationError
from semel.testing.mortal import Died, Process, serving

_IN_PROGRESS = int(HTTPStatus.CONFLICT)
_SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send, without its key: each crash uses a new key."""

    method: str
    #: With a query, if there is one: "/rides?dry=1".
    path: str
    #: The body, as JSON; or as it is, in *content*.
    json: Any = None
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: The header that the key is sent in.
    key_header: str = "Idempotency-Key"

    def with_key(self, key: str) -> Request:
        """Return the same request with a key."""
        return replace(self, headers={**self.headers, self.key_header: key})

    @property
    def body(self) -> bytes:
        """The body as it is sent."""
        if self.content is not None:
            return self.content
        return b"" if self.json is None else json_module.dumps(self.json).encode()

    @property
    def fields(self) -> list[tuple[str, str]]:
        """The headers as they are sent."""
        given = {name.lower(): value for name, value in self.headers.items()}
        if self.json is not None:
            given.setdefault("content-type", "application/json")
        return list({"host": "test", "content-length": str(len(self.body)), **given}.items())


@dataclass(frozen=True, slots=True)
class Answer:
    """The response."""

    status: int
    #: Lower-case names.
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body, read as JSON."""
        return json_module.loads(self.body)

    @property
    def is_parked(self) -> bool:
        """Whether it says that the outcome is unknown."""
        return self.status == _IN_PROGRESS and b"outcome-unknown" in self.body.replace(b"_", b"-")

    @property
    def is_final(self) -> bool:
        """Whether a client may stop here."""
        if self.headers.get("idempotent-replayed") == "true" or self.is_parked:
            return True
        return self.status < _SERVER_ERROR and not (self.status == _IN_PROGRESS and "retry-after" in self.headers)


class Application(ABC):
    """An application, ASGI or WSGI."""

    is_async: bool

    @abstractmethod
    def started(self) -> AbstractAsyncContextManager[None]:
        """Start it, and stop it at the end of the block."""

    @abstractmethod
    async def send(self, request: Request, process: Process) -> Answer | None:
        """Let *process* serve one request; None: it died while it did."""


def application(app: Any) -> Application:
    """Return the client of *app*."""
    call = app if inspect.isroutine(app) else getattr(type(app), "__call__", None)  # noqa: B004 - it is looked at, not called
    if call is None:
        raise ConfigurationError(f"{app!r} is not an ASGI or WSGI app.")
    if inspect.iscoroutinefunction(call):
        return _ASGI(app)
    try:
        taken = len(inspect.signature(app).parameters)
    except (TypeError, ValueError):
        taken = 2
    return _ASGI(app) if taken == 3 else _WSGI(app)  # noqa: PLR2004 - scope, receive and send


class _ASGI(Application):
    is_async = True

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._state: dict[str, Any] = {}

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        lifespan = _Lifespan(self._app, self._state)
        await lifespan.start()
        loop = asyncio.get_running_loop()
        reporting = loop.get_exception_handler()
        loop.set_exception_handler(partial(_report, reporting))
        try:
            yield
        finally:
            await lifespan.stop()
            gc.collect()  # Dropped tasks are reported when they are collected: here, and not in the next test.
            loop.set_exception_handler(reporting)

    async def send(self, request: Request, process: Process) -> Answer | None:
        path, _, query = request.path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method.upper(),
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in request.fields],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "state": dict(self._state),
        }
        sent: list[Any] = []
        incoming = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            return await asyncio.get_running_loop().create_future()  # The client stays connected.

        async def send(message: Any) -> None:
            sent.append(message)

        async def serve() -> None:
            with serving(process):
                await self._app(scope, receive, send)

        task = asyncio.ensure_future(serve())
        await asyncio.wait([task])
        error = None if task.cancelled() else task.exception()
        if process.died_at is not None:
            return None
        if error is not None and not isinstance(error, Exception):
            raise error
        return _answered(sent)


def _report(reporting: Any, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report as usual, except a task that was dropped in the middle."""
    if isinstance(context.get("exception"), Died):
        return
    if reporting is None:
        loop.default_exception_handler(context)
    else:
        reporting(loop, context)


def _answered(sent: list[Any]) -> Answer:
    if not sent:
        # If the app raises, the server answers with 500.
        return Answer(_SERVER_ERROR, {}, b"")
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0].get("headers", ())}
    return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))


class _Lifespan:
    def __init__(self, app: Callable[..., Any], state: dict[str, Any]) -> None:
        self._app = app
        self._state = state
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()

    async def start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self._state}
        self._task = asyncio.ensure_future(self._app(scope, self._incoming.get, self._heard.put))
        said = await self._say("lifespan.startup")
        if said is not None and said["type"] == "lifespan.startup.failed":
            raise ConfigurationError(f"The app could not be started: {said.get('message', '')}")

    async def stop(self) -> None:
        await self._say("lifespan.shutdown")
        with suppress(Exception):
            await self._task

    async def _say(self, what: str) -> Any:
        """Send a lifespan message to the app; None: the app does not support lifespan."""
        if self._task.done():
            return None
        self._incoming.put_nowait({"type": what})
        hearing = asyncio.ensure_future(self._heard.get())
        await asyncio.wait([hearing, self._task], return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            return hearing.result()
        hearing.cancel()
        return None


class _WSGI(Application):
    is_async = False

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        yield

    async def send(self, request: Request, process: Process) -> Answer | None:
        started: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], _error: Any = None) -> Callable[[bytes], None]:
            started[:] = [int(status[:3]), {name.lower(): value for name, value in headers}]
            return parts.append

        parts: list[bytes] = []
        body: Any = None
        try:
            with serving(process):
                body = self._app(self._environ(request), start_response)
                parts.extend(body)
        except Exception:  # noqa: BLE001 - the server answers for it
            if not started:
                started = [_SERVER_ERROR, {}]
        except BaseException:
            if process.died_at is None:
                raise
        finally:
            if hasattr(body, "close"):
                with suppress(BaseException):
                    body.close()
        return None if process.died_at is not None else Answer(started[0], started[1], b"".join(parts))

    @staticmethod
    def _environ(request: Request) -> dict[str, Any]:
        path, _, query = request.path.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": request.method.upper(),
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query,
            "SERVER_NAME": "test",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": "127.0.0.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(request.body),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": False,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        for name, value in request.fields:
            spelled = name.upper().replace("-", "_")
            environ[spelled if spelled in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{spelled}"] = value
        return environ

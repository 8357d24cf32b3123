"""The server that the proxy runs in: where it listens, and how it ends. What a request meets is in ``app.py``."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from semel.asgi import IdempotencyMiddleware
from semel.core.outcome import Door
from semel.errors import ConfigurationError
from semel.proxy.app import EMPTY_QUERY, Forwarder, Proxy
from semel.proxy.config import Settings
from semel.proxy.headers import HeaderRules
from semel.proxy.health import Health
from semel.proxy.published_keys import PublishedKeys
from semel.proxy.scope import UNVERIFIED, ByHeader, ByToken, Peers, scope_of
from semel.proxy.tokens import Verifier
from semel.proxy.upstream import Address, Upstream
from semel.proxy.workers import run_workers
from semel.stores.sqlite.file import locate
from semel.telemetry import use
from semel.telemetry.logs import logger

#: Bytes of a request before its body, or behind it.
MAX_HEAD = 64 * 1024

_VERSIONS = {"1.1", "1.0"}
_BACKLOG = 2048
#: Seconds in which the store is told what became of requests that are given up.
_PARTING = 2
#: Seconds in which a process has closed its store after that. One that takes longer hangs, and is killed.
_CLOSING = 10
_UNIX = "unix:"


class ProxyMiddleware(IdempotencyMiddleware):
    """The guard of the proxy, as metrics have it."""

    door: ClassVar[Door] = "proxy"


def build(settings: Settings) -> Proxy:
    """Make the proxy that *settings* say."""
    scope = scope_of(settings.scope, _verifier(settings.jwt_key))
    policy = settings.policy
    rules = HeaderRules(
        scope.identity if isinstance(scope, ByHeader) else None, policy.header_names, passes_key=settings.pass_key
    )
    upstream = Upstream(
        Address.read(settings.upstream),
        # So that what is over before it has connected is never taken for what was sent.
        connect_timeout=min(settings.connect_timeout, settings.timeout / 2),
        keepalive=settings.keepalive,
        connections=settings.connections,
        ca=settings.upstream_ca,
    )
    forwarder = Forwarder(upstream, rules, policy, settings.timeout)
    guard = ProxyMiddleware(
        forwarder,
        store=settings.store,
        scope=scope,
        policy=policy,
        paths=settings.paths or None,
        work=settings.work,
    )
    health = Health(
        guard.store,
        guard.guard.gate,
        partial(upstream.is_up, settings.check),
        alive=settings.healthz,
        ready=settings.readyz,
    )
    return Proxy(guard, forwarder, rules, Peers(settings.trusted, is_unix=settings.listen.startswith(_UNIX)), health)


def _verifier(name: str | None) -> Verifier | PublishedKeys | None:
    if name is None:
        return None
    return PublishedKeys(name) if name.startswith(("https://", "http://")) else Verifier.read(name)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit to what comes before a body, and without what could come past our checks."""

    #: Whether the head of a request is being read.
    _is_in_head = False
    #: Bytes that have come since the last that ended a head, or were of a body.
    _bare = 0
    #: Bytes of the lines behind a body.
    _trailers = 0
    #: Whether nothing more is read: the connection is closed when what it has asked for is answered.
    _is_ending = False
    #: Whether the request asks for another protocol that it does not get. It is then read once more, without that.
    _is_read_again = False

    def data_received(self, data: bytes) -> None:
        """Take what has come, unless it is too long to be the head of a request."""
        if self._is_ending:
            return
        self._unset_keepalive_if_required()
        self._bare += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._bare > MAX_HEAD and not self.transport.is_closing():
            # One line may be without an end, and is not seen below.
            self.send_400_response("The head of the request is too long, or what is behind its body.")

    def send_400_response(self, msg: str) -> None:
        """Refuse what was read; but not where that would be taken for the answer to the request in front of it."""
        if not self._is_answering():
            super().send_400_response(msg)
        elif self._is_in_head or not self.cycle.more_body:
            # The request in front is whole, and gets its own answer.
            self._is_ending = True
            self.cycle.keep_alive = False
        elif not self.pipeline and not self.cycle.response_started:
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | Any | None = self.cycle  # There is none before the first request.
        return cycle is not None and not cycle.response_complete

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_read_again:
                    self.handle_websocket_upgrade()
                    return
                # The parser takes what follows the head for another protocol's. A server may ignore Upgrade (RFC 9110,
                # 7.8), and then it is the body: a new parser reads the same head without that header.
                data = self._plain_head() + data[upgrade.args[0] :]
                self._is_read_again = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn has it.
            else:
                return

    def _plain_head(self) -> bytes:
        """Return the head that was read, without ``Upgrade``. No name or value in it has the end of a line in it."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        self._is_in_head = True
        self._trailers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. What comes behind the body is left out: the headers were checked."""
        if self._is_in_head:
            super().on_header(name, value)
            return
        self._trailers += len(name) + len(value)
        if self._trailers > MAX_HEAD:
            raise ValueError("Too much is behind the body of the request.")

    def on_headers_complete(self) -> None:
        """Begin with the body. Of a request that asks for another protocol, uvicorn would read it as the next request,
        or lose it; so that is heard from a WebSocket only, which begins with a GET and has none. It is not heard behind
        a request that is not answered yet: the WebSocket would begin with the answer to that.
        """
        self._check_head()
        self._is_in_head = False
        self._bare = 0
        if self.parser.should_upgrade():
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise ValueError("A tunnel is not made here.")
            has_body = any(name in {b"content-length", b"transfer-encoding"} for name, _ in self.headers)
            is_plain = has_body or method != b"GET" or not self._should_upgrade()
            self._is_read_again = is_plain or self._is_answering()
            if self._is_read_again:
                return
        elif self.url[:1] != b"/" and self.url != b"*":
            self._take_host()
        super().on_headers_complete()
        if "raw_path" in self.scope:  # Else it is a WebSocket.
            self._mend()

    def _check_head(self) -> None:
        if sum([len(name) + len(value) for name, value in self.headers]) + len(self.url) > MAX_HEAD:
            raise ValueError("The head of the request is too long.")
        if self.parser.get_http_version() not in _VERSIONS:
            raise ValueError("Only HTTP/1.1 and HTTP/1.0 are spoken here.")
        if b"#" in self.url:
            raise ValueError("A fragment is the client's own.")  # It would be lost here; another server may see a path.

    def _mend(self) -> None:
        """Add what uvicorn leaves out of a scope, and see to what it does not know of HTTP/1.0."""
        scope: Any = self.scope
        if self.url.endswith(b"?") and not scope["query_string"]:
            scope[EMPTY_QUERY] = True
        if scope["http_version"] == "1.0":
            self.cycle.waiting_for_100_continue = False  # RFC 9110, 10.1.1
            self.cycle.send = Unframed(self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._bare = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._bare = 0
        if not self._is_read_again:
            super().on_message_complete()

    def _take_host(self) -> None:
        """Take the host from a target such as ``http://shop/pay``: it counts, and not the header (RFC 9112, 3.2.2)."""
        found = _ABSOLUTE.fullmatch(self.url)
        if found is None:
            raise ValueError("The target of the request is not one of this server.")
        behind = found[2] or b""
        self.url = behind if behind[:1] == b"/" else b"/" + behind
        self.headers[:] = [(name, found[1] if name == b"host" else each) for name, each in self.headers]


class Unframed:
    """Sends an answer without a length to a client of HTTP/1.0, which does not know chunks: it ends with the
    connection. uvicorn would send chunks.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Send by *cycle*."""
        self._cycle = cycle
        self._send = cycle.send
        self._is_unframed = False

    async def __call__(self, message: Any) -> None:
        """Send *message*."""
        if message["type"] == "http.response.start":
            self._is_unframed = not any(name == b"content-length" for name, _ in message["headers"])
            if self._is_unframed:
                self._cycle.chunked_encoding = False
        elif self._is_unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


#: A host, without a user, and what is behind it.
_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


class Server(uvicorn.Server):
    """uvicorn's server, which is drained before it stops, and ends by itself what is then still under way."""

    _is_draining = False

    def __init__(self, config: uvicorn.Config, drain: float, grace: float) -> None:
        """Drain for so many seconds, then wait for others."""
        super().__init__(config)
        self._drain = drain
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; what is under way when the time is over is given up, and its client is told so."""
        app: Any = self.config.loaded_app
        timer = asyncio.get_running_loop().call_later(self._grace, app.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse guarded requests, then stop. A second signal stops at once; one that comes before this serves is
        remembered, and it then stops as soon as it has begun.
        """
        if sig == signal.SIGINT and multiprocessing.parent_process() is not None:
            return  # Ctrl-C reaches every process of a terminal, and the parent tells its own.
        if self._is_draining or self.should_exit or not self._drain or not self.started:
            super().handle_exit(sig, frame)
            return
        self._is_draining = True
        app: Any = self.config.loaded_app
        app.drain()
        logger.info("Draining: guarded requests are refused for %g s.", self._drain)
        loop = asyncio.get_running_loop()
        stop = partial(super().handle_exit, sig, frame)
        # A signal comes between any two instructions; what is on the loop is left to the loop.
        loop.call_soon_threadsafe(loop.call_later, self._drain, stop)


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    build(settings)  # What is set wrongly is said before anything listens.
    if urlsplit(settings.store).scheme == "sqlite" and not (folder := locate(settings.store).path.parent).is_dir():
        # A store that can't be reached may come back. A folder does not come by itself.
        raise ConfigurationError(f"--store: there is no folder {folder}. Make it, or correct the URL.")
    scope = scope_of(settings.scope)
    if isinstance(scope, ByToken) and settings.jwt_key is None:
        logger.warning(UNVERIFIED, settings.scope.partition(":")[2])
    with _listening(settings.listen) as listener:
        said = f"Listening on {shown(listener)}, in front of {settings.upstream}. Ctrl-C ends it."
        if settings.workers > 1:
            patience = (settings.drain + settings.grace).total_seconds() + _PARTING + _CLOSING
            run_workers(settings.workers, serve, settings, listener, said, patience=patience)
        else:
            serve(settings, listener, said)


def serve(settings: Settings, listener: socket.socket, said: str | None = None) -> None:
    """Serve in this process, on *listener*, until SIGTERM or SIGINT; print what is *said* once those are heard."""
    config = uvicorn.Config(
        partial(build, settings),
        factory=True,
        http=Protocol,
        lifespan="on",
        log_config=None,
        access_log=False,
        # What a peer says of itself is for our own rules to judge.
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=math.ceil(settings.grace.total_seconds()) + _PARTING,
    )
    if settings.metrics is not None and settings.workers > 1:
        # One process counts by a sink that the command line has put there; several have each their own.
        from semel.telemetry.prometheus import Prometheus  # noqa: PLC0415 - an extra

        use(Prometheus())
    server = Server(config, settings.drain.total_seconds(), settings.grace.total_seconds())
    with _hearing(server):
        if said is not None:
            print(said, flush=True)  # noqa: T201 - the command line's own line
        server.run(sockets=[listener])


def shown(listener: socket.socket) -> str:
    """Say where *listener* listens."""
    if listener.family == socket.AF_UNIX:
        return f"{_UNIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _hearing(server: Server) -> Iterator[None]:
    """Have *server* hear signals before it runs, too. It ends with status 0 after one: uvicorn raises it once more when
    all is done, and the server has then heard it.
    """
    handled = {each: signal.signal(each, server.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, before in handled.items():
            signal.signal(each, before)


@contextmanager
def _listening(where: str) -> Iterator[socket.socket]:
    listener = bound(where)
    try:
        yield listener
    finally:
        listener.close()
        if where.startswith(_UNIX):
            with suppress(OSError):
                Path(where.removeprefix(_UNIX)).unlink()


def bound(where: str) -> socket.socket:
    """Return a socket that listens *where*: ``127.0.0.1:8080``, ``[::1]:8080``, ``unix:/run/semel.sock``."""
    try:
        if where.startswith(_UNIX):
            return _bound_file(where.removeprefix(_UNIX))
        host, colon, port = where.rpartition(":")
        if not colon or not port.isdigit() or not host:
            raise ConfigurationError(f"--listen can't be {where!r}: it is HOST:PORT or unix:FILE.")
        name = host.strip("[]")
        with ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((name, int(port)))
            on_error.pop_all()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigurationError(f"--listen: {where}: {getattr(error, 'strerror', None) or error}.") from None
    listener.listen(_BACKLOG)
    return listener


def _bound_file(path: str) -> socket.socket:
    """Return a Unix socket. Who may connect may also name a user, so it is open to this user and its group only."""
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as probe, suppress(ConnectionRefusedError):
            probe.connect(path)
            raise ConfigurationError(f"--listen: another process listens on {path}.")
        Path(path).unlink()  # It is left over from a process that was killed.
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o117)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener

"""The server that the proxy runs in: where it listens, and how it ends. What a request meets is in ``app.py``."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semel.asgi import IdempotencyMiddleware
from semel.core.outcome import Door
from semel.errors import ConfigurationError
from semel.proxy.app import Forwarder, Proxy
from semel.proxy.config import Settings
from semel.proxy.headers import HeaderRules
from semel.proxy.health import Health
from semel.proxy.scope import UNVERIFIED, ByHeader, ByToken, Peers, scope_of
from semel.proxy.tokens import Verifier
from semel.proxy.upstream import Address, Upstream
from semel.proxy.workers import run_workers
from semel.telemetry import use
from semel.telemetry.logs import logger

#: Bytes of a request before its body.
MAX_HEAD = 64 * 1024

_BACKLOG = 2048
_UNIX = "unix:"


class ProxyMiddleware(IdempotencyMiddleware):
    """The guard of the proxy, as metrics have it."""

    door: ClassVar[Door] = "proxy"


def build(settings: Settings) -> Proxy:
    """Make the proxy that *settings* say."""
    verifier = Verifier.read(settings.jwt_key) if settings.jwt_key is not None else None
    scope = scope_of(settings.scope, verifier)
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
    guard = ProxyMiddleware(
        Forwarder(upstream, rules, policy, settings.timeout),
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
    return Proxy(guard, rules, Peers(settings.trusted), health, policy)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit to what comes before a body, and without what could come past our checks."""

    #: Whether the head of a request is being read, and the bytes that have come of it in reads without its end.
    _is_in_head = False
    _head = 0

    def data_received(self, data: bytes) -> None:
        """Take what has come, unless it is too long to be the head of a request."""
        super().data_received(data)
        if self._is_in_head:
            # One line of it may be without an end, and is not seen below.
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        self._is_in_head = True
        self._head = 0

    def on_headers_complete(self) -> None:
        """Begin with the body. Of a request that asks for another protocol, uvicorn would read it as the next request,
        or lose it; and a WebSocket begins with a GET.
        """
        self._is_in_head = False
        if sum([len(name) + len(value) for name, value in self.headers]) > MAX_HEAD:
            raise ValueError("The head of the request is too long.")
        is_upgrade = self.parser.should_upgrade()
        if is_upgrade:
            has_body = any(name in {b"content-length", b"transfer-encoding"} for name, _ in self.headers)
            if has_body or (self._should_upgrade() and self.parser.get_method() != b"GET"):
                raise ValueError("A request that asks for another protocol (Upgrade) can't have a body.")
        super().on_headers_complete()
        if not is_upgrade:
            # What comes behind the body would be put to the headers, and those were checked.
            self.headers = []


class Server(uvicorn.Server):
    """uvicorn's server, which is drained before it stops."""

    _is_draining = False

    def __init__(self, config: uvicorn.Config, drain: float) -> None:
        """Drain for so many seconds."""
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse guarded requests, then stop. A second signal stops at once."""
        if self._is_draining or not self._drain or not self.started:
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
    scope = scope_of(settings.scope)
    if isinstance(scope, ByToken) and settings.jwt_key is None:
        logger.warning(UNVERIFIED, settings.scope.partition(":")[2])
    with _listening(settings.listen) as listener:
        print(f"Listening on {shown(listener)}, in front of {settings.upstream}. Ctrl-C ends it.", flush=True)  # noqa: T201 - the command line's own line
        if settings.workers > 1:
            run_workers(settings.workers, serve, settings, listener)
        else:
            serve(settings, listener)


def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve in this process, on *listener*, until SIGTERM or SIGINT."""
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
        timeout_graceful_shutdown=int(settings.grace.total_seconds()),
    )
    if settings.metrics is not None and settings.workers > 1:
        # One process counts by a sink that the command line has put there; several have each their own.
        from semel.telemetry.prometheus import Prometheus  # noqa: PLC0415 - an extra

        use(Prometheus())
    with _quiet():
        Server(config, settings.drain.total_seconds()).run(sockets=[listener])


def shown(listener: socket.socket) -> str:
    """Say where *listener* listens."""
    if listener.family == socket.AF_UNIX:
        return f"{_UNIX}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _quiet() -> Iterator[None]:
    """End with status 0 after a signal: uvicorn raises it once more when all is done."""
    handled = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
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
        listener = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((name, int(port)))
    except (OSError, OverflowError) as error:
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

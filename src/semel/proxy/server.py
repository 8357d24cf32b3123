"""The server that the proxy runs in: where it listens, and how it ends. What a request meets is in ``app.py``."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from urllib.parse import urlsplit

import uvicorn

from semel.asgi import IdempotencyMiddleware
from semel.core.outcome import Door
from semel.errors import ConfigurationError, StoreError, StoreUnavailable
from semel.guard.request import Routes
from semel.proxy.answers import Cors
from semel.proxy.app import Forwarder, Proxy
from semel.proxy.config import Settings
from semel.proxy.headers import HeaderRules
from semel.proxy.health import Health
from semel.proxy.place import SpelledRoutes
from semel.proxy.protocol import Protocol
from semel.proxy.published_keys import PublishedKeys
from semel.proxy.scope import NO_AUDIENCE, UNVERIFIED, ByHeader, Peers, scope_of
from semel.proxy.tokens import Verifier
from semel.proxy.upstream import Address, Upstream
from semel.proxy.workers import run_workers
from semel.stores.sqlite.file import locate
from semel.telemetry import use
from semel.telemetry.logs import logger

_BACKLOG = 2048
#: Seconds in which the store is told what became of requests that are given up.
_PARTING = 2
#: Seconds in which a process has closed its store after that. One that takes longer hangs, and is killed.
_CLOSING = 10
#: Files that a process has open beside its connections to clients and to the upstream: the store's, mostly.
_OTHER_FILES = 128
_UNIX = "unix:"


class ProxyMiddleware(IdempotencyMiddleware):
    """The guard of the proxy: as metrics have it, and of every spelling of a path."""

    door: ClassVar[Door] = "proxy"
    routing: ClassVar[type[Routes]] = SpelledRoutes


def build(settings: Settings) -> Proxy:
    """Make the proxy that *settings* say."""
    scope = scope_of(settings.scope, _verifier(settings.jwt_key), settings.jwt_audience, settings.jwt_issuer)
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
    forwarder = Forwarder(upstream, rules, policy, settings.timeout, settings.no_effect)
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
    cors = Cors(settings.cors_origins, policy) if settings.cors_origins else None
    peers = Peers(settings.trusted, is_unix=settings.listen.startswith(_UNIX))
    return Proxy(guard, forwarder, rules, peers, health, cors=cors)


def _verifier(name: str | None) -> Verifier | PublishedKeys | None:
    if name is None:
        return None
    return PublishedKeys(name) if name.startswith(("https://", "http://")) else Verifier.read(name)


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
    # What is set wrongly is said before anything listens.
    asyncio.run(_look_at_store(build(settings)))
    kept = ""
    if urlsplit(settings.store).scheme == "sqlite":
        file = locate(settings.store).path
        if not file.parent.is_dir():
            # A store that can't be reached may come back. A folder does not come by itself.
            raise ConfigurationError(f"--store: there is no folder {file.parent}. Make it, or correct the URL.")
        # It is the store where none was given, too. A proxy elsewhere, with a file of its own, would run a key again.
        kept = f", with its keys in {file} alone"
    if settings.scope.startswith("jwt:") and settings.jwt_key is None:
        logger.warning(UNVERIFIED, settings.scope.partition(":")[2])
    elif settings.jwt_key is not None and not settings.jwt_audience:
        logger.warning(NO_AUDIENCE)
    with _listening(settings.listen) as listener:
        said = f"Listening on {shown(listener)}, in front of {settings.upstream}{kept}. Ctrl-C ends it."
        if settings.workers > 1:
            patience = (settings.drain + settings.grace).total_seconds() + _PARTING + _CLOSING
            run_workers(settings.workers, serve, settings, listener, said, patience=patience)
        else:
            serve(settings, listener, said)


async def _look_at_store(proxy: Proxy) -> None:
    store = proxy.guard.store
    try:
        await store.open()
    except StoreUnavailable:
        pass  # It may come back.
    except StoreError as error:
        raise ConfigurationError(str(error)) from None
    finally:
        await store.close()


def serve(settings: Settings, listener: socket.socket, said: str | None = None) -> None:
    """Serve in this process, on *listener*, until SIGTERM or SIGINT; print what is *said* once those are heard."""
    config = uvicorn.Config(
        partial(build, settings),
        factory=True,
        http=Protocol.limited(settings.client_timeout.total_seconds(), most_clients(settings)),
        # uvloop loses what of an answer over TLS is not read yet when the upstream closes its connection.
        loop="asyncio" if Address.read(settings.upstream).is_encrypted else "auto",
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


def most_clients(settings: Settings) -> int:
    """Return how many connections of clients this process can have, and let it open as many files as that needs."""
    others = 2 * settings.connections + _OTHER_FILES  # To the upstream, and as many again for WebSockets.
    wanted = settings.client_connections + others
    files, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != files < wanted:
        files = wanted if limit == resource.RLIM_INFINITY else min(wanted, limit)
        with suppress(OSError, ValueError):  # Some kernels have another limit behind that one.
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, limit))
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files < wanted:
            most = max(files // 2, files - others)
            logger.warning("This process can open %d files: client_connections is %d. See ulimit -n.", files, most)
            return most
    return settings.client_connections


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

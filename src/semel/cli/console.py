"""``semel console``: serves the console of one store on this machine. The console itself is in ``semel.console``."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from semel.cli.address import StoreOption, given
from semel.cli.main import is_of
from semel.cli.metrics import MetricsOption, served
from semel.errors import ConfigurationError, SemelError
from semel.stores.base import this_user

#: The token may be given in the environment: it then stays the same over restarts.
VARIABLE = "SEMEL_CONSOLE_TOKEN"
#: How often the store is counted for the charts, while no page is open.
SAMPLE_SECONDS = 20.0

_NEEDED = "semel console needs jinja2 and uvicorn. Run: pip install 'semel[console]'"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OTHER_HOST = (
    b"This console answers under the names 127.0.0.1, [::1], localhost and those of --host only. "
    b"Behind a proxy, give it the name that browsers use: semel console --host NAME\n"
)
MAX_PORT = 65535
#: They are the way to end it.
STOPPING = (signal.SIGINT, signal.SIGTERM)


def console(
    *,
    store: StoreOption = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = "127.0.0.1:8900",
    path: Annotated[str, typer.Option(metavar="PATH", help="Serve it below this path.")] = "/",
    read_only: Annotated[bool, typer.Option("--read-only", help="Only look: no action can be taken.")] = False,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Show bodies and the results of steps, which may hold personal data.")
    ] = False,
    names: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name that browsers reach it by, through a proxy. Repeatable."),
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Serve a web page about a store: what is in it, what is stuck, and what can be done about it."""
    host, port = address_of(listen)
    try:
        import uvicorn  # noqa: PLC0415 - needs the extra semel[console]

        from semel.console import Console, Token  # noqa: PLC0415 - as above
    except ModuleNotFoundError as missing:
        if not is_of(missing, "jinja2", "markupsafe", "uvicorn"):
            raise
        raise ConfigurationError(_NEEDED) from None
    token = os.environ.get(VARIABLE, "").strip() or secrets.token_urlsafe(24)
    roles = ["read", *(() if read_only else ("act",)), *(("bodies",) if bodies else ())]
    app = Console(given(store), auth=Token(token, name=this_user(), roles=roles), path=path)
    base = "/" + "/".join(part for part in path.split("/") if part)
    # Neither the access log nor the server's own name: a log would have the keys that are looked at.
    config = uvicorn.Config(
        _OnlyHosts(app, {*_LOOPBACK, host, *map(name_of, names or ())}) if names or _is_loopback(host) else app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
    )
    server = _Server(config, uvicorn.Server(config), f"{base.rstrip('/')}/#{quote(token, safe='')}", host)
    with served(metrics):
        threading.Thread(target=_sample, args=(app,), daemon=True).start()
        server.run()


def address_of(listen: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ConfigurationError(f"--listen is HOST:PORT, such as 127.0.0.1:8900, not {listen!a}.")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _OnlyHosts:
    """Answers under some names only. A page of another site could have its own name lead to this machine, and would
    then be of the same origin as the console (DNS rebinding).
    """

    def __init__(self, app: Any, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(_OTHER_HOST))]
        await send({"type": "http.response.start", "status": 421, "headers": headers})
        await send({"type": "http.response.body", "body": _OTHER_HOST})

    def _is_known(self, scope: Any) -> bool:
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return len(given) == 1 and name_of(given[0]) in self._hosts


def name_of(host: str) -> str:
    """Return the name in a ``Host`` header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


class _Server:
    """uvicorn's server, which says where it is once it listens."""

    def __init__(self, config: Any, server: Any, place: str, host: str) -> None:
        self._config = config
        self._server = server
        self._place = place
        self._host = host

    def run(self) -> None:
        bound = _bound(self._config)
        port = bound.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        if not _is_loopback(self._host):
            print(
                f"semel: listening on {self._host}: others on this network can reach the login, and without https they "
                "can read what is sent. Put a server with TLS in front of it.",
                file=sys.stderr,
            )
        for each in STOPPING:  # Before uvicorn has handlers of its own, and again when it has ended: it sends it anew.
            signal.signal(each, _end)
        print(f"The console is at http://{host}:{port}{self._place}")
        print("This link has the token, and is printed once. Ctrl-C ends the console.", flush=True)
        self._server.run(sockets=[bound])


def _end(*_: object) -> NoReturn:
    sys.exit(0)


def _bound(config: Any) -> Any:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((config.host, config.port))
        # From here on a browser that follows the link waits, and is not refused.
        made.listen()
    except OSError as error:
        raise ConfigurationError(f"Can't listen on {config.host}:{config.port}: {error.strerror}.") from None
    return made


def _sample(app: Any) -> None:
    """Count now and then, so that the charts have no gaps while no page is open. First say if the store is too new."""
    pause = threading.Event()
    with suppress(SemelError):
        if (newer := app.site.reader.newer()) is not None:
            print(f"semel: {newer}", file=sys.stderr, flush=True)
    while True:
        with suppress(SemelError):  # A page says it.
            app.site.samples.now()
        pause.wait(SAMPLE_SECONDS)

"""The server behind the proxy: its address, a pool of connections to it, one request at a time. It guards nothing.

A request is sent once. Clients of HTTP send some methods again when a kept connection turns out to be closed; here that
is the end of the request, since the first may have been carried out. A guarded request does not meet it: it has a
connection that was made for it, on which no answer to another request can come. WebSockets are aiohttp's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohappyeyeballs import start_connection
from multidict import CIMultiDict
from yarl import URL

from semel.core.decision import RETRY_AFTER_SECONDS
from semel.errors import ConfigurationError, UpstreamLost, UpstreamUnreachable
from semel.proxy.link import Link

#: Bytes of one header of an answer, or of its status line.
MAX_HEADER = 64 * 1024
#: Of one message of a WebSocket.
MAX_MESSAGE = 16 * 1024 * 1024

#: Seconds after which the next address of a name is tried as well (RFC 8305).
NEXT_ADDRESS = 0.25

#: One in so many connections is for guarded requests alone.
_KEPT_SHARE = 4

#: aiohttp would add them, and the client did not send them.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclass(frozen=True)
class Address:
    """Where the upstream is."""

    #: As the start of a URL: scheme, host and port.
    origin: str
    #: The file of a Unix socket.
    socket: str | None = None

    @classmethod
    def read(cls, url: str) -> Address:
        """Read ``http://host:port``, ``https://host`` or ``unix:///file``."""
        try:
            parts = urlsplit(url)
            # A name that is not ASCII has another form on the wire.
            host, port = parts.hostname and URL.build(scheme="http", host=parts.hostname).raw_host, parts.port
        except ValueError as error:
            raise ConfigurationError(f"--upstream: {error}.") from None
        if parts.scheme == "unix" and parts.path and not host:
            return cls("http://localhost", unquote(parts.path))
        if parts.scheme not in {"http", "https"} or not host:
            raise ConfigurationError(
                "--upstream is http://HOST:PORT, https://HOST or unix:///FILE, such as http://127.0.0.1:3000."
            )
        if parts.username is not None or parts.path not in {"", "/"} or parts.query or parts.fragment:
            raise ConfigurationError("--upstream has no user, path or query: those of each request are passed on.")
        name = f"[{host}]" if ":" in host else host
        return cls(f"{parts.scheme}://{name}" + (f":{port}" if port is not None else ""))

    @property
    def place(self) -> tuple[str, int]:
        """The host and the port to connect to."""
        parts = urlsplit(self.origin)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @cached_property
    def is_resolved(self) -> bool:
        """Whether the host is an address of IP: there is no name that has others."""
        with suppress(ValueError):
            ipaddress.ip_address(self.place[0])
            return True
        return False

    @property
    def is_encrypted(self) -> bool:
        """Whether it is spoken to by TLS."""
        return self.origin.startswith("https:")


class Upstream:
    """A pool of connections to one server."""

    #: Places for connections: those of any request, and those that are kept for guarded ones. Else as many clients as
    #: there are places, with large answers that they take slowly, would keep out what is guarded.
    _free: asyncio.Semaphore
    _kept: asyncio.Semaphore
    #: For WebSockets, over connections of their own.
    _sockets: aiohttp.ClientSession

    def __init__(
        self,
        address: Address,
        *,
        connect_timeout: timedelta,
        keepalive: timedelta,
        connections: int,
        ca: str | None = None,
    ) -> None:
        """Connect to *address* when there is something to send. *ca* is a file of certificates to trust for TLS."""
        self.address = address
        self._connect = connect_timeout.total_seconds()
        self._keepalive = keepalive.total_seconds()
        self._connections = connections
        self._ca = ca
        #: The last that was used is the next.
        self._idle: list[Link] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._is_open = False
        self._host = address.origin.partition("://")[2].encode()

    def open(self) -> None:
        """Be ready to connect, on the loop that runs."""
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        kept = max(1, self._connections // _KEPT_SHARE) if self._connections > 1 else 0
        self._free = asyncio.Semaphore(self._connections - kept)
        self._kept = asyncio.Semaphore(kept) if kept else self._free
        self._tls = ssl.create_default_context(cafile=self._ca) if self.address.is_encrypted else None
        connector: aiohttp.BaseConnector
        if self.address.socket is not None:
            connector = aiohttp.UnixConnector(self.address.socket, limit=self._connections)
        else:
            connector = aiohttp.TCPConnector(ssl=self._tls or True, limit=self._connections)
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_follow_none)
        self._sockets = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, connect=self._connect, sock_connect=self._connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_ADDED,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
            trace_configs=[redirects],
        )
        self._sockets._retry_connection = False  # noqa: SLF001 - there is no other way, and a test watches it

    async def close(self) -> None:
        """Close all connections; those in use, when they no longer are."""
        self._is_open = False
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for link in self._idle:
            link.abort()
        self._idle.clear()
        await self._sockets.close()

    async def send(
        self,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] | None,
        *,
        is_guarded: bool = False,
    ) -> Link:
        """Send one request, once; return the beginning of its answer. It is to be given back (:meth:`finish`).

        ``UpstreamUnreachable``: nothing was sent. ``UpstreamLost``: it may have been, and may have been carried out.
        """
        place = self._kept if is_guarded and self._free.locked() else self._free
        await self._acquired(place)
        try:
            link = await self._link(is_new=is_guarded)
        except BaseException:
            place.release()
            raise
        link.place = place
        try:
            await link.exchange(method, target, self._completed(headers), body)
        except BaseException:
            self.finish(link)
            raise
        return link

    def finish(self, link: Link) -> None:
        """Keep a connection for the next request, if its exchange has ended well."""
        link.place.release()
        if link.finish() and self._keepalive and self._is_open:
            link.idle_since = self._loop.time()
            self._idle.append(link)
            if self._sweep is None:
                self._sweep = self._loop.call_later(self._keepalive, self._close_idle)
        else:
            link.abort()

    async def _link(self, *, is_new: bool) -> Link:
        """Return a connection: one that is idle, or a new one.

        What a new one is asked for could otherwise get, on one that is kept, what the upstream sends too much of for an
        earlier request, or its end.
        """
        oldest = self._loop.time() - self._keepalive
        while self._idle:
            if is_new:
                # The new one takes the place of the oldest, so that there are never more than was allowed.
                self._idle.pop(0).abort()
                break
            link = self._idle.pop()
            if link.idle_since >= oldest and link.is_quiet():
                return link
            link.abort()
        try:
            async with asyncio.timeout(self._connect):
                return await self._connected()
        except (OSError, UnicodeError) as error:  # A time that is over is an OSError, too.
            raise UpstreamUnreachable(retry_after=RETRY_AFTER_SECONDS) from error

    async def _acquired(self, place: asyncio.Semaphore) -> None:
        if not place.locked():
            await place.acquire()
            return
        try:
            async with asyncio.timeout(self._connect):
                await place.acquire()
        except TimeoutError as error:
            raise UpstreamUnreachable(retry_after=RETRY_AFTER_SECONDS) from error

    async def _connected(self) -> Link:
        def made() -> Link:
            return Link(self._loop)

        if self.address.socket is not None:
            _, link = await self._loop.create_unix_connection(made, self.address.socket)
        elif self.address.is_resolved:
            _, link = await self._loop.create_connection(made, *self.address.place, ssl=self._tls)
        else:
            host, port = self.address.place
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # The loop would try one address after the other, and one that is silent would use up the time.
            connected = await start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS, loop=self._loop)
            name = host if self._tls else None
            _, link = await self._loop.create_connection(made, sock=connected, ssl=self._tls, server_hostname=name)
        return link

    def _close_idle(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - self._keepalive
        kept = [link for link in self._idle if not link.is_closed and link.idle_since > oldest]
        for link in self._idle:
            if link not in kept:
                link.abort()
        self._idle = kept
        if kept:
            self._sweep = self._loop.call_at(kept[0].idle_since + self._keepalive, self._close_idle)

    def _completed(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Add what HTTP/1.1 wants, and a client of HTTP/1.0 has not sent."""
        if not self._keepalive:
            headers = [*headers, (b"connection", b"close")]
        for name, _ in headers:
            if name == b"host":
                return headers
        return [(b"host", self._host), *headers]

    async def connect(
        self, target: str, headers: Iterable[tuple[bytes, bytes]], protocols: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket; raise ``aiohttp.WSServerHandshakeError`` where the upstream does not want one."""
        try:
            return await self._sockets.ws_connect(
                self._url(target), headers=_fields(headers), protocols=protocols, max_msg_size=MAX_MESSAGE
            )
        except aiohttp.WSServerHandshakeError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamUnreachable from error

    async def is_up(self, check: str | None) -> bool:
        """Whether it can be connected to; with *check*, whether a GET of that path gets no server error."""
        try:
            async with asyncio.timeout(self._connect):
                if check is not None:
                    # Of the places that are kept: what other clients take says nothing of the upstream.
                    link = await self.send("GET", check, [(b"via", b"1.1 semel")], None, is_guarded=True)
                    self.finish(link)
                    return link.status < 500  # noqa: PLR2004 - HTTP
                (await self._connected()).abort()
                return True
        except (OSError, UpstreamUnreachable, UpstreamLost):
            return False

    def _url(self, target: str) -> URL:
        # Not a byte of it is changed: /%7Ex/./c is another resource than /~x/c, to some.
        return URL(self.address.origin + target, encoded=True)


async def _follow_none(*_args: object) -> None:
    raise aiohttp.ClientConnectionError("A WebSocket is not followed to another place.")


def _fields(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    # aiohttp writes UTF-8, and other bytes were refused.
    return CIMultiDict([(name.decode("ascii"), each.decode()) for name, each in headers])

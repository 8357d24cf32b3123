"""The server behind the proxy: its address, a pool of connections to it, one request at a time. It guards nothing.

A request is sent once. aiohttp would send some methods again when a kept connection turns out to be closed; here that
is the end of the request, since the first may have been carried out.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from semel.core.decision import RETRY_AFTER_SECONDS
from semel.errors import ConfigurationError, UpstreamLost, UpstreamUnreachable

#: Bytes of one header of an answer, or of its status line.
MAX_HEADER = 64 * 1024
#: Of one message of a WebSocket.
MAX_MESSAGE = 16 * 1024 * 1024

#: aiohttp would add them, and the client did not send them.
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

#: Nothing of a request is sent before these: there is no connection yet. Whatever else is raised leaves it open.
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


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

    @property
    def is_encrypted(self) -> bool:
        """Whether it is spoken to by TLS."""
        return self.origin.startswith("https:")


class Upstream:
    """A pool of connections to one server."""

    _session: aiohttp.ClientSession
    #: For WebSockets, over the same connections.
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

    def open(self) -> None:
        """Be ready to connect, on the loop that runs."""
        options: dict[str, Any] = {
            "limit": self._connections,
            "keepalive_timeout": self._keepalive,
            "force_close": not self._keepalive,
        }
        connector: aiohttp.BaseConnector
        if self.address.socket is not None:
            connector = aiohttp.UnixConnector(self.address.socket, **options)
        else:
            tls: Any = ssl.create_default_context(cafile=self._ca) if self.address.is_encrypted else True
            connector = aiohttp.TCPConnector(ssl=tls, **options)
        # How long an answer may take is for the caller to say, who knows what it is.
        timeout = aiohttp.ClientTimeout(total=None, connect=self._connect, sock_connect=self._connect, sock_read=None)
        common: dict[str, Any] = {
            "connector": connector,
            "timeout": timeout,
            "cookie_jar": aiohttp.DummyCookieJar(),
            "auto_decompress": False,
            "skip_auto_headers": _NOT_ADDED,
            "max_line_size": MAX_HEADER,
            "max_field_size": MAX_HEADER,
        }
        self._session = aiohttp.ClientSession(**common)
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_follow_none)
        self._sockets = aiohttp.ClientSession(**common, connector_owner=False, trace_configs=[redirects])
        for each in (self._session, self._sockets):
            each._retry_connection = False  # noqa: SLF001 - there is no other way, and a test watches it

    async def close(self) -> None:
        """Close all connections."""
        await self._sockets.close()
        await self._session.close()

    async def send(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] | None,
    ) -> aiohttp.ClientResponse:
        """Send one request, once; return the beginning of its answer.

        ``UpstreamUnreachable``: nothing was sent. ``UpstreamLost``: it may have been, and may have been carried out.
        """
        url, fields = self._url(target), _fields(headers)
        try:
            return await self._session.request(method, url, headers=fields, data=body, allow_redirects=False)
        except _NOT_CONNECTED as error:
            raise UpstreamUnreachable(retry_after=RETRY_AFTER_SECONDS) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise  # The caller's own.
            raise UpstreamLost from error

    async def more(self, response: aiohttp.ClientResponse) -> bytes:
        """Return what has come of the body of an answer; nothing: that was all."""
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise
            raise UpstreamLost from error

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
                    host = self.address.origin.partition("://")[2].encode()
                    response = await self.send("GET", check, [(b"host", host), (b"via", b"1.1 semel")], None)
                    response.release()
                    return response.status < 500  # noqa: PLR2004 - HTTP
                if self.address.socket is not None:
                    _, writer = await asyncio.open_unix_connection(self.address.socket)
                else:
                    _, writer = await asyncio.open_connection(*self.address.place)
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
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

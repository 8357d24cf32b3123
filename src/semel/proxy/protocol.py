"""One connection of a client: how its bytes become requests, and how long it may take. What a request means is not
decided here.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import re
import sys
import termios
from contextlib import suppress
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from semel.proxy.app import EMPTY_QUERY
from semel.proxy.config import Settings
from semel.telemetry.logs import logger

#: Bytes of a request before its body, or behind it.
MAX_HEAD = 64 * 1024
#: Header lines of a request. Each costs more than the bytes that a client sends for it.
MAX_FIELDS = 1000
#: Requests of one connection that wait for the answer to the one in front of them.
MAX_PIPELINED = 100

_VERSIONS = {"1.1", "1.0"}
#: How often, in the time that a client has, its connection is looked at.
_LOOKS = 4
#: Of the connections that wait for their client, one in so many is closed to make place. Each look for them takes time.
_SHARE = 16
#: Seconds between two warnings that there are as many connections as there may be.
_WARN_EVERY = 60.0


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a limit to what comes before a body, to how long a client is waited for, and to how many
    connections there are; and without what could come past our checks.
    """

    #: Seconds in which a client sends the head of a request, or the next part of a body, or takes some of its answer.
    patience: ClassVar[float] = Settings.client_timeout.total_seconds()
    #: How many connections this process has at most.
    most: ClassVar[int] = Settings.client_connections
    warned_at: ClassVar[float] = -math.inf

    #: Since when the client is waited for, as far as it is.
    _since = 0.0
    #: Bytes of answers that the client had not taken when its connection was last looked at.
    _untaken = 0
    _timer: asyncio.TimerHandle | None = None
    #: Whether the head of a request is being read; or its body.
    _is_in_head = _is_in_body = False
    #: Bytes that have come since the last that ended a head, or were of a body.
    _bare = 0
    #: Bytes of the lines behind a body.
    _trailers = 0
    #: Whether nothing more is read: the connection is closed when what it has asked for is answered.
    _is_ending = False
    #: Whether the request asks for another protocol that it does not get. It is then read once more, without that.
    _is_read_again = False

    @classmethod
    def limited(cls, patience: float, most: int) -> type[Protocol]:
        """Return this class with other limits."""
        return type("LimitedProtocol", (cls,), {"patience": patience, "most": most})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._look_later()
        if len(self.connections) > self.most:
            self._make_place()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._look_no_more()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to uvicorn's WebSockets, which see by themselves whether a client is still there."""
        self._look_no_more()
        super().handle_websocket_upgrade()

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(self.patience / _LOOKS, self._look)

    def _look_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Close the connection if its client has not done in time what it is waited for. A timer for each request would
        cost more than the request's own work here, so there is one for each connection.
        """
        now, before = self.loop.time(), self._untaken
        self._untaken = self._count_untaken()
        if self._untaken != before if self._untaken else not self._is_awaited():
            self._since = now
        if now - self._since < self.patience:
            self._look_later()
        else:
            self.transport.abort()

    def _is_awaited(self) -> bool:
        """Whether it is the client's turn to send."""
        if not self._is_answering():
            return True
        return self._is_in_body and not self.flow.read_paused and not self.cycle.waiting_for_100_continue

    def _count_untaken(self) -> int:
        """Return how many bytes the client has not taken. Those in the kernel count, too: it tells of room for more
        only when a good part of its buffer is free, which takes a slow client minutes.
        """
        size = self.transport.get_write_buffer_size()
        if size:
            with suppress(OSError):  # Not every kernel tells it of a socket.
                found = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
                size += int.from_bytes(found, sys.byteorder)
        return size

    def _make_place(self) -> None:
        """Close some of the connections that wait for their client: first those without a request, then those in a
        body, and of both those that have waited for longest. Where all are busy, this one is closed.
        """
        others = [each for each in self.connections if isinstance(each, Protocol) and each is not self]
        awaited = [each for each in others if each._is_awaited()]  # noqa: SLF001 - of this class
        awaited.sort(key=lambda each: (each._is_in_body, each._since))  # noqa: SLF001 - as above
        for each in awaited[: max(1, len(awaited) // _SHARE)] or [self]:
            self.connections.discard(each)
            each.transport.abort()
        if (now := self.loop.time()) - type(self).warned_at > _WARN_EVERY:
            type(self).warned_at = now
            logger.warning("There are %d connections, as many as there may be: some are closed for others.", self.most)

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
        self._since = self.loop.time()
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
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("Too many requests wait for the answer to the one in front of them.")
        self._since = self.loop.time()
        self._is_in_head = False
        self._is_in_body = True
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
        if len(self.headers) > MAX_FIELDS:
            raise ValueError("The request has too many headers.")
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
        self._since = self.loop.time()
        self._bare = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._is_in_body = False
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

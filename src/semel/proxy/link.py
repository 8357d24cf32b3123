"""One connection to the server behind the proxy, and one exchange on it at a time. What is sent, and where, is not
decided here.

An answer is parsed by llhttp, which is strict. What it says of its own length and end decides whether the connection is
used again: after anything that is odd it is closed, since the next answer could be part of this one.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import AsyncIterator, Iterable

import httptools

from semel.errors import UpstreamLost

#: Bytes of the head of an answer, with those behind its body; and bytes that may come without any of its body.
MAX_HEAD = 256 * 1024
#: Bytes of an answer that wait for their client before no more are read.
MAX_WAITING = 128 * 1024

_INTERIM = 100
_SWITCHING = 101
_FINAL = 200
_LAST = 599
_EMPTY = 204
_BODILESS = frozenset({_EMPTY, 304})
#: A request by one of these has no body, unless it says how long it is.
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_CHUNKED = b"chunked"
#: Bytes of a line of a head beside its name and its value.
_LINE = 4

_CLOSED = "the connection was closed"
_TOO_LONG = "the head of the answer is too long, or what is behind its body"


class Link(asyncio.Protocol):
    """A connection; and the answer that comes on it."""

    transport: asyncio.Transport
    #: That of its exchange, among those that there are.
    place: asyncio.Semaphore
    status: int
    headers: list[tuple[bytes, bytes]]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Be made by *loop*, which connects it."""
        self._loop = loop
        self.is_closed = False
        #: When the last exchange ended.
        self.idle_since = 0.0
        self._is_busy = False
        self._is_paused = False
        #: The upstream has ended the connection, as it should.
        self._is_ended = False
        self._writable: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None

    # One exchange

    async def exchange(
        self,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] | None,
    ) -> None:
        """Send a request, and wait for the beginning of its answer. ``UpstreamLost``: it did not come."""
        self._begin(is_head=method == "HEAD")
        lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target.encode("latin-1"))]
        lines += [b"%s: %s" % pair for pair in headers]
        is_chunked = False
        if isinstance(body, bytes) or (body is None and method not in _WITHOUT_BODY):
            lines.append(b"content-length: %d" % len(body or b""))
        elif body is not None and not any(line.startswith(b"content-length:") for line in lines):
            is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join([*lines, b"", b""])
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise ValueError("The end of a line is in a header, or in the target.")
        if body is None or isinstance(body, bytes):
            self.transport.write(head + body if body else head)
        else:
            self.transport.write(head)
            self._pump = self._loop.create_task(self._send_body(body, is_chunked=is_chunked))
        while not self._has_begun:
            await self._wait()

    async def more(self) -> bytes:
        """Return what has come of the body of the answer; nothing: that was all."""
        while not self._parts:
            if self._is_whole:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._waiting = 0
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        return data

    def finish(self) -> bool:
        """End the exchange, and say whether another can follow. If not, the connection is closed."""
        is_fine = self._is_whole and self._keeps and not (self._is_odd or self._is_paused or self.is_closed)
        # An answer may come before its request was sent: the rest of it would be in front of the next one.
        is_fine = is_fine and self.transport.get_write_buffer_size() == 0
        if self._pump is not None:
            is_fine = is_fine and self._pump.done()
            self._pump.cancel()
            self._pump = None
        self._is_busy = False
        if not is_fine:
            self.abort()
        return is_fine

    def is_quiet(self) -> bool:
        """Whether another exchange can begin: nothing has come since the last, the end of the connection neither.
        Asked of the socket itself, since the loop may not have read it yet.
        """
        if self.is_closed or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close the connection at once."""
        self.is_closed = True
        self.transport.abort()

    def _begin(self, *, is_head: bool) -> None:
        self._is_busy = True
        self._is_head = is_head
        self._error: BaseException | None = None
        self._has_begun = self._is_whole = self._is_odd = self._keeps = self._ends_with_connection = False
        self._is_interim = False
        self._head = self._bare = self._waiting = 0
        self._parts: list[bytes] = []
        self.headers = []
        # A new one each time: it does not know of HEAD, and would wait for the body.
        self._parser = httptools.HttpResponseParser(self)
        # Some servers end lines by a line feed alone. All of it is framed anew for the client.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    async def _send_body(self, body: AsyncIterator[bytes], *, is_chunked: bool) -> None:
        try:
            async for part in body:
                self.transport.write(b"%x\r\n%s\r\n" % (len(part), part) if is_chunked else part)
                if self._writable is not None:
                    await self._writable
                if self.is_closed:
                    return
            if is_chunked:
                self.transport.write(b"0\r\n\r\n")
        except Exception as error:  # noqa: BLE001 - what came is not whole, and the upstream must not take it for that
            self._fail(error)
            self.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise UpstreamLost from self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if self._is_busy and not self._is_whole and self._error is None:
            self._error = error
            self._wake()

    # Of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self.transport = transport  # type: ignore[assignment]  # One of a stream. Those of uvloop are of no class here.

    def data_received(self, data: bytes) -> None:
        """Take what has come. Without a request there is nothing to come, nor behind the end of an answer."""
        if not self._is_awaited():
            self.abort()
            return
        if self._error is not None:
            return
        self._bare += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._is_whole:
                self._is_odd = True
            else:
                self._fail(error.__context__ or error)
                self.abort()
            return
        if self._bare > MAX_HEAD and not self._is_whole:
            # One line may be without an end, and the parser would keep all of it.
            self._fail(ValueError(_TOO_LONG))
            self.abort()
        elif self._waiting > MAX_WAITING and not self._is_paused and not self.is_closed:
            self._is_paused = True
            self.transport.pause_reading()

    def _is_awaited(self) -> bool:
        return self._is_busy and not self._is_whole

    def eof_received(self) -> None:
        """Notice whether the upstream has ended the connection. Over TLS it says so, and what ends without that was
        cut: anyone on the way can end the connection below (RFC 9112, 9.8).
        """
        tls = self.transport.get_extra_info("ssl_object")
        try:
            self._is_ended = tls is None or tls.read(1) == b""
        except ssl.SSLError:
            self._is_ended = False

    def connection_lost(self, exc: Exception | None) -> None:
        """End: some answers end so."""
        self.is_closed = True
        self.resume_writing()
        is_fine = exc is None and self._is_ended and self._error is None
        if self._is_busy and is_fine and self._ends_with_connection:
            self._is_whole = True
            self._wake()
        else:
            self._fail(exc or ConnectionResetError(_CLOSED))

    def pause_writing(self) -> None:
        """Have the body wait."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let it go on."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # Of the parser

    def on_message_begin(self) -> None:
        """Begin an answer; a second one was not asked for."""
        if self._is_whole:
            self._is_odd = True
        self._is_interim = False

    def on_status(self, reason: bytes) -> None:
        """Leave out the words of a status."""
        self._count(len(reason))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. What comes behind the body is left out."""
        self._count(len(name) + len(value) + _LINE)
        if not self._has_begun:
            self.headers.append((name.lower(), value))

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise ValueError(_TOO_LONG)

    def on_headers_complete(self) -> None:
        """Begin with the body."""
        if self._has_begun:
            return
        status = self._parser.get_status_code()
        if not _INTERIM <= status <= _LAST:
            raise ValueError(f"it answered {status}")
        if status < _FINAL:
            if status == _SWITCHING:
                raise ValueError("it answered 101")
            self._is_interim = True
            self.headers = []
            return
        codings = [each for name, each in self.headers if name == b"transfer-encoding"]
        if codings and (len(codings) > 1 or codings[0].strip().lower() != _CHUNKED):
            raise ValueError("the answer has a transfer coding that is not known")
        self.status = status
        self._has_begun = True
        self._bare = 0
        if self._is_head or status in _BODILESS:
            self._end()
        elif not codings:
            self._ends_with_connection = not any(name == b"content-length" for name, _ in self.headers)
        self._wake()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if self._is_whole:
            self._is_odd = True
            return
        self._bare = 0
        self._parts.append(body)
        self._waiting += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        """End an answer, unless it is not the last."""
        if not self._is_interim and not self._is_whole:
            self._end()
            self._wake()

    def _end(self) -> None:
        self._is_whole = True
        self._keeps = self._parser.should_keep_alive()
        if self._is_head:
            # Without a length the parser would wait for the end of the connection.
            is_closing = any(name == b"connection" and b"close" in each.lower() for name, each in self.headers)
            self._keeps = not is_closing and self._parser.get_http_version() == "1.1"
        if self._is_head or self.status in _BODILESS:
            # It may be that a body follows after all.
            self._is_odd = any(
                name == b"transfer-encoding" or (name == b"content-length" and self.status == _EMPTY and each != b"0")
                for name, each in self.headers
            )

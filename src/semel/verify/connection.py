"""One HTTP/1.1 request on a connection of its own, with the last byte held back if asked. Nothing is judged here.

Written on asyncio's streams and not on an HTTP library: a race needs the last byte of each request in hand, checks of
keys need header lines that a library would refuse to send, and an answer is compared by the bytes that came. A server
that answers nonsense, never or without end gets a :class:`NoAnswer` with the reason, never an exception.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field

from semel.errors import ConfigurationError
from semel.verify.message import WIRE, Answer, Headers, NoAnswer, Outcome, Request

#: An answer is compared and shown, so it has to fit into memory many times.
MAX_BODY = 16 * 1024 * 1024
MAX_HEAD = 64 * 1024
MAX_HEADERS = 256
#: A server that does not ask for the body within this time gets it all the same (RFC 9110, section 10.1.1).
CONTINUE_SECONDS = 0.3

CONTINUE = 100
SWITCHING = 101
FINAL = 200
BODILESS = frozenset({204, 304})

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: [^\r\n]*)?")
_HEADER_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")


class Unreadable(Exception):
    """The server's bytes are no HTTP answer."""


@dataclass(frozen=True, slots=True)
class Place:
    """A server: where to connect to, and how."""

    host: str
    port: int
    tls: ssl.SSLContext | None = field(default=None, compare=False)

    @property
    def authority(self) -> str:
        """What ``Host`` says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Connection:
    """A connection that one request is sent on."""

    def __init__(self, place: Place, request: Request) -> None:
        self._place = place
        self._request = request
        self._held = b""
        self._stream: asyncio.StreamWriter | None = None
        #: The head of the first answer, interim or final, if it was waited for before the body was sent.
        self._first: asyncio.Future[tuple[int, Headers]] | None = None
        self._started = time.perf_counter()

    async def open(self) -> None:
        """Connect."""
        self._reader, self._stream = await asyncio.open_connection(
            self._place.host, self._place.port, ssl=self._place.tls, limit=MAX_HEAD
        )

    async def send_but_the_last_byte(self) -> None:
        """Send all of the request but its last byte."""
        whole = self._request.head(self._place.authority) + self._request.content()
        whole, self._held = whole[:-1], whole[-1:]
        self._writer.write(whole)
        await self._writer.drain()

    def release(self) -> None:
        """Send the last byte. It does not wait, so that the last bytes of many requests leave together."""
        self._started = time.perf_counter()
        self._writer.write(self._held)

    async def send(self) -> None:
        """Send the request; the body of one that expects ``100 Continue`` when the server asks for it, or is silent."""
        self._writer.write(self._request.head(self._place.authority))
        if self._request.expects:
            self._first = asyncio.ensure_future(self._head())
            await asyncio.wait([self._first], timeout=CONTINUE_SECONDS)
            if self._first.done() and not self._first.exception() and self._first.result()[0] >= FINAL:
                return  # It has answered without the body.
        self._writer.write(self._request.content())
        await self._writer.drain()

    async def answer(self) -> Answer:
        """Receive the answer."""
        status, headers = await (self._first or self._head())
        while status < FINAL and status != SWITCHING:
            status, headers = await self._head()
        body = await self._body(status, headers)
        return Answer(status, headers, body, time.perf_counter() - self._started)

    @property
    def is_closed(self) -> bool:
        """Whether the server has hung up."""
        return self._stream is None or self._stream.transport.is_closing() or self._reader.at_eof()

    def abort(self) -> None:
        """Hang up at once, whatever is under way."""
        if self._first is not None:
            self._first.cancel()
        if self._stream is not None:
            self._stream.transport.abort()

    @property
    def _writer(self) -> asyncio.StreamWriter:
        if self._stream is None:
            raise ConnectionError("The connection is not open.")
        return self._stream

    async def _head(self) -> tuple[int, Headers]:
        line = await self._line()
        if not (found := _STATUS_LINE.fullmatch(line)):
            raise Unreadable(f"the answer begins with {_shown(line)}, which is no HTTP/1.1 status line")
        headers: list[tuple[str, str]] = []
        size = len(line)
        while line := await self._line():
            size += len(line)
            if not (match := _HEADER_LINE.fullmatch(line)):
                raise Unreadable(f"the answer has a header line {_shown(line)}")
            headers.append((match[1].decode(WIRE), match[2].decode(WIRE)))
            if len(headers) > MAX_HEADERS or size > MAX_HEAD:
                raise Unreadable("the answer's header section does not end")
        return int(found[1]), tuple(headers)

    async def _body(self, status: int, headers: Headers) -> bytes:
        if self._request.method == "HEAD" or status in BODILESS or status < FINAL:
            return b""
        codings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
        if codings:
            if codings[-1].rpartition(",")[2].strip() != "chunked":
                raise Unreadable(f"the answer has the transfer coding {_shown(codings[-1].encode(WIRE))}")
            return await self._chunks()
        lengths = {value.strip() for name, value in headers if name.lower() == "content-length"}
        if not lengths:
            return await self._until_closed()
        if len(lengths) > 1 or not (length := lengths.pop()).isascii() or not length.isdigit():
            raise Unreadable("the answer has no readable Content-Length")
        return await self._exactly(int(length))

    async def _exactly(self, count: int) -> bytes:
        if count > MAX_BODY:
            raise Unreadable(f"the answer is {count} bytes long, more than {MAX_BODY}")
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError as error:
            got = len(error.partial)
            raise Unreadable(f"the connection was closed after {got} of {count} bytes of the body") from None

    async def _chunks(self) -> bytes:
        body = bytearray()
        while True:
            line = await self._line()
            if not (match := _CHUNK_SIZE.fullmatch(line)):
                raise Unreadable(f"the answer has the chunk size {_shown(line)}")
            if not (size := int(match[1], 16)):
                break
            if len(body) + size > MAX_BODY:
                raise Unreadable(f"the answer is longer than {MAX_BODY} bytes")
            body += await self._exactly(size)
            if await self._line():
                raise Unreadable("a chunk of the answer is longer than its size says")
        while await self._line():  # trailers
            pass
        return bytes(body)

    async def _until_closed(self) -> bytes:
        body = bytearray()
        while part := await self._reader.read(MAX_HEAD):
            body += part
            if len(body) > MAX_BODY:
                raise Unreadable(f"the answer is longer than {MAX_BODY} bytes")
        return bytes(body)

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Unreadable(f"the connection was closed after {_shown(error.partial)}") from None
            raise Unreadable("the connection was closed before the answer was whole") from None
        except asyncio.LimitOverrunError:
            raise Unreadable("a line of the answer does not end") from None
        return line.removesuffix(b"\n").removesuffix(b"\r")


class Client:
    """Sends requests to one place, each within *timeout* seconds."""

    def __init__(self, place: Place, timeout: float) -> None:
        self.place = place
        self.timeout = timeout

    async def send(self, request: Request) -> Outcome:
        """Send *request*, and return what came."""
        connection = Connection(self.place, request)
        failed = await self._opened(connection)
        outcome = failed or await self._finished(connection, send=True)
        connection.abort()
        return outcome

    async def race(self, requests: list[Request], delays: list[float] | None = None) -> list[Outcome]:
        """Send *requests* at once: each is sent but for its last byte, and then all last bytes leave together.

        With *delays*, each last byte leaves so many seconds after the first.
        """
        connections = [Connection(self.place, each) for each in requests]
        early = await asyncio.gather(*(self._prepared(each) for each in connections))
        answers: list[asyncio.Future[Outcome]] = []
        loop, start = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for number, (connection, failed) in enumerate(zip(connections, early, strict=True)):
            if delays and (left := start + delays[number] - loop.time()) > 0:
                await asyncio.sleep(left)
            if failed is None:
                connection.release()
        for connection, failed in zip(connections, early, strict=True):
            if failed is None:
                answers.append(asyncio.ensure_future(self._finished(connection, send=False)))
            else:
                answers.append(loop.create_future())
                answers[-1].set_result(failed)
        outcomes = list(await asyncio.gather(*answers))
        for connection in connections:
            connection.abort()
        return outcomes

    async def leave(self, request: Request, *, after: float, is_whole: bool) -> NoAnswer:
        """Send *request*, all of it or all but its last byte, and hang up *after* so many seconds."""
        connection = Connection(self.place, request)
        failed = await self._prepared(connection)
        if failed is not None:
            return failed
        if is_whole:
            connection.release()
        await asyncio.sleep(after)
        connection.abort()
        return NoAnswer("the client hung up" if is_whole else "the client hung up before the last byte")

    async def opened(self) -> Connection | None:
        """Return a connection on which nothing is sent; None if there is none to be had."""
        connection = Connection(self.place, Request("GET", "/"))
        return None if await self._opened(connection) else connection

    async def is_up(self) -> bool:
        """Whether the server accepts connections."""
        connection = Connection(self.place, Request("GET", "/"))
        failed = await self._opened(connection)
        connection.abort()
        return failed is None

    async def _prepared(self, connection: Connection) -> NoAnswer | None:
        if failed := await self._opened(connection):
            return failed
        try:
            async with asyncio.timeout(self.timeout):
                await connection.send_but_the_last_byte()
        except (OSError, TimeoutError) as error:
            return NoAnswer(f"the request could not be sent: {_said(error)}")
        return None

    async def _opened(self, connection: Connection) -> NoAnswer | None:
        try:
            async with asyncio.timeout(self.timeout):
                await connection.open()
        except (OSError, TimeoutError, UnicodeError) as error:
            return NoAnswer(f"no connection: {_said(error)}", is_unsent=True)
        return None

    async def _finished(self, connection: Connection, *, send: bool) -> Outcome:
        try:
            async with asyncio.timeout(self.timeout):
                if send:
                    with suppress(OSError):  # A server may answer and close before it has read it all: that counts.
                        await connection.send()
                return await connection.answer()
        except Unreadable as error:
            return NoAnswer(str(error))
        except TimeoutError:
            return NoAnswer(f"no whole answer within {self.timeout:g} s")
        except OSError as error:
            return NoAnswer(f"the connection was lost: {_said(error)}")


def tls(*, is_checked: bool) -> ssl.SSLContext:
    """Return what ``https`` needs. Without the check, any certificate will do."""
    context = ssl.create_default_context()
    if not is_checked:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


async def connected(client: Client, url: str) -> None:
    """Raise an error if nothing listens there."""
    connection = Connection(client.place, Request("GET", "/"))
    try:
        async with asyncio.timeout(client.timeout):
            await connection.open()
    except (OSError, TimeoutError, UnicodeError) as error:
        raise ConfigurationError(f"There is no connection to {url}: {_said(error)}.") from None
    finally:
        connection.abort()


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _shown(data: bytes) -> str:
    return repr(data[:40].decode(WIRE)) + ("…" if len(data) > 40 else "")  # noqa: PLR2004 - enough to recognise it

"""Transports for httpx and httpx2: they make the key of a request, keep it over retries and, with a journal, over a
crash. They open no connection: the transport that they wrap does, with its HTTP/2, its proxies and its pool.

Neither library is imported here. The classes that are needed are those of the request that comes.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from semel.client.exchange import (
    Clock,
    Exchange,
    is_left_behind,
    is_untrusted,
    looked_at,
    redirect_refused,
    terms_of,
)
from semel.client.journal import Journal
from semel.client.options import Options
from semel.core.intent import Outgoing, checked
from semel.core.message import Answer
from semel.core.retrying import PORTS, Failure, Origin
from semel.core.value import value
from semel.errors import ClientError, ConfigurationError, RequestNotRepeatable
from semel.flows.send import NoReply, Reply, Terms, send
from semel.stores.transaction import at_once

#: Of a request's extensions: what the journal is to know it by.
INTENT = "semel.intent"
#: The same: the key that it was sent with, for redirects.
_MARK = "semel.key"
#: The same, of the library: what stands in the request line. The others, such as the name for TLS, hold for a host.
_TARGET = "target"

_NOT_SENT = frozenset({"ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"})
_LOST = frozenset(
    {"ReadError", "ReadTimeout", "WriteError", "WriteTimeout", "CloseError", "RemoteProtocolError", "OSError"}
)

#: Of h2: the stream is closed; and how its state machine begins to say so of a connection.
_H2_CLOSED = frozenset({"StreamClosedError", "NoSuchStreamError"})
_H2_STATE = "Invalid input"

P = ParamSpec("P")
T = TypeVar("T")
if TYPE_CHECKING:
    #: These are transports of either library.
    from typing import Any as _Base
else:
    _Base = object


@value
class _Mark:
    key: str
    place: Origin
    clock: Clock
    #: Whether it may have taken effect there.
    in_doubt: bool = False


class _Closed(dict[str, Any]):
    """The time limits of a request that is redirected as it is. A transport reads them before it connects: one that is
    mounted for the other host, and is not ours, fails there, and the key stays here.
    """

    refusal: ClientError

    def get(self, *_: object) -> Any:
        raise self.refusal


class _Wrapped(_Base):  # type: ignore[misc]  # as above
    """What both transports share: everything that does not wait."""

    #: The method of the transport that is wrapped, and the name of one.
    _sends_by: str
    _example: str

    def __init__(self, transport: Any, **options: Any) -> None:
        """Wrap *transport*. The other arguments are the fields of ``semel.client.options.Options``."""
        if not hasattr(transport, self._sends_by):
            own, given = type(self).__name__, type(transport).__name__
            raise ConfigurationError(
                f"{own} wraps a transport, not the {given} that was given: {own}({self._example}())."
            )
        self.wrapped = transport
        self.options = Options(**options)
        self._header = self.options.header.lower().encode("ascii")

    @property
    def journal(self) -> Journal | None:
        """The journal, open."""
        return self.options.opened

    def _exchange(self, request: Any, kind: Callable[..., _Exchange]) -> _Exchange | None:
        """Return what sends *request*, with its key set; None: it is passed on as it is."""
        url, headers, extensions = request.url, request.headers, request.extensions
        scheme = url.scheme
        place = (scheme, url.host, url.port or PORTS.get(scheme))
        header = self.options.header
        mark: _Mark | None = extensions.get(_MARK)
        if mark is not None and isinstance(closed := extensions.get("timeout"), _Closed):
            extensions["timeout"] = dict(closed)
        # Not headers.get: it decodes all of them. An empty key is none: a server may run what has one each time.
        is_given = self._header in [name.lower() for name, _ in headers.raw]
        given: str | None = (headers.get(header) or None) if is_given else None
        intent: str | None = extensions.get(INTENT)
        if mark is not None and request.method in _WITHOUT_BODY:
            intent = None  # A redirect has made a GET of it: it is another request.
            if given == mark.key:
                del headers[header]
            if mark.place != place:
                for name in [name for name in headers if is_left_behind(name) or name == _PROXY_LOGIN]:
                    del headers[name]
        elif mark is not None and given == mark.key and mark.place != place:
            raise redirect_refused(mark.key, intent, mark.place, place, in_doubt=mark.in_doubt)
        if not self.options.guards(request.method, place, has_key=given is not None, has_intent=intent is not None):
            return None
        if intent is not None:
            checked(intent)
        key = given
        if key is None:
            key = headers[header] = self.options.new_key()
        before = mark if mark is not None and given == mark.key else None
        clock = Clock() if before is None else before.clock
        request.extensions = {**extensions, _MARK: _Mark(key, place, clock)}
        terms = terms_of(self.options, place, key, intent, clock, was_sent=before is not None and before.in_doubt)
        exchange = kind(self.wrapped, request, self.options, place, terms, clock, is_key_given=given is not None)
        exchange.is_redirected = before is not None
        return exchange


class IdempotentTransport(_Wrapped):
    """A transport for a client of httpx or httpx2: ``Client(transport=IdempotentTransport(HTTPTransport()))``.

    Threads may share it.
    """

    _sends_by, _example = "handle_request", "HTTPTransport"

    def handle_request(self, request: Any) -> Any:
        """Send a request, until it has its answer or its time is over."""
        exchange = self._exchange(request, _Exchange)
        if exchange is None:
            return self.wrapped.handle_request(request)
        if not isinstance(request.stream, exchange.library.ByteStream):
            exchange.buffer(_Buffer(self.options.max_body).filled(request.stream))
        return exchange.closed(at_once(send(exchange, exchange.terms)))

    def close(self) -> None:
        """Close the wrapped transport, and the journal."""
        self.wrapped.close()
        if self.journal is not None:
            self.journal.close()

    def __enter__(self) -> Self:
        self.wrapped.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self.wrapped.__exit__(*failure)
        if self.journal is not None:
            self.journal.close()


class AsyncIdempotentTransport(_Wrapped):
    """The same for ``httpx.AsyncClient`` and ``httpx2.AsyncClient``. The journal is written in a thread."""

    _sends_by, _example = "handle_async_request", "AsyncHTTPTransport"

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, until it has its answer or its time is over."""
        exchange = self._exchange(request, _AsyncExchange)
        if exchange is None:
            return await self.wrapped.handle_async_request(request)
        if not isinstance(request.stream, exchange.library.ByteStream):
            exchange.buffer(await _Buffer(self.options.max_body).afilled(request.stream))
        return exchange.closed(await send(exchange, exchange.terms))

    async def aclose(self) -> None:
        """Close the wrapped transport, and the journal."""
        await self.wrapped.aclose()
        if self.journal is not None:
            self.journal.close()

    async def __aenter__(self) -> Self:
        await self.wrapped.__aenter__()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.wrapped.__aexit__(*failure)
        if self.journal is not None:
            self.journal.close()


class _Exchange(Exchange):
    """One request in a thread."""

    def __init__(  # noqa: PLR0917 - it is called in one place
        self,
        transport: Any,
        request: Any,
        options: Options,
        place: Origin,
        terms: Terms,
        clock: Clock,
        *,
        is_key_given: bool,
    ) -> None:
        super().__init__(options, place, terms, clock, is_key_given=is_key_given)
        self.library: Any = _library(type(request))  # type: ignore[arg-type]  # a class is hashable
        self._transport = transport
        self._request = request
        self._limits: dict[str, float | None] = request.extensions.get("timeout") or {}
        #: An answer that was not read to its end, and has to be closed before the next try.
        self._last: Any = None

    def buffer(self, body: bytes | None) -> None:
        """Keep the *body* for every try; None: it is too large."""
        if body is None:
            raise RequestNotRepeatable
        self._request.stream = self.library.ByteStream(body)
        self._request.headers.pop("transfer-encoding", None)
        self._request.headers["content-length"] = str(len(body))

    def method(self) -> str:
        """Return the request's method."""
        return self._request.method  # type: ignore[no-any-return]  # the library is not known here

    def url(self) -> str:
        """Return where it is sent to."""
        return str(self._request.url)

    def leave_doubt(self, *, in_doubt: bool) -> None:
        """Tell the request: a redirect copies its extensions."""
        self._request.extensions[_MARK] = _Mark(self.key, self._place, self.clock, in_doubt)

    def closed(self, response: Any) -> Any:
        """Return the *response*. After a redirect that leaves the request as it is, no other transport may send it."""
        status = response.status_code
        if status in _MOVED or (status == _MOVED_PERMANENTLY and self.method() != "POST"):
            extensions = self._request.extensions
            extensions["timeout"] = closed = _Closed(self._limits)
            in_doubt = extensions[_MARK].in_doubt
            closed.refusal = redirect_refused(self.key, self.terms.intent, self._place, None, in_doubt=in_doubt)
        return response

    async def attempt(self, seconds: float) -> Reply | NoReply:
        """Send the request, and read the answer."""
        return await self._try(self._request, seconds)

    async def look(self, url: str, seconds: float) -> Reply | NoReply:
        """Ask at a status URL, with the same credentials: it is on the same host."""
        headers = looked_at(self._request.headers.raw, self.options.header)
        extensions = {name: said for name, said in self._request.extensions.items() if name != _TARGET}
        return await self._try(self.library.Request("GET", url, headers=headers, extensions=extensions), seconds)

    async def _try(self, request: Any, seconds: float) -> Reply | NoReply:
        request.extensions["timeout"] = self._within(seconds)
        if self._last is not None:
            self._last.stream.close()
        try:
            return self._read(request, self._transport.handle_request(request), self.now() + seconds)
        except Exception as error:  # noqa: BLE001 - its class is told by its name
            return self._failed(error)

    def _read(self, request: Any, response: Any, end: float) -> Reply:
        """Read the whole answer, so that a connection that is lost on the way is not the caller's."""
        stream = response.stream
        if isinstance(stream, self.library.ByteStream):
            return self._reply(response)
        if self.is_streamed(response.headers):
            return self._handed_over(request, response)
        chunks, size, rest = [], 0, iter(stream)
        try:
            for chunk in rest:
                chunks.append(chunk)
                size += len(chunk)
                if size > self.options.max_answer:
                    response.stream = _joined(self.library.SyncByteStream)(chunks, rest, stream)
                    return self._handed_over(request, response)
                self._check_time(end)
        except BaseException:
            stream.close()
            raise
        stream.close()
        return self._whole(response, chunks)

    def _check_time(self, end: float) -> None:
        if self.now() > end:
            raise self.library.ReadTimeout("The answer did not end before the deadline of the operation.")

    def _whole(self, response: Any, chunks: list[bytes]) -> Reply:
        response.stream = self.library.ByteStream(b"".join(chunks))
        return self._reply(response)

    def _handed_over(self, request: Any, response: Any) -> Reply:
        request.extensions["timeout"] = (
            self._limits
        )  # The deadline is for the head: the rest is the caller's to wait for.
        self._last = response
        return self._reply(response)

    def _reply(self, response: Any) -> Reply:
        return Reply(response.status_code, response.headers, partial(self._content, response), response)

    def _content(self, response: Any) -> bytes:
        """Return what was read of an answer, decoded; the answer itself is left as it came."""
        try:
            copy = self.library.Response(200, headers=response.headers, content=self._body(response) or b"")
        except self.library.DecodingError:
            return b""
        return copy.content  # type: ignore[no-any-return]  # the library is not known here

    def _body(self, response: Any) -> bytes | None:
        """Return the whole of an answer; None: it is handed over as it comes."""
        return b"".join(response.stream) if isinstance(response.stream, self.library.ByteStream) else None

    def _failed(self, error: Exception) -> NoReply:
        names = {kind.__name__ for kind in type(error).__mro__}
        if not is_untrusted(error):
            if names & _NOT_SENT:
                return NoReply(Failure.NOT_SENT, error)
            if names & _LOST or _is_closed(error):
                return NoReply(Failure.LOST, error)
        raise error

    def _within(self, seconds: float) -> dict[str, float]:
        """Return the time limits of one try: those of the caller, as far as the deadline allows."""
        limits = self._limits
        given = limits.values()
        if len(given) == len(_LIMITS) and None not in given and max(given) <= seconds:  # type: ignore[type-var,operator]
            return limits  # type: ignore[return-value]  # as was just seen
        return {name: seconds if (limit := limits.get(name)) is None or limit > seconds else limit for name in _LIMITS}

    def outgoing(self) -> Outgoing:
        """Return the request as it is sent."""
        request = self._request
        headers = tuple((name.lower(), said) for name, said in request.headers.raw)
        return Outgoing(request.method, self.url(), headers, b"".join(request.stream))

    def restore(self, outgoing: Outgoing) -> None:
        """Send what the journal has."""
        headers = self._request.headers
        if headers.get(self.options.header) != self.key:
            headers[self.options.header] = self.key
            self._request.extensions[_MARK] = _Mark(self.key, self._place, self.clock)
        if outgoing.body != b"".join(self._request.stream):
            self.buffer(outgoing.body)
            for name, said in outgoing.headers:
                if name == b"content-type":  # With the boundary of that very multipart.
                    headers["content-type"] = said.decode("latin-1")

    def answer_of(self, reply: Reply) -> Answer:
        """Return what the journal keeps."""
        headers = tuple((name.lower(), said) for name, said in reply.response.headers.raw)
        return Answer(reply.status, headers, self._body(reply.response))

    def stored(self, answer: Answer) -> Any:
        """Make a response of what the journal has."""
        body = answer.body or b""
        headers = [*answer.headers, (b"content-length", str(len(body)).encode())]
        # As a stream: the client reads it, and then knows how long it took.
        stream = self.library.ByteStream(body)
        return self.library.Response(answer.status, headers=headers, stream=stream, extensions={"semel.stored": True})


class _AsyncExchange(_Exchange):
    """One request on an event loop: asyncio's or trio's."""

    async def _try(self, request: Any, seconds: float) -> Reply | NoReply:
        request.extensions["timeout"] = self._within(seconds)
        if self._last is not None:
            await self._last.stream.aclose()
        try:
            response = await self._transport.handle_async_request(request)
            return await self._aread(request, response, self.now() + seconds)
        except Exception as error:  # noqa: BLE001 - its class is told by its name
            return self._failed(error)

    async def _aread(self, request: Any, response: Any, end: float) -> Reply:
        stream = response.stream
        if isinstance(stream, self.library.ByteStream):
            return self._reply(response)
        if self.is_streamed(response.headers):
            return self._handed_over(request, response)
        chunks, size, rest = [], 0, aiter(stream)
        try:
            async for chunk in rest:
                chunks.append(chunk)
                size += len(chunk)
                if size > self.options.max_answer:
                    response.stream = _joined(self.library.AsyncByteStream)(chunks, rest, stream)
                    return self._handed_over(request, response)
                self._check_time(end)
        except BaseException:
            await stream.aclose()
            raise
        await stream.aclose()
        return self._whole(response, chunks)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what waits for the disk, in a thread, to its end."""
        from anyio import to_thread  # noqa: PLC0415 - it comes with either library

        return await to_thread.run_sync(lambda: function(*args, **kwargs))

    async def pause(self, seconds: float) -> None:
        """Wait, and let others run."""
        from anyio import sleep  # noqa: PLC0415 - as above

        await sleep(seconds)


def _is_closed(error: BaseException) -> bool:
    """Whether HTTP/2 was closed by the server while the request was sent, which is said as if it were our mistake."""
    cause = error.__cause__
    inner = cause.args[0] if cause is not None and cause.args else None
    return type(inner).__module__.startswith("h2.") and (
        type(inner).__name__ in _H2_CLOSED or str(inner).startswith(_H2_STATE)
    )


class _Buffer:
    """Reads a body that can be read only once, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._read = bytearray()

    def _has(self, chunk: bytes) -> bool:
        self._read += chunk
        return len(self._read) <= self._limit

    def filled(self, stream: Any) -> bytes | None:
        """Return all of it; None: it is longer."""
        return bytes(self._read) if all(self._has(chunk) for chunk in stream) else None

    async def afilled(self, stream: Any) -> bytes | None:
        """Do the same on a loop."""
        async for chunk in stream:
            if not self._has(chunk):
                return None
        return bytes(self._read)


@lru_cache(maxsize=16)
def _joined(base: type[Any]) -> type[Any]:
    """Make the class of an answer that was read in part: what was read, and the rest as it comes."""

    class Joined(base):  # type: ignore[misc]  # a class of either library
        def __init__(self, chunks: list[bytes], rest: Any, stream: Any) -> None:
            self._chunks, self._rest, self._stream = chunks, rest, stream

        def __iter__(self) -> Iterator[bytes]:
            yield from self._chunks
            yield from self._rest

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for chunk in self._chunks:
                yield chunk
            async for chunk in self._rest:
                yield chunk

        def close(self) -> None:
            self._stream.close()

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Joined


@lru_cache(maxsize=16)
def _library(kind: type[Any]) -> Any:
    """Return httpx or httpx2: the library of which a request's class is."""
    for each in kind.__mro__:
        library = sys.modules.get(each.__module__.partition(".")[0])
        if each.__name__ == "Request" and hasattr(library, "SyncByteStream"):
            return library
    raise ConfigurationError(
        f"This transport sends requests of httpx or httpx2, not {kind.__module__}.{kind.__name__}."
    )


_LIMITS = ("connect", "read", "write", "pool")
_WITHOUT_BODY = frozenset({"GET", "HEAD"})
#: Neither library takes it out. The login of a proxy that they use is in no header of the request.
_PROXY_LOGIN = "proxy-authorization"
#: Redirects that leave the method as it is; and one that does so unless it is POST.
_MOVED = frozenset({307, 308})
_MOVED_PERMANENTLY = 301

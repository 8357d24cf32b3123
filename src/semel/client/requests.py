"""An adapter for requests: ``session.mount("https://", IdempotentAdapter())``. It makes the key of a request, keeps it
over retries and, with a journal, over a crash. It opens no connection: the adapter that it wraps does.
"""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any, cast

try:
    import requests
    from requests.adapters import BaseAdapter, HTTPAdapter
    from requests.exceptions import ChunkedEncodingError, ConnectTimeout, ReadTimeout, SSLError
    from urllib3 import HTTPResponse
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] not in {"requests", "urllib3"}:
        raise
    raise ImportError("semel.client.requests needs requests. Run: pip install requests") from missing

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
from semel.core.retrying import Failure, Origin, origin_of
from semel.errors import ConfigurationError, RequestNotRepeatable
from semel.flows.send import NoReply, Reply, Terms, send
from semel.stores.transaction import at_once

#: requests lets a caller pass on nothing but headers. This one names the intent; it is never sent.
INTENT_HEADER = "Semel-Intent"

_WITHOUT_BODY = frozenset({"GET", "HEAD"})
#: How ``http.client`` encodes the value of a header.
_WIRE = "latin-1"
#: Redirects of which requests makes a GET; and one of which it does so for a POST alone.
_TO_A_RESULT = frozenset({302, 303})
_MOVED_PERMANENTLY = 301
_CHUNK = 2**16
#: Seconds in which something of an answer comes, where the caller says nothing: requests itself would wait for ever.
TRY_SECONDS = 30.0
#: Answers with a lower status are interim ones.
_FINAL = 200


class _Mark(str):
    """A key that knows for which intent, and to which place, it was sent: of a request that is redirected, requests
    copies the headers alone.

    Only its own adapter can send it. Where a redirect leads to a host with another adapter, that one fails before the
    first byte leaves, as it puts this header on the wire.
    """

    __slots__ = ("clock", "in_doubt", "intent", "is_open", "place")

    clock: Clock
    intent: str | None
    place: Origin
    #: Whether it may have taken effect there.
    in_doubt: bool
    #: Whether it may be sent at this moment.
    is_open: bool

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        if encoding == _WIRE and not self.is_open:
            raise redirect_refused(str(self), self.intent, self.place, None, in_doubt=self.in_doubt)
        return super().encode(encoding, errors)


class _Intent(str):
    """The name of an intent that no adapter can send: ours takes it out of the headers before."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        if encoding == _WIRE:
            raise ConfigurationError(
                "This request has an intent, and goes through an adapter that does not know of it. Nothing was sent. "
                "Mount an IdempotentAdapter with a journal for its URL."
            )
        return super().encode(encoding, errors)


def intent(name: str) -> dict[str, str]:
    """Return the headers that name an intent: ``session.post(url, json=…, headers=intent("invoice 17"))``.

    Where the URL has another adapter, the request fails before anything is sent.
    """
    return {INTENT_HEADER: _Intent(checked(name))}


class IdempotentAdapter(BaseAdapter):
    """An adapter that retries requests with a key. Threads may share it as far as they may share a session."""

    def __init__(self, adapter: HTTPAdapter | None = None, **options: Any) -> None:
        """Wrap *adapter*, or one of requests' own. The other arguments are those of ``IdempotentTransport``."""
        super().__init__()
        if not isinstance(adapter, BaseAdapter | None):
            raise ConfigurationError(
                f"IdempotentAdapter wraps an adapter, not {adapter!a}: IdempotentAdapter(HTTPAdapter())."
            )
        self.wrapped = HTTPAdapter() if adapter is None else adapter
        total = getattr(getattr(self.wrapped, "max_retries", None), "total", 0)
        if total is None or total:  # Without a total, urllib3 counts each kind of retry alone.
            raise ConfigurationError(
                "The adapter inside must not retry by itself: HTTPAdapter(max_retries=0). It does not know what an "
                "answer means for a key."
            )
        self.options = Options(**options)

    @property
    def journal(self) -> Journal | None:
        """The journal, open."""
        return self.options.opened

    def send(  # noqa: PLR0917 - as the library has it
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - as above
        timeout: Any = None,
        verify: Any = True,  # noqa: FBT002 - as above
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Send a request, until it has its answer or its time is over."""
        sending = {"timeout": timeout, "verify": verify, "cert": cert, "proxies": proxies}
        headers: Any = request.headers
        url, method = request.url or "", request.method or ""
        place = origin_of(url)
        header = self.options.header
        given: str | bytes | None = headers.get(header) or None  # An empty key is none.
        if isinstance(given, bytes):  # As it is on the wire.
            given = given.decode(_WIRE)
        mark = given if isinstance(given, _Mark) else None
        if mark is not None and method in _WITHOUT_BODY:
            return self.wrapped.send(_to_a_result(request, header, mark.place != place), stream=stream, **sending)
        intent: str | None = headers.pop(INTENT_HEADER, None) or (mark.intent if mark else None)
        if mark is not None and mark.place != place:
            raise redirect_refused(str(mark), intent, mark.place, place, in_doubt=mark.in_doubt)
        if not self.options.guards(method, place, has_key=given is not None, has_intent=intent is not None):
            return self.wrapped.send(request, stream=stream, **sending)
        if intent is not None:
            checked(intent)
        key = self.options.new_key() if given is None else str(given)
        clock = Clock() if mark is None else mark.clock
        terms = terms_of(self.options, place, key, intent, clock, was_sent=mark is not None and mark.in_doubt)
        exchange = _Exchange(
            self.wrapped, request, self.options, place, terms, clock, sending, is_key_given=given is not None
        )
        exchange.is_redirected = mark is not None
        exchange.mark()
        if request.body is not None and not isinstance(request.body, (bytes, str)):
            exchange.buffer(_read(request.body, self.options.max_body))
        response = cast("requests.Response", at_once(send(exchange, terms)))
        response.connection = self  # type: ignore[assignment]  # by which requests answers a challenge to log in
        exchange.end(response)
        return response

    def close(self) -> None:
        """Close the wrapped adapter, and the journal."""
        self.wrapped.close()
        if self.journal is not None:
            self.journal.close()


class _Exchange(Exchange):
    """One request."""

    def __init__(  # noqa: PLR0917 - it is called in one place
        self,
        adapter: HTTPAdapter,
        request: requests.PreparedRequest,
        options: Options,
        place: Origin,
        terms: Terms,
        clock: Clock,
        sending: dict[str, Any],
        *,
        is_key_given: bool,
    ) -> None:
        super().__init__(options, place, terms, clock, is_key_given=is_key_given)
        self._adapter = adapter
        self._request = request
        self._sending = sending
        self._body: bytes | None = None
        self._last: requests.Response | None = None

    def method(self) -> str:
        """Return the request's method."""
        return self._request.method or ""

    def url(self) -> str:
        """Return where it is sent to."""
        return self._request.url or ""

    def mark(self) -> None:
        """Set the key that is sent."""
        self._mark = mark = _Mark(self.key)
        mark.intent, mark.place, mark.clock = self.terms.intent, self._place, self.clock
        mark.in_doubt = mark.is_open = False
        self._request.headers[self.options.header] = mark

    def leave_doubt(self, *, in_doubt: bool) -> None:
        """Tell the key: a redirect copies the headers."""
        self._mark.in_doubt = in_doubt

    def end(self, response: requests.Response) -> None:
        """Let the key go along with a redirect to the result: requests makes a GET of it, and the key means nothing."""
        self._mark.is_open = response.status_code in _TO_A_RESULT or (
            response.status_code == _MOVED_PERMANENTLY and self.method() == "POST"
        )

    def buffer(self, body: bytes) -> None:
        """Keep the *body* for every try."""
        self._request.body = body
        self._request.headers.pop("Transfer-Encoding", None)
        self._request.headers["Content-Length"] = str(len(body))

    async def attempt(self, seconds: float) -> Reply | NoReply:
        """Send the request, and read the answer."""
        return self._try(self._request, seconds)

    async def look(self, url: str, seconds: float) -> Reply | NoReply:
        """Ask at a status URL, with the same credentials: it is on the same host."""
        request = self._request.copy()
        request.method, request.url, request.body = "GET", url, None
        request.headers = type(request.headers)(looked_at(list(request.headers.items()), self.options.header))
        return self._try(request, seconds)

    def _try(self, request: requests.PreparedRequest, seconds: float) -> Reply | NoReply:
        sending = {**self._sending, "timeout": _within(self._sending["timeout"], seconds)}
        self._drop()
        try:
            self._mark.is_open = True
            try:
                response = self._adapter.send(request, stream=True, **sending)
            finally:
                self._mark.is_open = False
            if response.status_code < _FINAL:
                # http.client takes what is no 100 for the answer. The answer comes later, and must not be the next one.
                response.raw.close()
                raise requests.ConnectionError(f"Of the answer, only an interim one was read: {response.status_code}.")
            return self._read(response, self.now() + seconds)
        except requests.RequestException as error:
            failure = _failure(error)
            if failure is None:
                raise
            return NoReply(failure, error)

    def _drop(self) -> None:
        """Close the answer of the last try, if it was not read to its end."""
        if self._last is not None:
            self._last.close()

    def _read(self, response: requests.Response, end: float) -> Reply:
        """Read the whole answer, so that a connection that is lost on the way is not the caller's."""
        raw = response.raw
        self._body, self._last = None, response
        if self.is_streamed(response.headers):
            return self._handed_over(response)
        read = bytearray()
        try:
            while chunk := _some(raw):
                read += chunk
                if len(read) > self.options.max_answer:
                    self._handed_over(response)
                    response.raw = _again(raw, cast("Any", _Rest(bytes(read), raw)))
                    return self._reply(response)
                if self.now() > end:
                    raise ReadTimeout("The answer did not end before the deadline of the operation.", request=None)
        except ReadTimeoutError as error:
            raw.close()
            raise ReadTimeout(error, request=response.request) from error
        except (HTTPError, OSError) as error:
            raw.close()
            if isinstance(error, requests.RequestException):
                raise
            raise ChunkedEncodingError(error, request=response.request) from error
        raw.release_conn()
        self._body = bytes(read)
        response.raw = _again(raw, io.BytesIO(self._body))
        return self._reply(response)

    def _handed_over(self, response: requests.Response) -> Reply:
        """Leave the rest to the caller, with its own time limit: the deadline is for the head."""
        with suppress(AttributeError):  # It is not read from a socket, but by a stand-in.
            response.raw._fp.fp.raw._sock.settimeout(_limits(self._sending["timeout"])[1])  # noqa: SLF001 - no other way
        return self._reply(response)

    def _reply(self, response: requests.Response) -> Reply:
        def content() -> bytes:
            if self._body is None:
                return b""
            copy = requests.Response()
            copy.raw = _again(response.raw, io.BytesIO(self._body))
            try:
                return copy.content or b""
            except requests.RequestException:  # It can't be decoded.
                return b""

        return Reply(response.status_code, response.headers, content, response)

    def outgoing(self) -> Outgoing:
        """Return the request as it is sent."""
        request = self._request
        headers = tuple((_bytes(name).lower(), _bytes(said)) for name, said in request.headers.items())
        return Outgoing(request.method or "", self.url(), headers, _bytes(cast("bytes", request.body or b"")))

    def restore(self, outgoing: Outgoing) -> None:
        """Send what the journal has."""
        self.mark()
        request = self._request
        if outgoing.body != _bytes(cast("bytes", request.body or b"")):
            self.buffer(outgoing.body)
            for name, said in outgoing.headers:
                if name == b"content-type":  # With the boundary of that very multipart.
                    request.headers["Content-Type"] = said.decode("latin-1")

    def answer_of(self, reply: Reply) -> Answer:
        """Return what the journal keeps."""
        pairs = reply.response.raw.headers.items()
        return Answer(reply.status, tuple((_bytes(name).lower(), _bytes(said)) for name, said in pairs), self._body)

    def stored(self, answer: Answer) -> requests.Response:
        """Make a response of what the journal has."""
        body = answer.body or b""
        pairs = [(name.decode("latin-1"), said.decode("latin-1")) for name, said in answer.headers]
        raw = HTTPResponse(
            io.BytesIO(body),
            headers=[*pairs, ("content-length", str(len(body)))],  # type: ignore[arg-type]  # pairs keep repeated ones
            status=answer.status,
            preload_content=False,
            decode_content=False,
        )
        return self._adapter.build_response(self._request, raw)


def _to_a_result(
    redirected: requests.PreparedRequest,
    header: str,
    is_elsewhere: bool,  # noqa: FBT001 - of a mark's place
) -> requests.PreparedRequest:
    """Return the GET that a redirect has made of a request: without its key, and elsewhere without its credentials.

    It is a copy. The other keeps the mark for the next redirect, which copies its headers.
    """
    request = redirected.copy()
    for name in list(request.headers):
        if name.lower() == header.lower() or (is_elsewhere and is_left_behind(name.lower())):
            del request.headers[name]
    return request


class _Rest(io.RawIOBase):
    """An answer that was read in part: what was read, and the rest as it comes."""

    def __init__(self, read: bytes, raw: Any) -> None:
        super().__init__()
        self._read = io.BytesIO(read)
        self._raw = raw

    def readable(self) -> bool:
        return True

    def read(self, amount: int | None = -1, /) -> bytes:
        is_all = amount is None or amount < 0
        first = self._read.read(amount)
        return (
            first if first and not is_all else first + self._raw.read(None if is_all else amount, decode_content=False)
        )

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _some(raw: Any) -> bytes:
    """Return what there is of the answer, as it came; nothing at its end."""
    read: Any = getattr(raw, "read1", raw.read)  # urllib3 1 has no other
    return cast("bytes", read(_CHUNK, decode_content=False))


def _again(raw: Any, body: Any) -> HTTPResponse:
    """Return the answer with *body* to be read, as if it came over the wire."""
    return HTTPResponse(
        body,
        headers=raw.headers,
        status=raw.status,
        version=raw.version,
        reason=raw.reason,
        preload_content=False,
        decode_content=False,
        original_response=getattr(raw, "_original_response", None),
    )


def _read(body: Any, limit: int) -> bytes:
    """Return the whole body: a file or an iterator is read once, and sent from memory."""
    read = bytearray()
    for chunk in iter(lambda: body.read(_CHUNK) or b"", b"") if hasattr(body, "read") else body:
        read += _bytes(chunk)
        if len(read) > limit:
            raise RequestNotRepeatable
    return bytes(read)


def _limits(timeout: Any) -> tuple[float | None, float | None]:
    """Return the time limits of the caller, to connect and to read; None: none."""
    if hasattr(timeout, "connect_timeout"):
        timeout = (timeout.connect_timeout, timeout.read_timeout)
    connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    return tuple(limit if isinstance(limit, (int, float)) else None for limit in (connect, read))  # type: ignore[return-value]  # two


def _within(timeout: Any, seconds: float) -> tuple[float, float]:
    """Return the time limits of one try, as far as the deadline allows."""
    connect, read = _limits(TRY_SECONDS if timeout is None else timeout)
    return (
        seconds if connect is None else min(connect, seconds),
        seconds if read is None else min(read, seconds),
    )


def _failure(error: requests.RequestException) -> Failure | None:
    """Say what became of a try; None: another try would end in the same way."""
    if is_untrusted(error):
        return None
    if isinstance(error, ConnectTimeout):
        return Failure.NOT_SENT
    # ProxyError is among them: older versions of urllib3 call a connection so that was lost behind the proxy.
    if isinstance(error, (requests.ConnectionError, requests.Timeout, ChunkedEncodingError, SSLError)):
        reason = getattr(error.args[0] if error.args else None, "reason", None)
        return Failure.NOT_SENT if isinstance(reason, (NewConnectionError, ConnectTimeoutError)) else Failure.LOST
    return None


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8")

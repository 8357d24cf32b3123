"""Django's requests and responses as values of the core, and back. It guards nothing, and calls no view.

A body is read before the view is called, and then restored: ``request.body``, ``POST``, ``FILES`` and ``read()`` give
the view what they would give it without Semel, with Django's own errors and limits. A response is stored before it is
sent, so a stream is read up to the limits first, and what was read is sent afterwards.
"""

from __future__ import annotations

import dataclasses
import io
import weakref
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.signals import got_request_exception
from django.http import Http404, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.log import log_response

from semel.asgi.protocol import head_of as asgi_head_of
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Head, Headers, one_line
from semel.core.outcome import Door
from semel.errors import BodyIncomplete, ConfigurationError
from semel.guard.body import CHUNK_BYTES, Body, Limits, flows_at_once, framed, inside
from semel.guard.request import declared_length
from semel.guard.views import Taken, Translation, gathered, written_form
from semel.operation import Operation, enter
from semel.wsgi.environ import head_of as wsgi_head_of
from semel.wsgi.environ import lowered

#: What Django answers below 500 when a view raises it: an answer like any other.
STATUSES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((Http404,), 404),
    ((PermissionDenied,), 403),
    ((BadRequest, SuspiciousOperation, MultiPartParserError), 400),
)

#: Marks a request that is guarded already.
_CLAIMED = "_semel_is_claimed"

#: Any ``HttpRequest``, ``HttpResponseBase`` and view. Django has no types.
Request = Any
Response = Any


class DjangoRequest(Translation[Response]):
    """One Django request."""

    door: ClassVar[Door] = "django"
    #: The class of responses that Semel makes.
    response_class: ClassVar[type[HttpResponse]] = HttpResponse

    def __init__(self, request: Request) -> None:
        """Take Django's own *request*, or REST framework's, which wraps Django's."""
        self.request = request
        self.http: Request = getattr(request, "_request", request)
        self.head = head_of(self.http)
        self._reported: Exception | None = None

    def template(self) -> str | None:
        """Return the route's template, as Django's resolver has it."""
        match = getattr(self.http, "resolver_match", None)
        return f"/{match.route}" if match is not None and match.route is not None else None

    def whole_body(self, limit: int) -> Buffer | None:
        """Return the whole body, and leave it for the view to read; None: it is larger than *limit*."""
        http = self.http
        length = declared_length(self.head)
        if length > limit:
            return None
        if hasattr(http, "_body"):
            return http.body if len(http.body) <= limit else None
        if http._read_started:  # noqa: SLF001 - REST framework asks the same of it
            return self._parsed_body()
        body = Body()
        try:
            is_whole = _read(http, body, length, limit)
            return body.buffer() if is_whole else None
        finally:
            # Not at the end of the request: an error page may read the rest of the form.
            weakref.finalize(http, body.close)

    def _parsed_body(self) -> Buffer:
        """Return a substitute for a body that was read before: by the CSRF check, or by REST framework."""
        http = self.http
        if not (hasattr(http, "_post") and hasattr(http, "_files") and _is_parsed(http, self.head)):
            raise ConfigurationError(
                "Code that runs before the guard has read the request's body from its stream, so it can't be compared "
                "with a retry's. Let that code use request.body, which keeps the body."
            )
        fields = [(name, value) for name, values in http.POST.lists() for value in values]
        files = [(name, file.name, file.content_type, file) for name, each in http.FILES.lists() for file in each]
        return written_form(self.head, fields, files)

    def response_of(self, answer: Answer) -> Response:
        """Return an answer of Semel as a plain response."""
        response = self.response_class(answer.body or b"", status=answer.status)
        del response["Content-Type"]
        for name, value in framed(answer):
            text = value.decode("latin-1")
            known = name.decode("latin-1").title()
            # Django has one line for each name.
            response[known] = f"{response[known]}, {text}" if known in response else text
        if self._reported is not None:
            _log(self.http, response, self._reported)
        return response

    def status_of(self, response: Response) -> int:
        """Return the status of the view's own response."""
        status: int = response.status_code
        return status

    def status_raised(self, error: Exception) -> int | None:
        """Return the status of Django's own answer to *error* from a view; None: a server error."""
        return next((status for kinds, status in STATUSES if isinstance(error, kinds)), None)

    def report(self, error: Exception) -> None:
        """Report an uncaught exception as Django does. It is logged with the response."""
        self._reported = error
        try:
            raise error  # noqa: TRY301 - those who listen ask for the exception that is being handled
        except Exception:  # noqa: BLE001 - as above
            got_request_exception.send(sender=None, request=self.http)


def claim(request: Request) -> bool:
    """Mark *request* as guarded; return False if it was already. A guarded view may call another."""
    http = getattr(request, "_request", request)
    is_ours = not getattr(http, _CLAIMED, False)
    setattr(http, _CLAIMED, True)
    return is_ours


def release(request: Request) -> None:
    """Remove the mark of a guarded *request*. A test may send it again."""
    setattr(getattr(request, "_request", request), _CLAIMED, False)


def head_of(request: Request) -> Head:
    """Return all of the request but its body."""
    scope = getattr(request, "scope", None)
    if scope is not None:
        query = scope.get("query_string", b"")
        # Django's own test client has text there.
        head = asgi_head_of({**scope, "query_string": query.encode() if isinstance(query, str) else query})
    else:
        head = wsgi_head_of(_environ_of(request))
    return head if head.method == request.method else dataclasses.replace(head, method=request.method)


def _environ_of(request: Request) -> dict[str, Any]:
    """Return what the server gave to Django."""
    meta: dict[str, Any] = request.META
    mount, path = meta.get("SCRIPT_NAME", ""), meta.get("PATH_INFO", "")
    if mount.isascii() and path.isascii() and "REQUEST_METHOD" in meta:
        return meta
    # Django has decoded these two in place; PEP 3333 passes bytes as Latin-1, whatever their encoding is.
    return {**meta, "SCRIPT_NAME": _latin(mount), "PATH_INFO": _latin(path), "REQUEST_METHOD": request.method}


def headers_of(response: Response) -> Headers:
    """Return the headers of a response; its cookies are elsewhere, and are not kept."""
    return lowered([(name, str(value)) for name, value in response.items()])


def _is_parsed(http: Request, head: Head) -> bool:
    """Whether Django's form is the whole body: without a form, or after its stream was read, Django's form is empty."""
    boundary = http.content_params.get("boundary")
    # The only line of a form without fields.
    is_empty = boundary is not None and declared_length(head) <= len(f"\r\n--{boundary}--\r\n")
    return bool(http.POST or http.FILES) or is_empty


def _latin(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("latin-1")


def _read(http: Request, body: Body, length: int, limit: int) -> bool:
    """Read the body, declared to have *length* bytes, into *body*, and put the stream back to its beginning; say
    whether it is within *limit*.
    """
    stream = http._stream  # noqa: SLF001 - the one place where it can be read without its being used up
    try:
        while body.size <= limit and (chunk := stream.read(CHUNK_BYTES)):
            body.add(chunk)
    except OSError as error:
        raise BodyIncomplete from error
    is_whole = body.size <= limit
    if getattr(stream, "seekable", bool)():
        stream.seek(0)
    else:
        http._stream = body.stream() if is_whole else io.BufferedReader(_Rejoined(body, stream))  # noqa: SLF001 - as above
    if is_whole and body.size < length:
        raise BodyIncomplete
    return is_whole


class _Rejoined(io.RawIOBase):
    """What was read of a stream, and then the rest of it."""

    def __init__(self, body: Body, rest: Any) -> None:
        self._body = body
        self._parts = [body.stream(), rest]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._parts:
            chunk = self._parts[0].read(len(buffer))
            if chunk:
                buffer[: len(chunk)] = chunk
                return len(chunk)
            del self._parts[0]
        return 0


def _log(http: Request, response: Response, error: Exception) -> None:
    log_response(
        "%s: %s", response.reason_phrase, one_line(http.path), response=response, request=http, exception=error
    )


def checked(response: Any, view: Any) -> Response:
    """Return *response* if it is a response; else raise with Django's own message."""
    if isinstance(response, HttpResponseBase):
        return response
    name = getattr(view, "__qualname__", type(view).__name__)
    what = "None" if response is None else f"{type(response).__name__}"
    raise ValueError(f"The view {name} didn't return an HttpResponse object. It returned {what} instead.")


def is_unrendered(response: Response) -> bool:
    """Whether a response is not rendered yet, such as a ``TemplateResponse``."""
    return not getattr(response, "is_rendered", True) and callable(getattr(response, "render", None))


def taken(response: Response, limits: Limits, *, on_a_loop: bool) -> Taken:
    """Return the part of a rendered *response* that can be kept; *on_a_loop*: an event loop will send it."""
    if not _can_be_gathered(response, limits):
        return _whole(response, limits)
    if response.is_async:
        # Without a loop that outlives this call, a stream must be read to its end at once: Django does so, too.
        body, rest = async_to_sync(_gathered)(response.streaming_content, limits, to_the_end=not on_a_loop)
    else:
        body, rest = gathered(iter(response.streaming_content), limits)
    response.streaming_content = rest
    return Taken(response.status_code, headers_of(response), body)


async def async_taken(response: Response, limits: Limits) -> Taken:
    """Return the same for an async view."""
    if not _can_be_gathered(response, limits):
        return _whole(response, limits)
    rest: Any
    if response.is_async:
        body, rest = await _gathered(response.streaming_content, limits)
    else:
        body, rest = await sync_to_async(gathered)(iter(response.streaming_content), limits)
    response.streaming_content = rest
    return Taken(response.status_code, headers_of(response), body)


def _can_be_gathered(response: Response, limits: Limits) -> bool:
    return response.streaming and not flows_at_once(headers_of(response), limits.operation, limits.time)


def _whole(response: Response, limits: Limits) -> Taken:
    if response.streaming:
        flow_on = _inside if response.is_async else inside
        response.streaming_content = flow_on(limits.operation, response.streaming_content)
        return Taken(response.status_code, headers_of(response), None)
    body = None if len(response.content) > limits.size else response.content
    return Taken(response.status_code, headers_of(response), body)


async def _gathered(
    chunks: AsyncIterator[bytes], limits: Limits, *, to_the_end: bool = False
) -> tuple[bytes | None, Any]:
    held: list[bytes] = []
    size = 0
    end = limits.end()
    async for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if not to_the_end and (size > limits.size or limits.is_late(end)):
            return None, _chained(held, _inside(limits.operation, chunks))
    if to_the_end:
        return (b"".join(held) if size <= limits.size else None), held
    whole = b"".join(held)
    return whole, _chained([whole], chunks)


async def _chained(held: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in held:
        yield chunk
    async for chunk in rest:
        yield chunk


async def _inside(operation: Operation, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Iterate over *chunks*, each made within *operation*, as ``inside`` does in a thread."""
    remaining = aiter(chunks)
    while True:
        with enter(operation):
            try:
                chunk = await anext(remaining)
            except StopAsyncIteration:
                return
        yield chunk

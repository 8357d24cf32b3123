"""A request and a response of Django's in the core's terms, and back. It guards nothing, and calls no view.

A body is read before the view is called, and put back as it was: ``request.body``, ``POST``, ``FILES`` and ``read()``
give the view what they would give it without us, errors and limits of Django's own included.
"""

from __future__ import annotations

import dataclasses
import io
import weakref
from typing import Any, ClassVar

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.signals import got_request_exception
from django.http import Http404, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.utils.log import log_response

from semel.asgi.protocol import head_of as asgi_head_of
from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Head, Headers, one_line
from semel.errors import BodyIncomplete, ConfigurationError
from semel.guard.body import CHUNK_BYTES, Body, framed
from semel.guard.request import declared_length
from semel.guard.views import Translation, written_form
from semel.wsgi.environ import head_of as wsgi_head_of
from semel.wsgi.environ import lowered

#: What Django answers below 500 when a view raises it: an answer like any other.
STATUSES: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((Http404,), 404),
    ((PermissionDenied,), 403),
    ((BadRequest, SuspiciousOperation, MultiPartParserError), 400),
)

#: On a request that somebody guards already.
_CLAIMED = "_semel_is_claimed"

#: Any ``HttpRequest``, ``HttpResponseBase`` and view. Django has no types.
Request = Any
Response = Any


class DjangoRequest(Translation[Response]):
    """One request of Django's."""

    #: What an answer of ours becomes.
    response_class: ClassVar[type[HttpResponse]] = HttpResponse

    def __init__(self, request: Request) -> None:
        """Take Django's own *request*, or one of REST framework's, which has Django's in it."""
        self.request = request
        self.http: Request = getattr(request, "_request", request)
        self.head = head_of(self.http)
        self._reported: Exception | None = None

    def whole_body(self, limit: int) -> Buffer | None:
        """Return the whole body, and leave it for the view to read; None: it is larger than *limit*."""
        http = self.http
        if declared_length(self.head) > limit:
            return None
        if hasattr(http, "_body"):
            return http.body if len(http.body) <= limit else None
        if http._read_started:  # noqa: SLF001 - REST framework asks the same of it
            return self._parsed_body()
        body = Body()
        try:
            is_whole = _read(http, self.head, body, limit)
            return body.buffer() if is_whole else None
        finally:
            # Not at the end of the request: whoever shows an error may read the rest of the form.
            weakref.finalize(http, body.close)

    def _parsed_body(self) -> Buffer:
        """Return what stands for a body that was read before us: by the check for CSRF, or by REST framework."""
        http = self.http
        if not (hasattr(http, "_post") and hasattr(http, "_files") and _is_parsed(http, self.head)):
            raise ConfigurationError(
                "Something in front of the guard has read the request's body from its stream, so nobody can tell any "
                "more what was asked. Have it use request.body, which leaves the body in place."
            )
        fields = [(name, value) for name, values in http.POST.lists() for value in values]
        files = [(name, file.name, file.content_type, file) for name, each in http.FILES.lists() for file in each]
        return written_form(self.head, fields, files)

    def response_of(self, answer: Answer) -> Response:
        """Return an answer of ours as a plain response."""
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
        """Return what Django answers with by itself where a view raises *error*; None: as a server error."""
        return next((status for kinds, status in STATUSES if isinstance(error, kinds)), None)

    def report(self, error: Exception) -> None:
        """Do what Django does about an exception that nobody has caught. It is logged with the response."""
        self._reported = error
        try:
            raise error  # noqa: TRY301 - those who listen ask for the exception that is being handled
        except Exception:  # noqa: BLE001 - as above
            got_request_exception.send(sender=None, request=self.http)


def claim(request: Request) -> bool:
    """Say whether nobody guards *request* yet, and that somebody does from now on. A view may call another."""
    http = getattr(request, "_request", request)
    is_ours = not getattr(http, _CLAIMED, False)
    setattr(http, _CLAIMED, True)
    return is_ours


def release(request: Request) -> None:
    """Say that nobody guards *request* any more. A test may send it again."""
    setattr(getattr(request, "_request", request), _CLAIMED, False)


def head_of(request: Request) -> Head:
    """Return all of the request but its body."""
    scope = getattr(request, "scope", None)
    if scope is not None:
        query = scope.get("query_string", b"")
        # Django's own test client has text there.
        head = asgi_head_of({**scope, "query_string": query.encode() if isinstance(query, str) else query})
    else:
        # Django has decoded these two where it found them; PEP 3333 hands bytes over as Latin-1, whatever they are.
        paths = {name: _latin(request.META.get(name, "")) for name in ("SCRIPT_NAME", "PATH_INFO")}
        head = wsgi_head_of({**request.META, **paths, "REQUEST_METHOD": request.method})
    return dataclasses.replace(head, method=request.method)


def headers_of(response: Response) -> Headers:
    """Return the headers of a response; its cookies are elsewhere, and are not kept."""
    return lowered((name, str(value)) for name, value in response.items())


def _is_parsed(http: Request, head: Head) -> bool:
    """Whether the form is what was sent: where there was none, or its stream was read before, it is empty to Django."""
    boundary = http.content_params.get("boundary")
    # The only line of a form without fields.
    is_empty = boundary is not None and declared_length(head) <= len(f"\r\n--{boundary}--\r\n")
    return bool(http.POST or http.FILES) or is_empty


def _latin(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("latin-1")


def _read(http: Request, head: Head, body: Body, limit: int) -> bool:
    """Read the body into *body*, and put the stream back to its beginning; say whether it is within *limit*."""
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
    if is_whole and body.size < declared_length(head):
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

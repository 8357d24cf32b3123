"""One request to a Flask view, as values of the core, and back. It decides nothing: ``flows/serve`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from semel.core.fingerprint import Buffer
from semel.core.message import Answer
from semel.core.outcome import Door
from semel.errors import ConfigurationError, SemelError
from semel.guard.body import Body, Limits, flows_at_once, framed, inside
from semel.guard.request import declared_length
from semel.guard.views import Taken, View, gathered, written_form
from semel.wsgi.environ import head_of, lowered, read_body
from semel.wsgi.watching import give_back

try:
    from flask import Request, Response, after_this_request, current_app, got_request_exception, request
    from werkzeug.datastructures import Headers
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("semel.flask needs Flask 3. Run: pip install 'semel[flask]'") from error

#: The key in the environ under which the body of a guarded request is kept until the request ends.
BODY = "semel.body"

#: The attribute in which Flask caches a body.
_KEPT = frozenset({"form", "files", "_cached_data"})

_READ_BEFORE = (
    "The body of this request was read before its guarded view, and not kept, so it can't be compared with a retry's. "
    "Read it with request.get_data(), request.get_json() or request.form, which keep it."
)


class FlaskView(View[Response]):
    """The request that Flask is serving in this context, and the view it is for."""

    door: ClassVar[Door] = "flask"

    def __init__(self, view: Callable[[], Any], scope: Callable[[Request], object], undo: Callable[[], None]) -> None:
        """*scope* returns the user of the request; *undo* rolls back what a view that raises has not committed."""
        self.head = head_of(request.environ)
        self._view = view
        self._scope = scope
        self._undo = undo

    def template(self) -> str | None:
        """Return the rule of the route."""
        return None if request.url_rule is None else request.url_rule.rule

    def principal(self) -> object:
        """Ask the application for the user: its login has run by now."""
        return self._scope(request)

    def read_body(self, limit: int) -> Buffer | None:
        """Read the body, and put it where Flask reads it; or take it from Flask's cache."""
        if not _was_touched(request):
            return self._read_stream(limit)
        length = declared_length(self.head)
        if length > limit:
            return None
        is_taken = vars(request).keys().isdisjoint(_KEPT)
        data = request.get_data()
        if not data and (request.form or request.files):
            files = request.files.items(multi=True)
            return written_form(
                self.head,
                request.form.items(multi=True),
                ((name, each.filename, each.content_type, each.stream) for name, each in files),
            )
        # The length of a chunked body is not known, so a missing part can't be noticed.
        if len(data) < length or (is_taken and "HTTP_TRANSFER_ENCODING" in request.environ):
            raise ConfigurationError(_READ_BEFORE)
        return data if len(data) <= limit else None

    def _read_stream(self, limit: int) -> Buffer | None:
        body = request.environ[BODY] = Body()
        after_this_request(_leave_to_stream)
        is_whole = False
        try:
            is_whole = read_body(request.environ, self.head, body, limit)
        finally:
            # Also after a failure: in report mode the view runs anyway.
            give_back(request.environ, body, is_whole=is_whole)
        return body.buffer() if is_whole else None

    def call(self) -> Response:
        """Call the view. The answer of Flask's error handlers to an exception counts as the view's answer."""
        try:
            answer = self._view()
        except SemelError:
            # Such as NoEffect: the flow handles it, before an application's handler for every Exception.
            raise
        except Exception as error:  # noqa: BLE001 - one that no handler is for is raised again there
            self._undo()
            answer = current_app.handle_user_exception(error)
        return current_app.make_response(answer)

    def take(self, response: Response, limits: Limits) -> Taken:
        """Return the part of the *response* that can be kept. A stream is read up to the limits; the rest follows."""
        headers = lowered(response.get_wsgi_headers(request.environ))
        if response.is_sequence:
            whole = b"".join(response.iter_encoded())
            return Taken(response.status_code, headers, whole if len(whole) <= limits.size else None)
        stream: Any = response.response
        kept: bytes | None = None
        if flows_at_once(headers, limits.operation, limits.time):
            rest = inside(limits.operation, response.iter_encoded())
        else:
            kept, rest = gathered(iter(response.iter_encoded()), limits)
        if kept is None:
            response.response = rest
        else:
            response.direct_passthrough = False
            response.response = [kept]
        if hasattr(stream, "close"):
            response.call_on_close(stream.close)  # The response no longer owns the stream, and would not close it.
        return Taken(response.status_code, headers, kept)

    def response_of(self, answer: Answer) -> Response:
        """Return a response of the app's own class, with the headers of *answer* and no others."""
        response = current_app.make_response((answer.body or b"", answer.status))
        response.headers = Headers(
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in framed(answer)]
        )
        return response

    def status_of(self, response: Response) -> int:
        """Return the status of the view's own *response*."""
        return response.status_code

    def report(self, error: Exception) -> None:
        """Do as Flask does with an unhandled exception: send its signal and log it; or raise it, for a test or the
        debugger, where the app says so. Its retries get what is stored for it.
        """
        app: Any = current_app
        propagates: bool | None = app.config["PROPAGATE_EXCEPTIONS"]
        if app.testing or app.debug if propagates is None else propagates:
            raise error
        got_request_exception.send(app._get_current_object(), _async_wrapper=app.ensure_sync, exception=error)  # noqa: SLF001 - as Flask's documentation has it
        app.log_exception((type(error), error, error.__traceback__))


def _leave_to_stream(response: Response) -> Response:
    """Keep the body open for an answer that streams: it may read the body after the request has ended."""
    if not response.is_sequence and (body := request.environ.pop(BODY, None)) is not None:
        response.call_on_close(body.close)
    return response


def _was_touched(request: Request) -> bool:
    """Whether the body was read before, by a ``before_request`` function or a decorator outside."""
    return not vars(request).keys().isdisjoint({"stream", *_KEPT})

"""What is special to the WSGI entry point: raw sockets, old habits, and who closes what when."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import pytest

import semel
from semel import NoEffect, Policy
from semel.core.commands import Browse, Look
from semel.core.record import Record
from semel.core.state import State
from semel.guard.body import SPILL_BYTES
from semel.stores.memory import MemoryStore
from semel.wsgi import IdempotencyMiddleware
from semel.wsgi.environ import head_of
from tests.web.harness import Request, Response, chunks, eventually, serve_wsgi, wsgi_environ

TEXT = [("Content-Type", "text/plain")]
BODY = b"amount=5"
App = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]


class Raw(io.BytesIO):
    """A raw socket: reading past the end would wait for ever, so here it is an error."""

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 <= size <= len(self.getvalue()) - self.tell(), "read past the end"
        return super().read(size)


def request(key: str | None = "key-1", body: bytes = BODY, **more: Any) -> WSGIEnvironment:
    lines = (("Content-Type", b"text/plain"), *((("Idempotency-Key", key.encode()),) if key else ()))
    return wsgi_environ(Request(lines=lines, body=body)) | {"wsgi.input": Raw(body), "wsgi.errors": sys.stderr} | more


class Entry:
    """An app behind the entry point, on a store that can be looked into."""

    def __init__(self, app: App, **policy: Any) -> None:
        self.store = MemoryStore()
        self.app = IdempotencyMiddleware(app, store=self.store, scope=lambda _: "alice", policy=Policy.ietf(**policy))

    def send(self, **environ: Any) -> Response:
        return serve_wsgi(self.app, request(**environ))

    def record(self) -> Record | None:
        return self.store.perform(Look("alice", "key-1"))

    @property
    def is_empty(self) -> bool:
        return self.store.perform(Browse(limit=1)) == ()


class Counted:
    """An app that says how often it ran."""

    def __init__(self, app: App | None = None) -> None:
        self.runs = 0
        self._app = app or said(b"ok")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self.runs += 1
        return self._app(environ, start_response)


def said(*parts: bytes, status: str = "201 Created") -> App:
    def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response(status, TEXT)
        return list(parts)

    return app


class Closing:
    """An iterable that counts its closings."""

    def __init__(self, parts: Iterable[bytes], on_close: Callable[[], None] = lambda: None) -> None:
        self._parts = parts
        self._on_close = on_close
        self.closings = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)

    def close(self) -> None:
        self.closings += 1
        self._on_close()


def nothing(*_: Any) -> Any:
    """The server's start_response and write, where nobody looks."""
    return nothing


class TestPassingThrough:
    @pytest.mark.parametrize("method, key", [("GET", "key-1"), ("POST", None), ("PUT", "key-1")])
    def test_unguarded_requests_are_untouched(self, method: str, key: str | None) -> None:
        """An unguarded request reaches the app with the server's own objects, and its answer comes back as it is."""
        seen: list[object] = []
        answer = [b"ok"]

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            seen.extend([environ, start_response])
            return answer

        environ = request(key, REQUEST_METHOD=method)
        before = dict(environ)

        def start_response(*_: Any) -> Any: ...

        assert Entry(app).app(environ, start_response) is answer
        assert seen[0] is environ
        assert seen[1] is start_response
        assert environ == before
        assert environ["wsgi.input"].tell() == 0

    def test_paths_narrow_it_down(self) -> None:
        """A path that no pattern names is not guarded; one that has a policy of its own is guarded by that."""
        app = Counted()
        paths = {"/pay": Policy.ietf(required=True), "/orders/*": Policy.ietf()}
        entry = IdempotencyMiddleware(app, store="memory://", scope=semel.SINGLE_TENANT, paths=paths)

        def send(path: str, key: str | None) -> int:
            return serve_wsgi(entry, request(key, PATH_INFO=path)).status

        assert [send("/pay", None), send("/orders/1", None), send("/else", None)] == [400, 201, 201]
        assert [send("/else", "k"), send("/else", "k"), send("/orders/1", "k"), send("/orders/1", "k")] == [201] * 4
        assert app.runs == 5

    def test_it_obeys_pep_3333_on_both_sides(self) -> None:
        """To the server the guard is a WSGI app, and to the app a WSGI server, as the standard library checks it."""

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            size = int(environ["CONTENT_LENGTH"])
            if environ["QUERY_STRING"] == "raise":
                raise RuntimeError("oops")
            start_response("201 Created", TEXT)
            if environ["QUERY_STRING"] == "large":
                return chunks(1000, 300)
            return iter([environ["wsgi.input"].read(size)])

        entry = IdempotencyMiddleware(
            validator(app),
            store="memory://",
            scope=semel.SINGLE_TENANT,
            policy=Policy.ietf(max_response_body=10_000),
        )
        for query, statuses in {"": [201, 201], "large": [201, 409], "raise": [500, 500], "a=1": [422, 422]}.items():
            key = query if query in {"large", "raise"} else "key-1"
            got = [serve_wsgi(validator(entry), request(key, QUERY_STRING=query)) for _ in range(2)]
            assert [response.status for response in got] == statuses
            assert not [response.error for response in got if isinstance(response.error, AssertionError)]


class TestRequestBody:
    def test_never_reads_past_the_declared_length(self) -> None:
        """The body is read to its declared end and not a byte further: a raw socket would wait for ever."""
        bodies: list[bytes] = []

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            bodies.append(environ["wsgi.input"].read())
            return said(b"ok")(environ, start_response)

        entry = Entry(app)
        for index, body in enumerate([b"", b"x", b"y" * 70_000, b"z" * 1_000_000]):
            assert entry.send(key=f"key-{index}", body=body).status == 201
            assert bodies[-1] == body

    @pytest.mark.parametrize("length", [None, ""])
    def test_no_length_is_no_body(self, length: str | None) -> None:
        """Without a declared length nothing is read, as CGI has it."""
        app = Counted()
        environ = request(CONTENT_LENGTH=length)
        if length is None:
            del environ["CONTENT_LENGTH"]
        assert serve_wsgi(Entry(app).app, environ).status == 201
        assert environ["CONTENT_LENGTH"] == "0"

    def test_too_large_is_refused_unread(self) -> None:
        """A declared length over the limit is 413 without a byte being read."""
        app = Counted()
        environ = request()
        assert serve_wsgi(Entry(app, max_request_body=7).app, environ).status == 413
        assert environ["wsgi.input"].tell() == 0
        assert app.runs == 0

    def test_bad_key_is_refused_unread(self) -> None:
        """A malformed key is refused before the body is asked for: a client that expects 100 never sends it."""
        environ = request("a,b", HTTP_EXPECT="100-continue")
        assert serve_wsgi(Entry(said()).app, environ).status == 400
        assert environ["wsgi.input"].tell() == 0

    def test_a_client_that_breaks_off_runs_nothing(self) -> None:
        """A body that ends before its declared length is 400: nothing runs and nothing is stored."""
        app = Counted()
        entry = Entry(app)
        response = entry.send(CONTENT_LENGTH="100", **{"wsgi.input": io.BytesIO(BODY)})
        assert (response.status, response.code) == (400, "request-body-incomplete")
        assert app.runs == 0
        assert entry.is_empty
        assert entry.send().status == 201

    def test_chunked_body_with_an_end(self) -> None:
        """A body without a length is read to its end where the server promises one; the handler is told its length."""
        seen: list[Any] = []

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            names = ("CONTENT_LENGTH", "HTTP_TRANSFER_ENCODING", "wsgi.input_terminated")
            seen.append([environ.get(name) for name in names])
            return said(environ["wsgi.input"].read())(environ, start_response)

        entry = Entry(app, max_request_body=200_000)
        chunked = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True}
        first = entry.send(**chunked, **{"wsgi.input": io.BytesIO(b"x" * 150_000)})
        assert first.body == b"x" * 150_000
        assert seen == [["150000", None, True]]
        # The same body is the same request, whichever way it came.
        assert entry.send(body=b"x" * 150_000).is_replay
        too_large = entry.send(key="b", **chunked, **{"wsgi.input": io.BytesIO(b"x" * 200_001)})
        assert too_large.status == 413

    def test_chunked_body_without_an_end_is_not_touched(self) -> None:
        """Where the server does not say that the body ends, a chunked one is not read."""
        entry = Entry(lambda environ, start: said(environ["wsgi.input"].read())(environ, start))
        environ = request(CONTENT_LENGTH="", HTTP_TRANSFER_ENCODING="chunked")
        assert serve_wsgi(entry.app, environ).body == b""

    @pytest.mark.parametrize("size", [20, 300_000], ids=["in memory", "on disk"])
    def test_the_handler_gets_a_seekable_file(self, size: int) -> None:
        """The handler can read the body in any way, and more than once."""
        body = b"line\n" * (size // 5)
        seen: list[bytes] = []

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            stream = environ["wsgi.input"]
            assert isinstance(stream, io.BytesIO) == (size <= SPILL_BYTES)
            seen.append(stream.readline())
            stream.seek(0)
            seen.append(b"".join(stream))
            stream.seek(0)
            seen.extend([stream.read(int(environ["CONTENT_LENGTH"])), stream.read(1)])
            return said(b"ok")(environ, start_response)

        assert Entry(app).send(body=body).status == 201
        assert seen == [b"line\n", body, body, b""]

    def test_a_large_body_and_an_exception(self) -> None:
        """A body on disk is let go of, whatever the handler does."""

        def app(_environ: WSGIEnvironment, _start: StartResponse) -> Iterable[bytes]:
            raise RuntimeError("oops")

        assert Entry(app).send(body=b"x" * 300_000).status == 500
        assert Entry(app, server_errors="release").send(body=b"x" * 300_000).status == 500


class TestHead:
    def test_content_type_in_two_spellings(self) -> None:
        """Of CONTENT_TYPE and HTTP_CONTENT_TYPE, the one that CGI defines counts; they are never joined."""
        both = request(HTTP_CONTENT_TYPE="text/html", HTTP_CONTENT_LENGTH="9")
        assert head_of(both).values(b"content-type") == [b"text/plain"]
        assert head_of(both).values(b"content-length") == [b"8"]
        only = request(CONTENT_TYPE="", HTTP_CONTENT_TYPE="text/html")
        assert head_of(only).values(b"content-type") == [b"text/html"]

    @pytest.mark.parametrize(
        "environ, path",
        [
            ({"RAW_URI": "/v1/a%2Fb?x=1"}, "/v1/a%2Fb"),
            ({"RAW_URI": None, "REQUEST_URI": "/v1/a%2fb?x=1"}, "/v1/a%2fb"),
            ({"RAW_URI": "http://host:80/v1/a%2Fb?x=1"}, "/v1/a%2Fb"),
            ({"RAW_URI": "//host/v1"}, "//host/v1"),
            ({"RAW_URI": ""}, "/v1/a/b%20%C3%A9"),
        ],
    )
    def test_the_path_as_it_was_sent(self, environ: dict[str, str | None], path: str) -> None:
        """The path is the one on the request line, where the server still knows it."""
        given = request(SCRIPT_NAME="/v1", PATH_INFO="/a/b é".encode().decode("latin-1")) | environ
        assert head_of(given).path == path


class TestAnswer:
    def test_first_answer_is_the_apps_own(self) -> None:
        """The first answer is passed on as the app gave it: its reason, its spelling, its order."""
        fields = [("X-One", "1"), ("Set-Cookie", "a=b"), ("x-two", "2"), ("Content-Type", "text/plain")]

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            start_response("299 Fine by me", fields)
            return [b"a", b"", b"b"]

        started: list[Any] = []
        result = Entry(app).app(request(), lambda *args: started.append(args))  # type: ignore[arg-type]  # enough
        assert b"".join(result) == b"ab"
        assert started == [("299 Fine by me", fields)]

    def test_three_megabytes_arrive_complete(self) -> None:
        """A generator that passes the limit is neither cut short nor begun again."""
        app = Counted(lambda environ, start: (start("200 OK", TEXT), chunks(100_000, 30))[1])
        entry = Entry(app)
        assert entry.send().body == b"".join(chunks(100_000, 30))
        assert entry.send().code == "response-not-replayable"
        assert app.runs == 1

    def test_what_flows_is_not_buffered(self) -> None:
        """Once its tombstone is stored, a stream leaves chunk by chunk, no faster than the server takes it."""
        made: list[int] = []

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            start_response("200 OK", [("Content-Type", "text/event-stream")])
            for number in range(5):
                made.append(number)
                yield b"data: %d\n\n" % number

        entry = Entry(app)
        result = iter(entry.app(request(), nothing))
        assert len(made) <= 1
        record = entry.record()
        assert record is not None
        assert record.state is State.COMPLETE
        parts = []
        for part in result:
            if part:
                parts.append(part)
                assert len(made) <= len(parts) + 1
        assert b"".join(parts) == b"".join(b"data: %d\n\n" % number for number in range(5))

    def test_a_file_wrapper(self) -> None:
        """What the server's file wrapper makes is an iterable like any other."""

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            start_response("200 OK", TEXT)
            wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](io.BytesIO(b"x" * 50_000))
            return wrapped

        entry = Entry(app)
        more = {"wsgi.file_wrapper": FileWrapper}
        assert [entry.send(**more).body for _ in range(2)] == [b"x" * 50_000] * 2

    def test_start_response_in_the_first_step_of_a_generator(self) -> None:
        """An app may call start_response as late as with its first chunk."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            start_response("201 Created", TEXT)
            yield b"late"

        entry = Entry(app)
        assert [entry.send().body for _ in range(2)] == [b"late", b"late"]

    def test_no_start_response_is_an_error(self) -> None:
        """An app that never starts its response is reported, and counts as one that raised."""
        entry = Entry(lambda _environ, _start: [])
        assert isinstance(entry.send().error, RuntimeError)
        assert entry.send().status == 500

    def test_second_start_response_is_an_error(self) -> None:
        """Without exc_info, starting twice is the app's mistake."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            start_response("200 OK", TEXT)
            start_response("201 Created", TEXT)
            return []

        assert isinstance(Entry(app).send().error, AssertionError)


class TestWrite:
    def test_written_and_returned(self) -> None:
        """What is written comes before what is returned, and both are kept."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            write = start_response("201 Created", TEXT)
            write(b"one ")
            write(b"two ")
            return [b"three"]

        entry = Entry(app)
        assert [entry.send().body for _ in range(2)] == [b"one two three"] * 2

    @pytest.mark.parametrize("kind", ["text/plain", "text/event-stream"])
    def test_written_past_the_limit(self, kind: str) -> None:
        """What is written past the limit arrives complete, and leaves a tombstone."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            write = start_response("200 OK", [("Content-Type", kind)])
            for part in chunks(50_000, 40):
                write(part)
            return [b"the end"]

        entry = Entry(app)
        assert entry.send().body == b"".join(chunks(50_000, 40)) + b"the end"
        assert entry.send().code == "response-not-replayable"

    def test_written_while_it_flows(self) -> None:
        """A stream may still be written to in the middle."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            write = start_response("200 OK", [("Content-Type", "text/event-stream")])
            yield b"1"
            write(b"2")
            yield b"3"

        assert Entry(app).send().body == b"123"


class TestExcInfo:
    def test_an_error_page_takes_the_place_of_what_was_held(self) -> None:
        """Nothing has been sent, so start_response with exc_info begins the answer anew."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            start_response("200 OK", TEXT)
            yield b"half of "
            try:
                int("oops")
            except ValueError:
                start_response("400 Bad Request", TEXT, sys.exc_info())
            yield b"an error page"

        entry = Entry(app)
        for _ in range(2):
            response = entry.send()
            assert (response.status, response.body) == (400, b"an error page")

    def test_an_error_page_comes_too_late_for_a_stream(self) -> None:
        """Once it flows, the server decides about start_response with exc_info: it raises."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            start_response("200 OK", [("Content-Type", "text/event-stream")])
            yield b"half"
            try:
                int("oops")
            except ValueError:
                start_response("400 Bad Request", TEXT, sys.exc_info())

        response = Entry(app).send()
        assert (response.status, response.body) == (200, b"half")
        assert isinstance(response.error, ValueError)


class TestEnds:
    def test_close_comes_once_and_after_the_answer_is_stored(self) -> None:
        """The app's iterable is closed once, by the server, when the answer is stored and has left."""
        states: list[State] = []
        iterable = Closing([b"ok"], lambda: states.append(entry.record().state))  # type: ignore[union-attr]  # it is there
        entry = Entry(lambda environ, start: (start("201 Created", TEXT), iterable)[1])
        result = entry.app(request(), nothing)
        assert list(result) == [b"ok"]
        assert iterable.closings == 0
        result.close()  # type: ignore[attr-defined]  # it has one
        result.close()  # type: ignore[attr-defined]  # twice is once
        assert iterable.closings == 1
        assert states == [State.COMPLETE]

    @pytest.mark.parametrize("parts", [chunks(1000, 30), iter([b""])], ids=["a stream", "nothing"])
    def test_close_of_other_endings(self, parts: Iterable[bytes]) -> None:
        """A stream is closed once, too, and so is an answer that ended in an error."""
        iterable = Closing(parts)
        Entry(lambda environ, start: (start("200 OK", TEXT), iterable)[1], max_response_body=2000).send()
        assert iterable.closings == 1

    @pytest.mark.parametrize("server_errors", ["keep", "release"])
    def test_close_after_an_exception(self, server_errors: str) -> None:
        """An iterable that raises is closed once, whether the key is kept or freed."""

        def broken() -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("oops")

        iterable = Closing(broken())
        entry = Entry(lambda environ, start: (start("200 OK", TEXT), iterable)[1], server_errors=server_errors)
        response = entry.send()
        assert isinstance(response.error, RuntimeError)
        assert iterable.closings == 1
        assert entry.is_empty == (server_errors == "release")

    def test_a_server_that_stops_half_way(self) -> None:
        """A stream whose client has gone is closed by the server, half read."""
        iterable = Closing(chunks(1000, 30))
        entry = Entry(lambda environ, start: (start("200 OK", TEXT), iterable)[1], max_response_body=2000)
        result = entry.app(request(), nothing)
        next(iter(result))
        result.close()  # type: ignore[attr-defined]  # it has one
        assert iterable.closings == 1

    def test_the_answer_leaves_before_the_exception(self) -> None:
        """A handler's exception reaches the server after the answer that its retries will get."""
        error = RuntimeError("oops")

        def app(_environ: WSGIEnvironment, _start: StartResponse) -> Iterable[bytes]:
            raise error

        entry = Entry(app)
        result = iter(entry.app(request(), nothing))
        answer = next(result)
        assert b"operation-failed" in answer
        with pytest.raises(RuntimeError) as caught:
            next(result)
        assert caught.value is error
        assert entry.send().body == answer

    @pytest.mark.parametrize("in_generator", [False, True])
    def test_no_effect_is_a_503(self, in_generator: bool) -> None:
        """NoEffect is answered with 503 and frees the key, even after a first chunk."""

        def app(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
            if in_generator:
                start_response("200 OK", TEXT)
                yield b"half"
            raise NoEffect

        entry = Entry(app)
        response = entry.send()
        assert (response.status, response.code, response.error) == (503, "no-effect", None)
        assert entry.is_empty

    def test_an_interrupted_handler_is_left_to_its_lease(self) -> None:
        """What SystemExit did half-way is unknown: nothing is stored, nothing freed, and the lease is not renewed."""
        attempts: list[int] = []

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            attempts.append(semel.current().attempt)
            if len(attempts) == 1:
                raise SystemExit(1)
            return said(b"ok")(environ, start_response)

        entry = Entry(app, lease=timedelta(seconds=1))
        with pytest.raises(SystemExit):
            entry.send()
        assert entry.send().code == "idempotency-key-in-progress"
        assert eventually(entry.send, lambda response: response.status != 409).status == 201
        assert attempts == [1, 2]


class TestCurrent:
    def test_the_operation_does_not_leak(self) -> None:
        """A guarded request's operation is gone when the same thread serves the next one."""
        seen: list[str | None] = []

        def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            try:
                seen.append(semel.current().key)
            except LookupError:
                seen.append(None)
            if environ["QUERY_STRING"]:
                raise RuntimeError("oops")
            return said(b"ok")(environ, start_response)

        entry = Entry(app)
        entry.send()
        entry.send(key=None)
        entry.send(key="b", QUERY_STRING="raise")
        entry.send(key=None)
        assert seen == ["key-1", None, "b", None]

    def test_the_operation_is_known_to_the_end(self) -> None:
        """The operation is the current one in a generator, in a stream that flows, and in close()."""
        seen: list[str] = []

        def parts() -> Iterator[bytes]:
            for _ in range(3):
                seen.append(semel.current().key)
                yield b"x" * 1000

        iterable = Closing(parts(), lambda: seen.append(semel.current().key))
        entry = Entry(lambda environ, start: (start("200 OK", TEXT), iterable)[1], max_response_body=1500)
        assert len(entry.send().body) == 3000
        assert seen == ["key-1"] * 4
        with pytest.raises(LookupError):
            semel.current()

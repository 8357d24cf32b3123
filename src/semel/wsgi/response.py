"""A WSGI app's answer: held back until it is stored, or passed through if it can't be kept. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.core.handler import Ending
from semel.core.message import Answer
from semel.guard.body import Body, Limits, flows_at_once, inside
from semel.guard.endings import answered, raised, streaming
from semel.operation import enter
from semel.wsgi.environ import lowered, reached_handler

Fields = list[tuple[str, str]]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]


class Response:
    """What the app answers, from its ``start_response`` to the end of its iterable."""

    def __init__(self, environ: WSGIEnvironment, limits: Limits) -> None:
        """Hold the answer back within *limits*; the app runs within the operation in *limits*."""
        self._environ = environ
        self._operation = limits.operation
        self._limits = limits
        #: When holding it back ends, and it is passed through.
        self._end: float | None = None
        # Only write(), which can't be paused, exceeds the limit: the rest goes to disk.
        self._held = Body(spill=limits.size)
        self._iterable: Iterable[bytes] = ()
        self._chunks: Iterator[bytes] = iter(())
        self._server: StartResponse | None = None
        self._server_write: Callable[[bytes], object] = self._held.add
        #: As the app gave them.
        self.status = ""
        self.fields: Fields = []
        self._reached_handler = True
        self.answer: Answer | None = None

    def take(self, app: WSGIApplication) -> Ending:
        """Run the app until its answer is complete, or can't be kept. The operation must be entered."""
        try:
            self._iterable = app(self._environ, self._start)
            self._chunks = iter(self._iterable)
            while self._can_be_kept():
                try:
                    chunk = next(self._chunks)
                except StopIteration:
                    return self._answered()
                self._held.add(chunk)
            return streaming(self._code(), lowered(self.fields), self._operation)
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            return raised(error, self._operation)

    def flow_on(self, start_response: StartResponse) -> Iterator[bytes]:
        """Pass the answer through: its tombstone is stored."""
        self._server = start_response
        self._server_write = start_response(self.status, self.fields)
        return self._flow()

    def close(self) -> None:
        """Close what the app returned, once."""
        close = getattr(self._iterable, "close", None)
        self._iterable = ()
        try:
            if close is not None:
                with enter(self._operation):
                    close()
        finally:
            self._held.close()

    def _flow(self) -> Iterator[bytes]:
        for chunk, _ in self._held.chunks():
            yield chunk
        yield from inside(self._operation, self._chunks)

    def _start(self, status: str, fields: Fields, exc_info: ExcInfo | None = None, /) -> Callable[[bytes], object]:
        """The app's ``start_response``."""
        if self._server is not None:
            return self._server(status, fields, exc_info)
        if self.status:
            if exc_info is None:
                raise AssertionError("start_response was called again, and not for an error (without exc_info).")
            # Nothing has been sent, so the error's answer replaces everything that was held back.
            self._held.close()
            self._held = Body(spill=self._limits.size)
            self._server_write = self._held.add
        self.status, self.fields = status, fields
        self._end = self._limits.end()
        # Read now, since Flask resets it when the app returns.
        self._reached_handler = reached_handler(self._environ, self._code())
        return self._write

    def _write(self, data: bytes) -> None:
        """The app's ``write``: the old way to answer."""
        self._server_write(data)

    def _can_be_kept(self) -> bool:
        # A thread that waits for the next chunk can't be interrupted, so the time is checked after each chunk.
        is_in_time = self._end is None or not self._limits.is_late(self._end)
        is_held = is_in_time and self._held.size <= self._limits.size
        return is_held and not flows_at_once(lowered(self.fields), self._operation, self._limits.time)

    def _answered(self) -> Ending:
        self.answer = Answer(self._code(), lowered(self.fields), bytes(self._held.buffer()))
        return answered(self.answer, self._operation, reached_handler=self._reached_handler)

    def _code(self) -> int:
        if not self.status:
            raise RuntimeError("The app returned without calling start_response.")
        return int(self.status.split(" ", 1)[0])


class Leaving:
    """The iterable for the server: an answer to send, and to close afterwards."""

    def __init__(self, chunks: Iterable[bytes], close: Callable[[], None]) -> None:
        """Send *chunks*, then *close*. Not a list: granian does not close lists."""
        self._chunks = chunks
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the answer's body."""
        return iter(self._chunks)


def then_raise(body: bytes, error: Exception) -> Iterator[bytes]:
    """Send *body*, then raise *error*."""
    yield body
    raise error

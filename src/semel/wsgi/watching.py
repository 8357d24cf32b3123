"""A WSGI app's answer in report mode: passed on unchanged; its status and end are noted. Nothing is held back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.guard.body import Body

#: Called once, with the status, when the answer is complete.
Conclude = Callable[[int | None], None]


def watched(
    app: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse, conclude: Conclude
) -> Iterable[bytes]:
    """Let *app* answer, and *conclude* afterwards."""
    watch = _Watch(start_response, conclude)
    try:
        answer = app(environ, watch.start)
    except Exception:
        watch.end()
        raise
    wrapper = environ.get("wsgi.file_wrapper")
    if type(answer) in (list, tuple) or (isinstance(wrapper, type) and isinstance(answer, wrapper)):
        # It is complete, and servers treat some types in a special way (a list gets a length, a file is sent
        # by the kernel): wrapped, the response would differ.
        watch.end()
        return answer
    # Other servers ask for the number of chunks, and set Content-Length for a single one.
    return _SizedAnswer(answer, watch.end) if hasattr(answer, "__len__") else _Answer(answer, watch.end)


class _Watch:
    """The app's ``start_response``."""

    def __init__(self, start_response: StartResponse, conclude: Conclude) -> None:
        self._start_response = start_response
        self._conclude = conclude
        self._status: int | None = None
        self._is_over = False

    def start(self, status: str, *rest: Any, **names: Any) -> Any:
        write = self._start_response(status, *rest, **names)
        code = status[:3]
        self._status = int(code) if code.isdigit() else None
        return write

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._conclude(self._status)


class _Answer:
    """What the app returned."""

    def __init__(self, answer: Iterable[bytes], end: Callable[[], None]) -> None:
        self._answer = answer
        self._end = end

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._answer
        except Exception:
            self._end()
            raise

    def close(self) -> None:
        try:
            close = getattr(self._answer, "close", None)
            if close is not None:
                close()
        finally:
            self._end()


class _SizedAnswer(_Answer):
    """The same, in a known number of chunks."""

    def __len__(self) -> int:
        return len(self._answer)  # type: ignore[arg-type]  # only what has a length comes here


def give_back(environ: WSGIEnvironment, body: Body, *, is_whole: bool) -> None:
    """Let the app read the part of its body that was read already, and then the rest. All else stays unchanged."""
    environ["wsgi.input"] = body.stream() if is_whole else Rejoined(body.stream(), environ["wsgi.input"])


class Rejoined:
    """A body with a beginning that was read already."""

    def __init__(self, beginning: IO[bytes], rest: Any) -> None:
        """Read *beginning* first, and *rest* only when there is no more of it."""
        self._beginning = beginning
        self._rest = rest

    def read(self, size: int | None = -1) -> bytes:
        """Read as a file does."""
        wanted = -1 if size is None else size
        first = self._beginning.read(wanted)
        if wanted < 0:
            return first + bytes(self._rest.read())
        return first if len(first) == wanted else first + bytes(self._rest.read(wanted - len(first)))

    def readline(self, size: int | None = -1) -> bytes:
        """Read up to the end of a line."""
        wanted = -1 if size is None else size
        first = self._beginning.readline(wanted)
        if first.endswith(b"\n") or len(first) == wanted:
            return first
        return first + bytes(self._rest.readline() if wanted < 0 else self._rest.readline(wanted - len(first)))

    def readlines(self, hint: int | None = -1) -> list[bytes]:
        """Read all lines, or as many as it takes to have *hint* bytes."""
        lines: list[bytes] = []
        size = 0
        while line := self.readline():
            lines.append(line)
            size += len(line)
            if hint is not None and 0 < hint <= size:
                break
        return lines

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the lines."""
        return iter(self.readline, b"")

"""Bodies of requests and responses: where they wait, how much of them is held back, how they are framed."""

from __future__ import annotations

import io
import math
import mmap
import tempfile
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import IO

from semel.core.fingerprint import Buffer
from semel.core.message import Answer, Headers
from semel.core.replay import is_endless, may_be_endless
from semel.core.value import value
from semel.operation import Operation, enter

#: A body larger than this waits on disk: a hundred uploads at once must not fill the memory.
SPILL_BYTES = 256 * 1024
CHUNK_BYTES = 64 * 1024

#: RFC 9110: these have no body, and say nothing of its length.
BODILESS = frozenset({204, 304})


class Body:
    """A body: in memory while it is small, on disk when it is not."""

    def __init__(self, spill: int = SPILL_BYTES) -> None:
        """Start empty, and move to disk at more than *spill* bytes."""
        self._spill = spill
        self._parts: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """Append *chunk*."""
        self.size += len(chunk)
        if self._file is None:
            self._parts.append(chunk)
            if self.size > self._spill:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this call; close() ends it
                self._file.write(b"".join(self._parts))
                self._parts = []
        else:
            self._file.write(chunk)

    def buffer(self) -> Buffer:
        """Return the whole body as bytes, or as a map of the file it is in."""
        if self._file is None:
            self._parts = [b"".join(self._parts)] if len(self._parts) != 1 else self._parts
            return self._parts[0]
        if self._map is None:
            self._file.flush()
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def stream(self) -> IO[bytes]:
        """Return the whole body as a file, at its beginning."""
        if self._file is None:
            return io.BytesIO(self.buffer())
        self._file.seek(0)
        return self._file

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Iterate over the body in pieces, each with whether more follow. An empty body is one empty piece."""
        whole = self.buffer()
        if isinstance(whole, bytes):
            yield whole, False
            return
        for start in range(0, self.size, CHUNK_BYTES):
            yield bytes(whole[start : start + CHUNK_BYTES]), start + CHUNK_BYTES < self.size

    def close(self) -> None:
        """Let go of the file."""
        if self._map is not None:
            self._map.close()
        if self._file is not None:
            self._file.close()


@value
class Limits:
    """How much of a response is held back, and for how long, before it is sent as it comes."""

    #: In bytes.
    size: int
    #: None: however long it takes.
    time: timedelta | None
    operation: Operation

    def end(self) -> float:
        """Return when the time is over that begins now, by the monotonic clock."""
        return math.inf if self.time is None else time.monotonic() + self.time.total_seconds()

    def is_late(self, end: float) -> bool:
        """Whether that time is over."""
        # What takes steps while it answers may take more of them: it is not done, and can't be said to be.
        return time.monotonic() > end and not self.operation.story.is_used


def flows_at_once(headers: Headers, operation: Operation, max_time: timedelta | None) -> bool:
    """Whether these headers begin a response that is sent as it comes, from its first byte."""
    # What takes steps may take more of them while it answers, and without a limit of time no client waits for the
    # first byte: then it is only not waited for what never ends.
    is_waited_for = operation.story.is_used or max_time is None
    return is_endless(headers) if is_waited_for else may_be_endless(headers)


def inside(operation: Operation, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Iterate over *chunks*, each of which is made as part of *operation*. In between, this thread is the server's."""
    with enter(operation):
        remaining = iter(chunks)
    while True:
        with enter(operation):
            try:
                chunk = next(remaining)
            except StopIteration:
                return
        yield chunk


def framed(answer: Answer) -> Headers:
    """Return the headers of an answer of ours, with the length that belongs to its body."""
    if answer.status in BODILESS:
        return answer.headers
    return (*answer.headers, (b"content-length", b"%d" % len(answer.body or b"")))


def bodiless(answer: Answer) -> Answer:
    """Return what a HEAD request gets of an answer of ours: all but its body, the length of it included."""
    return Answer(answer.status, framed(answer), b"")

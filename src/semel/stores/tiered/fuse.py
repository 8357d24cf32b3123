"""Whether a cache is asked at all, for any number of threads; and the two lines that people are told of it. When it is
left alone, ``breaker.py`` says.
"""

from __future__ import annotations

import logging
import threading

from semel.errors import StoreError
from semel.stores.tiered.breaker import Closed, Failure, Leave, Open, State, asked, failed, succeeded
from semel.stores.tiered.expiry import now

_logger = logging.getLogger("semel")


class Fuse:
    """A breaker that is shared."""

    def __init__(self, where: str, *, opened: str, closed: str) -> None:
        """Say *opened* of *where* when it is left alone, with the reason, and *closed* when it is not any more."""
        self._where = where
        self._opened = opened
        self._closed = closed
        self.start_afresh()

    def start_afresh(self) -> None:
        """Know of no failure."""
        self._mutex = threading.Lock()
        self._state: State = Closed()

    @property
    def is_closed(self) -> bool:
        """Whether the cache is asked."""
        return isinstance(self._state, Closed)

    def asked(self) -> Leave:
        """Say what may be done now."""
        if self._state == _WELL:
            return Leave.ASK
        with self._mutex:
            self._state, leave = asked(self._state, now())
        return leave

    def succeeded(self) -> None:
        """Note that the cache has answered."""
        if self._state == _WELL:
            return
        with self._mutex:
            before, self._state = self._state, succeeded(self._state)
            is_back = not isinstance(before, Closed) and isinstance(self._state, Closed)
        if is_back:
            _logger.warning("%s %s", self._where, self._closed)

    def failed(self, failure: Failure, reason: object) -> None:
        """Note that the cache has failed."""
        with self._mutex:
            before, self._state = self._state, failed(self._state, failure, now())
            is_new = isinstance(before, Closed) and isinstance(self._state, Open)
        if is_new:
            _logger.warning("%s %s: %s", self._where, self._opened, reason)


_WELL = Closed()


def reading(where: str) -> Fuse:
    """Return the fuse of a cache that may be away."""
    return Fuse(
        f"The cache {where}",
        opened="is left alone for now, and the durable store answers",
        closed="is there again.",
    )


def writing(where: str) -> Fuse:
    """Return the fuse of a cache that may refuse answers: it is full, or does not know who we are."""
    return Fuse(f"The cache {where}", opened="takes no answers for now", closed="takes answers again.")


def failure_of(error: BaseException) -> Failure:
    """Say how the cache has failed."""
    causes = error, error.__cause__
    return Failure.TIME_OUT if any(isinstance(each, TimeoutError) for each in causes) else Failure.ERROR


def note_written(refused: StoreError | None, reading: Fuse, writing: Fuse) -> None:
    """Note what came of a write: *refused* is why the server would not have an answer, or why it could not be asked."""
    if refused is None:
        writing.succeeded()
    elif refused.__cause__ is None:
        # It has answered, so it can be read from.
        writing.failed(Failure.ERROR, refused)
    else:
        reading.failed(failure_of(refused), refused)

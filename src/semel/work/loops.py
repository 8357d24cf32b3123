"""An event loop in a thread of its own, for a service that runs in another thread and uses clients that need a loop.
It runs what it is given, and nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from semel.stores.forks import start_afresh_in_children

T = TypeVar("T")


class LoopThread:
    """A loop that is started on first use. The thread does not keep the process alive."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        """Start nothing yet."""
        self.start_afresh()
        start_afresh_in_children(self)

    def start(self, running: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run it."""
        with self._mutex:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="semel-loop", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(running, self._loop)

    def is_done(self, running: Future[Any], seconds: float) -> bool:
        """Wait so long at most; return whether it has ended, in whatever way."""
        try:
            running.exception(seconds)
        except NotYet:
            return running.done()  # What runs may itself have ended by a time-out.
        return True

    def close(self) -> None:
        """Stop the loop; the thread ends."""
        with self._mutex:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def start_afresh(self) -> None:
        """Have no loop: in a forked child, its thread does not exist."""
        self._mutex = threading.Lock()
        self._loop = None

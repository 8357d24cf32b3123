"""How long report mode waits for a store: no longer than the answer to a request may be held up by it.

A command that takes longer is left to itself: what comes of it is of no account to its request, which counts as failed.
Those left behind are bounded in number, and end when the store's own time limits end them.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from semel.errors import StoreUnavailable
from semel.stores.forks import start_afresh_in_children
from semel.stores.step import Step

T = TypeVar("T")
#: Called, in whatever thread, when a store that was too slow has answered after all.
OnLate = Callable[[], None]

#: What a store may add to one request in report mode, which is to change nothing: some ten times what its commands take
#: where all is well, and less than people or timeouts notice.
PATIENCE_SECONDS = 0.05

#: How many commands are under way at once in a process, late ones included: more than a store that is well ever has,
#: and few enough to be nothing in threads.
MAX_UNDER_WAY = 16

#: How long a thread waits for the next command before it ends.
IDLE_SECONDS = 10.0

_LATE = f"The store did not answer within {PATIENCE_SECONDS * 1000:.0f} ms."
_TOO_MANY = "The store was not asked: too many requests wait for its answer already."


class Patience:
    """What is left of the time that a store may take for one request."""

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._left = PATIENCE_SECONDS

    def left(self) -> float:
        """Return what is left, in seconds."""
        return self._left

    def spend(self, since: float) -> None:
        """Note that a command has taken from *since* until now."""
        self._left = max(0.0, self._left - (time.monotonic() - since))


class _Call:
    """One command, asked for by one thread and carried out by another."""

    def __init__(self, ask: Callable[[], Any], on_late: OnLate) -> None:
        self._ask = ask
        self._on_late = on_late
        self._is_done = threading.Event()
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.is_late = False

    def carry_out(self) -> None:
        try:
            self.outcome = self._ask()
        except BaseException as error:  # noqa: BLE001 - it is the asking thread's
            self.error = error
        self._is_done.set()
        if self.is_late and self.error is None:
            self._on_late()

    def wait(self, seconds: float) -> bool:
        return self._is_done.wait(seconds)


class Lookups:
    """Threads that ask a store for requests which do not wait for long."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have no thread, and nothing under way."""
        self._mutex = threading.Lock()
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._under_way = self._threads = 0

    def perform(self, ask: Callable[[], T], patience: Patience, on_late: OnLate) -> T:
        """Have *ask* called; raise ``StoreUnavailable`` where it takes too long, and call *on_late* if it succeeds."""
        call, begun = _Call(ask, on_late), time.monotonic()
        self._start(call)
        is_done = call.wait(patience.left())
        patience.spend(begun)
        if not is_done:
            call.is_late = True
            raise StoreUnavailable(_LATE, was_sent=True)
        if call.error is not None:
            raise call.error
        outcome: T = call.outcome
        return outcome

    def _start(self, call: _Call) -> None:
        with self._mutex:
            if self._under_way >= MAX_UNDER_WAY:
                raise StoreUnavailable(_TOO_MANY)
            self._under_way += 1
            if self._threads >= self._under_way:
                self._queue.put(call)
                return
            self._threads += 1
        threading.Thread(target=self._work, args=(call, self._queue), name="semel-report", daemon=True).start()

    def _work(self, call: _Call | None, calls: queue.SimpleQueue[_Call]) -> None:
        while call is not None:
            call.carry_out()
            with self._mutex:
                self._under_way -= 1
            call = self._next(calls)

    def _next(self, calls: queue.SimpleQueue[_Call]) -> _Call | None:
        try:
            return calls.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._mutex:
                # One may have come in between, and counts on a thread.
                if calls.empty():
                    self._threads -= 1
                    return None
            return calls.get()


class AsyncLookups:
    """Commands on event loops that their requests do not wait for for long."""

    def __init__(self) -> None:
        """Nothing is under way."""
        self._under_way: set[asyncio.Future[Any]] = set()

    def perform(self, ask: Callable[[], Step[T]], patience: Patience, on_late: OnLate) -> Step[T]:
        """Return what *ask* starts, as a step that fails where it takes too long; call *on_late* if it succeeds."""
        loop = asyncio.get_running_loop()
        if len(self._under_way) >= MAX_UNDER_WAY:
            # Those of a loop that has ended will not say so any more.
            self._under_way = {each for each in self._under_way if not each.get_loop().is_closed()}
        if len(self._under_way) >= MAX_UNDER_WAY:
            raise StoreUnavailable(_TOO_MANY)
        begun, asked = time.monotonic(), ask()
        if asked.done():
            return asked
        step: Step[T] = Step(loop=loop)
        timer = loop.call_later(patience.left(), step.settle, StoreUnavailable(_LATE, was_sent=True))
        self._under_way.add(asked)

        def answered(done: asyncio.Future[T]) -> None:
            self._under_way.discard(done)
            patience.spend(begun)
            is_late = loop.time() >= timer.when()
            timer.cancel()
            if done.cancelled():
                step.abandon()
                return
            if is_late and done.exception() is None:
                on_late()
            step.settle(done.exception() or done.result())  # type: ignore[arg-type]  # an exception of a store's

        asked.add_done_callback(answered)
        return step

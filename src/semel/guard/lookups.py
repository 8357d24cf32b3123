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

#: How many commands of a process may be late at once: a store that is well has hardly any, and so few are nothing in
#: threads. Those in time are not counted: each has a request that waits for it, and a crowd is no failure.
MAX_LATE = 16

#: How long a thread waits for the next command before it ends.
IDLE_SECONDS = 10.0

_LATE = f"The store did not answer within {PATIENCE_SECONDS * 1000:.0f} ms."
_TOO_MANY = "The store was not asked: it owes too many answers already."


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
        self._done = threading.Event()
        self.on_late = on_late
        self.outcome: Any = None
        self.error: BaseException | None = None
        self.is_late = False

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def carry_out(self) -> None:
        try:
            self.outcome = self._ask()
        except BaseException as error:  # noqa: BLE001 - it is the asking thread's
            self.error = error
        self._done.set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)


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
        self._under_way = self._threads = self._late = 0

    def perform(self, ask: Callable[[], T], patience: Patience, on_late: OnLate) -> T:
        """Have *ask* called; raise ``StoreUnavailable`` where it takes too long, and call *on_late* if it succeeds."""
        call, begun = _Call(ask, on_late), time.monotonic()
        self._start(call)
        call.wait(patience.left())
        patience.spend(begun)
        with self._mutex:
            call.is_late = not call.is_done
            self._late += call.is_late
        if call.is_late:
            raise StoreUnavailable(_LATE, was_sent=True)
        if call.error is not None:
            raise call.error
        outcome: T = call.outcome
        return outcome

    def _start(self, call: _Call) -> None:
        with self._mutex:
            if self._late >= MAX_LATE:
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
                self._late -= call.is_late
            if call.is_late and call.error is None:
                call.on_late()
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
        self._late: set[asyncio.Future[Any]] = set()

    def perform(self, ask: Callable[[], Step[T]], patience: Patience, on_late: OnLate) -> Step[T]:
        """Return what *ask* starts, as a step that fails where it takes too long; call *on_late* if it succeeds."""
        loop = asyncio.get_running_loop()
        if len(self._late) >= MAX_LATE:
            # Those of a loop that has ended will not say so any more.
            self._late = {each for each in self._late if not each.get_loop().is_closed()}
        if len(self._late) >= MAX_LATE:
            raise StoreUnavailable(_TOO_MANY)
        begun, asked = time.monotonic(), ask()
        if asked.done():
            return asked
        step: Step[T] = Step(loop=loop)

        def leave() -> None:
            self._late.add(asked)
            step.settle(StoreUnavailable(_LATE, was_sent=True))

        timer = loop.call_later(patience.left(), leave)

        def answered(done: asyncio.Future[T]) -> None:
            is_late = done in self._late
            self._late.discard(done)
            patience.spend(begun)
            timer.cancel()
            if done.cancelled():
                step.abandon()
                return
            if is_late and done.exception() is None:
                on_late()
            step.settle(done.exception() or done.result())  # type: ignore[arg-type]  # an exception of a store's

        asked.add_done_callback(answered)
        return step

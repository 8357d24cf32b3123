"""A process that dies at one place: its work is dropped there, and nothing after it is done. No real process is ended.

Everything that Semel does for a request is a port call of a flow, one after the other, so these are the places: before
and after each call. An open transaction is rolled back, as a database does when its client has gone.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from semel.core.commands import Claim, Complete, Park, Release, Save, TakeOver
from semel.guard import running

#: What each port call does, in words; for calls of the store, what their command does.
_WORDS: dict[object, str] = {
    "begin": "beginning the transaction and locking the key",
    "call_inside": "calling the function of the phase {step}",
    "call_outside": "calling the effect {step}",
    "commit": "committing the phase {step}",
    "finish": "committing the transaction with the answer",
    "open": "opening the transaction of the phase {step}",
    "pause": "pausing",
    "principal": "asking for the user of the request",
    "read_body": "reading the body",
    "run_handler": "running the handler",
    "run_unguarded": "running the handler",
    "undo": "rolling back",
    "verify": "asking for the outcome of the effect {step}",
    "wait": "waiting for another request",
    Claim: "claiming the key",
    Complete: "storing the answer",
    Park: "parking the operation",
    Release: "freeing the key",
    Save: "recording the effect {step}",
    TakeOver: "taking the key over",
}
_TO_THE_STORE = frozenset({"ask", "claim", "take_over"})
_OPENS = frozenset({"begin", "open"})


class Died(BaseException):
    """The process is dead. No handler catches this, and every later port call raises it again."""


class Process:
    """A process that serves one request, and dies at one place of it."""

    def __init__(self, dies_at: int | None) -> None:
        """Die at that place, counted from 0; None: do not die."""
        self._left = dies_at
        #: Where it died, in words; None: it has not.
        self.died_at: str | None = None
        #: The longest lease that it asked for.
        self.lease = timedelta(0)

    def reach(self, when: str, words: str) -> None:
        """Pass a place alive, or die there."""
        if self.died_at is None and self._left == 0:
            self.died_at = f"{when} {words}"
        if self.died_at is not None:
            raise Died(self.died_at)
        if self._left is not None:
            self._left -= 1


#: The process that this code runs in, if it may die.
_process: ContextVar[Process | None] = ContextVar("semel.testing.process", default=None)
_one_at_a_time = threading.Lock()


@contextmanager
def serving(process: Process) -> Iterator[None]:
    """Run the block, and the tasks and threads that it starts, as *process*."""
    token = _process.set(process)
    try:
        yield
    finally:
        _process.reset(token)


@contextmanager
def mortal() -> Iterator[None]:
    """Make processes mortal inside the block."""
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("Another crash_everywhere is under way in this process.")
    before, running.in_front = running.in_front, _in_front
    try:
        with warnings.catch_warnings():
            # For a real process, the operating system would close these.
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            gc.collect()
    finally:
        running.in_front = before
        _one_at_a_time.release()


def _in_front(ports: Any) -> Any:
    process = _process.get()
    return ports if process is None else _MortalPorts(ports, process)


class _MortalPorts:
    """Ports of a process that may die before each call, and after it."""

    def __init__(self, ports: Any, process: Process) -> None:
        self._ports = ports
        self._process = process
        self._has_opened = False

    def __getattr__(self, name: str) -> Any:
        port = getattr(self._ports, name)
        return self._mortal(name, port) if name in _TO_THE_STORE or name in _WORDS else port

    def _mortal(self, name: str, port: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            words = self._words(name, args)
            try:
                self._process.reach("before", words)
                try:
                    answer = await port(*args)
                except Exception:
                    self._process.reach("after", words)
                    raise
                self._has_opened = self._has_opened or name in _OPENS
                self._process.reach("after", words)
            except Died:
                if self._has_opened:
                    with suppress(Exception):
                        await self._ports.undo()
                raise
            return answer

        return call

    def _words(self, name: str, args: tuple[Any, ...]) -> str:
        what: object = name
        if name in _TO_THE_STORE:
            what = type(args[0])
        lease = getattr(getattr(args[0], "claim", args[0]), "lease", None) if args else None
        if isinstance(lease, timedelta):
            self._process.lease = max(self._process.lease, lease)
        words = _WORDS.get(what) or str(getattr(what, "__name__", name))
        call = getattr(self._ports, "call", None)
        return words.format(step=repr(call.name) if call is not None else "")

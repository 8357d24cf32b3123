"""Threads of the system in a process that gevent has patched. There ``threading.Thread`` is a greenlet, which has no
turn while another one computes, or waits in code that gevent does not know. Nothing here knows of stores.

What is shared with such a thread must be the system's own, too: a lock, and a bell. A connection is not shared, since
gevent ties a socket to the thread that opened it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from semel.errors import ConfigurationError

#: As it was when Semel was imported. What gevent replaces later is a mixture that waits for ever.
LOCK = threading.Lock

_LATE = (
    "The threads of this process were replaced by greenlets after Semel was imported, so a guarded request would wait "
    "for ever. Write `from gevent import monkey; monkey.patch_all()` as the first line of gunicorn's configuration "
    "file, or of the program; or do without --preload."
)
_EVENTLET = (
    "eventlet has replaced the threads of this process, and Semel can't renew a lease beside its greenlets. Use "
    "gunicorn's gthread or gevent workers."
)


def check() -> None:
    """Raise if leases could not be renewed in this process."""
    eventlet: Any = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise ConfigurationError(_EVENTLET)
    # Another lock alone proves nothing: profilers replace it, too.
    if are_used() and LOCK is _original("threading", "Lock"):
        raise ConfigurationError(_LATE)


def are_used() -> bool:
    """Whether threads of this process are greenlets of gevent's."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def lock() -> Any:
    """Return a lock of the system's. What holds it must not wait for anything else."""
    return _original("_thread", "allocate_lock")() if are_used() else threading.Lock()


def condition(mutex: Any) -> Any:
    """Return what one thread waits for, and others notify; all of them hold *mutex*."""
    return _Bell(mutex) if are_used() else threading.Condition(mutex)


def start_thread(target: Callable[[Any], None], name: str) -> Any:
    """Start a daemon thread of the system, and return it. *target* is called with the thread itself."""
    thread: Any
    if are_used():
        thread = _Thread()
        _original("_thread", "start_new_thread")(thread.run, (target,))
    else:
        thread = threading.Thread(target=lambda: target(thread), name=name, daemon=True)
        thread.start()
    return thread


class _Thread:
    """A thread that gevent knows nothing of."""

    def __init__(self) -> None:
        self._ended = lock()
        self._ended.acquire()

    def run(self, target: Callable[[Any], None]) -> None:
        try:
            target(self)
        finally:
            # What waited here, for a connection's sake, had an event loop.
            gevent: Any = sys.modules["gevent"]
            gevent.get_hub().destroy(destroy_loop=True)
            self._ended.release()

    def join(self, seconds: float) -> None:
        if self._ended.acquire(timeout=seconds):
            self._ended.release()


class _Bell:
    """A condition of one waiter. It may wake it once too often."""

    def __init__(self, mutex: Any) -> None:
        self._mutex = mutex
        self._rung = _original("queue", "SimpleQueue")()
        self._empty = _original("queue", "Empty")

    def wait(self, seconds: float) -> bool:
        self._mutex.release()
        try:
            self._rung.get(timeout=max(seconds, 0.0))
        except self._empty:
            return False
        finally:
            self._mutex.acquire()
        return True

    def notify(self) -> None:
        self._rung.put(None)


def _original(module: str, name: str) -> Any:
    monkey: Any = sys.modules["gevent.monkey"]
    return monkey.get_original(module, name)

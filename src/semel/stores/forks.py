"""Which objects must start afresh in a forked child: their threads and connections are the parent's; and when there may
be no fork. It does not fork.

Checking the process id at each use works for one thread only; two threads that find it changed would both start afresh.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - it has a lock for forks, which must not come to be during one
import os
import threading
from contextlib import ContextDecorator
from typing import Protocol
from weakref import WeakSet


class StartsAfresh(Protocol):
    """An object that is useless in a forked child."""

    def start_afresh(self) -> None:
        """Drop everything that belongs to the parent, without using it."""


class ClosesForForks(Protocol):
    """An object that must have nothing open during a fork."""

    def before_fork(self) -> None:
        """Close it, and let no thread open it."""

    def after_fork_in_parent(self) -> None:
        """Let threads open it."""

    def after_fork_in_child(self) -> None:
        """The same, where the threads are gone."""


_all: WeakSet[StartsAfresh] = WeakSet()
_closing: WeakSet[ClosesForForks] = WeakSet()

#: Objects of the parent. They must not even be garbage collected, since that would close them.
_parents: list[object] = []


def start_afresh_in_children(each: StartsAfresh) -> None:
    """Make *each* start afresh in every child that is forked from now on."""
    _all.add(each)


def close_for_forks(each: ClosesForForks) -> None:
    """Tell *each* of every fork from now on."""
    _closing.add(each)


def leave_alone(each: object) -> None:
    """Keep *each*, which belongs to the parent, unused. A connection that is closed here stays open in the parent, but
    the kernel would no longer report its events to the parent's event loop.
    """
    _parents.append(each)


class _Importing(ContextDecorator):
    """Around what imports a module at its first use: until that is done, no thread forks. Python keeps the lock of a
    module that is being imported, and the child, which lacks the thread that imports, would wait for it for ever.
    """

    def __init__(self) -> None:
        # One thread may be in it twice: a store behind a cache is opened by the cache.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


importing = _Importing()


# One of each for all: what is registered while a fork waits for an import would come too late for that fork.
def _before_fork() -> None:
    importing.__enter__()
    for each in tuple(_closing):
        each.before_fork()


def _after_fork_in_parent() -> None:
    for each in tuple(_closing):
        each.after_fork_in_parent()
    importing.__exit__()


def _after_fork_in_child() -> None:
    for afresh in tuple(_all):
        afresh.start_afresh()
    for each in tuple(_closing):
        each.after_fork_in_child()
    importing.__exit__()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

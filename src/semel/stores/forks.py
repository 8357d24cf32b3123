"""Which objects must start afresh in a forked child: their threads and connections are the parent's. It does not fork.

Checking the process id at each use works for one thread only; two threads that find it changed would both start afresh.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class StartsAfresh(Protocol):
    """An object that is useless in a forked child."""

    def start_afresh(self) -> None:
        """Drop everything that belongs to the parent, without using it."""


_all: WeakSet[StartsAfresh] = WeakSet()

#: Objects of the parent. They must not even be garbage collected, since that would close them.
_parents: list[object] = []


def start_afresh_in_children(each: StartsAfresh) -> None:
    """Make *each* start afresh in every child that is forked from now on."""
    _all.add(each)


def leave_alone(each: object) -> None:
    """Keep *each*, which belongs to the parent, unused. A connection that is closed here stays open in the parent, but
    the kernel would no longer report its events to the parent's event loop.
    """
    _parents.append(each)


def _after_fork() -> None:
    for each in tuple(_all):
        each.start_afresh()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)

"""Who must start afresh in a forked child: threads and connections are the parent's there, and locks may be nobody's.

Asking for the process id at each use would do for one thread; two that find it changed would start over each other.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class StartsAfresh(Protocol):
    """Something that a fork leaves useless in the child."""

    def start_afresh(self) -> None:
        """Forget everything that is the parent's, and touch none of it."""


_all: WeakSet[StartsAfresh] = WeakSet()

#: What is the parent's. Even to collect it would be to touch it.
_parents: list[object] = []


def start_afresh_in_children(each: StartsAfresh) -> None:
    """Have *each* start afresh in every child forked from now on."""
    _all.add(each)


def leave_alone(each: object) -> None:
    """Never touch *each*, which is the parent's. A connection that is closed here is not closed there, but the kernel
    would not tell the parent's event loop of it any more.
    """
    _parents.append(each)


def _after_fork() -> None:
    for each in tuple(_all):
        each.start_afresh()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)

"""Processor time by the kernel's own clocks: of our processes, of PostgreSQL's, of everything else on the machine; and
which cores they may use. It knows nothing of requests. On other systems than Linux there are no such figures.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

IS_KNOWN = sys.platform == "linux"
#: Tells a server which core is its own.
CORE = "SEMEL_BENCH_CORE"
#: With less than one other core, there is nothing to share out.
MIN_CORES = 2

_PROC = Path("/proc")
#: In a process's own clock (clock_getcpuclockid): all that its threads have run for, by the scheduler.
_SCHEDULED = 2
#: Of /proc/stat: user, nice, system. Interrupts are left out: they fall upon any process.
_BUSY = slice(1, 4)
_STOLEN = 8

Seconds = Mapping[int, float]


def spent(pid: int) -> float:
    """How many seconds a process has run for, all its threads together."""
    return time.clock_gettime((~pid << 3) | _SCHEDULED)


def between(before: Seconds, after: Seconds) -> float:
    """How many seconds went by for all that are there at the end, those that came meanwhile included."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


@dataclass(frozen=True, slots=True)
class Postgres:
    """What a PostgreSQL server has spent so far, process by process."""

    #: Those that serve connections; those that write, and the first, which only waits.
    backends: Seconds
    writers: Seconds

    @classmethod
    def of(cls, postmaster: int, user: str) -> Self:
        """Look at the children of *postmaster*: one that serves a connection says so with the name of its *user*."""
        backends: dict[int, float] = {}
        writers = {postmaster: spent(postmaster)}
        mark = f"postgres: {user} ".encode()
        for child in _children().get(postmaster, ()):
            with suppress(OSError):
                title = (_PROC / str(child) / "cmdline").read_bytes()
                (backends if title.startswith(mark) else writers)[child] = spent(child)
        return cls(backends, writers)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine has done so far, and what of that were we."""

    at: float
    busy: float
    stolen: float
    ours: Seconds
    ended: float

    @classmethod
    def now(cls) -> Self:
        """Look."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(
            at=time.monotonic(),
            busy=sum(int(field) for field in fields[_BUSY]) / tick,
            stolen=int(fields[_STOLEN]) / tick,
            ours=dict(family(os.getpid())),
            ended=used.ru_utime + used.ru_stime,
        )

    def others_since(self, before: Self) -> float:
        """How many cores processes that are not ours have had since, what the host took from this machine included."""
        ours = between(before.ours, self.ours) + self.ended - before.ended
        taken = self.busy - before.busy - ours + self.stolen - before.stolen
        return max(0.0, taken / (self.at - before.at))


@contextmanager
def cores_shared(*, wanted: bool) -> Iterator[bool]:
    """Keep one core for the web servers; all else that this process starts has the others. Say whether it is so."""
    cores = sorted(os.sched_getaffinity(0)) if IS_KNOWN else []
    if not wanted or len(cores) < MIN_CORES:
        yield False
        return
    os.sched_setaffinity(0, cores[1:])
    os.environ[CORE] = str(cores[0])
    try:
        yield True
    finally:
        del os.environ[CORE]
        os.sched_setaffinity(0, cores)


def take_own_core() -> None:
    """Use the core that is kept for servers, if one is. Threads that begin later do so too."""
    if core := os.environ.get(CORE):
        os.sched_setaffinity(0, {int(core)})


def family(pid: int) -> Iterator[tuple[int, float]]:
    """Say what a process and all that it has started have run for, one by one."""
    children = _children()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        with suppress(OSError):
            yield one, spent(one)
        waiting += children.get(one, ())


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                # After the name, which may have blanks and brackets of its own: state, parent.
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    return children

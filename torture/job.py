"""A child's job, and how it ended: plain values that pass between processes as JSON. It runs nothing."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: By which entry point requests come in.
Entry = Literal["wsgi", "asgi"]
#: ``pay``: send requests. ``insist``: send each until its answer is final. ``sweep``, ``reap``: one run of the service.
#: ``work``: run what was accepted, until there is nothing left to run. ``relay``, ``consume``: what ``messaging`` does.
Action = Literal["pay", "insist", "sweep", "reap", "work", "relay", "consume"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal that a child sends to itself: at its n-th executed line of Semel, or at a named point of the handler."""

    signal: int = signal.SIGKILL
    line: int = 0
    point: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One child's work. Its fields are everything that distinguishes it from another: seeds and clocks included."""

    #: The database of the effects table; and the store, unless the job names another.
    url: str
    #: The provider's port.
    provider: int
    #: The file of the histories.
    history: str = ""
    #: The store, where it is not that database.
    store: str = ""
    #: A Redis in front of the store.
    cache: str = ""
    #: Where messages are sent to and consumed from: a Redis, or a folder.
    broker: str = ""
    #: The destination of messages. Without: each order is a destination of its own.
    to: str = ""
    #: Whether ``relay`` and ``consume`` go on until they are killed.
    is_endless: bool = False
    action: Action = "pay"
    #: (form, key) of each payment, one after another.
    payments: tuple[tuple[str, str], ...] = ()
    entry: Entry = "wsgi"
    fault: Fault | None = None
    #: Whether executed lines are counted, and reported as ``Ended.lines``.
    counts_lines: bool = False
    #: The files in which lines count; Semel's own if there are none.
    only_files: tuple[str, ...] = ()
    #: Whether the entry point takes requests that are accepted, to be run by a worker.
    accepts: bool = False
    lease_seconds: float = 30.0
    #: What a plain handler's policy says about a crash.
    on_crash: Literal["rerun", "refuse"] = "refuse"
    #: A bug to plant: a name in ``planted.BUGS``, or "none" for the same detour without a bug.
    planted: str = ""
    #: From a child's first answer on its store is away for so long (with something planted): it holds the answer.
    away_seconds: float = 0.0
    #: How far the child's own clock is off.
    clock_seconds: float = 0.0
    #: A child that takes longer ends with SIGALRM, and the run with an error.
    patience_seconds: int = 60

    def as_json(self) -> str:
        """Write it on one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read it back."""
        read = json.loads(text)
        read["payments"] = tuple((form, key) for form, key in read["payments"])
        read["only_files"] = tuple(read["only_files"])
        read["fault"] = read["fault"] and Fault(**read["fault"])
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended, or stopped."""

    pid: int
    #: What it died of; None when it lives or ended by itself.
    killed_by: int | None = None
    #: What it was stopped by; it can be continued.
    stopped_by: int | None = None
    exit_code: int | None = None
    #: What it reported: ``lines``, ``report``.
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.killed_by == signal.SIGKILL

    @property
    def is_stopped(self) -> bool:
        """Whether it waits for SIGCONT."""
        return self.stopped_by is not None

"""When a cache that fails is left alone, and when it is tried again: a small state machine. It does no I/O and reads no
clock.

A cache that is away must cost nothing. After a few failures in a row, or one time-out, nobody asks it any more; after a
pause one probe is sent, for which nobody waits; and with each that fails the pause doubles.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

#: A connection may be lost by chance, and so may the next one while the server starts again.
MOST_FAILURES = 3
#: Seconds. Redis is started again within a second or so.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
#: Seconds after which a probe that nobody has heard of again is given up: its thread or its loop has ended.
PROBE_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class Closed:
    """The cache is asked."""

    #: In a row.
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """The cache is left alone."""

    until: float
    pause: float


@dataclass(frozen=True, slots=True)
class HalfOpen:
    """One probe is under way."""

    until: float
    pause: float


State = Closed | Open | HalfOpen


class Leave(Enum):
    """What whoever wants something of the cache may do."""

    ASK = "ask"
    PROBE = "probe"  #: see, without waiting for it, whether it is there again; ask nothing
    DO_WITHOUT = "do without"


class Failure(Enum):
    """How a cache can fail."""

    ERROR = "error"
    TIME_OUT = "time-out"  #: it may hang, and each who asks it would wait as long


def asked(state: State, now: float) -> tuple[State, Leave]:
    """Return what may be done at the moment *now*."""
    match state:
        case Closed():
            return state, Leave.ASK
        case Open(until, pause) | HalfOpen(until, pause):
            if now < until:
                return state, Leave.DO_WITHOUT
            return HalfOpen(now + PROBE_LIMIT, pause), Leave.PROBE
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def succeeded(state: State) -> State:
    """Return the state after the cache has answered."""
    match state:
        case Closed() | HalfOpen():
            return Closed()
        case Open():
            # The last answer before the silence.
            return state
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)


def failed(state: State, failure: Failure, now: float) -> State:
    """Return the state after the cache has failed at the moment *now*."""
    match state:
        case Closed(failures):
            if failure is Failure.ERROR and failures + 1 < MOST_FAILURES:
                return Closed(failures + 1)
            return Open(now + FIRST_PAUSE, FIRST_PAUSE)
        case Open():
            # Others were under way when it was left alone: that is no news.
            return state
        case HalfOpen(_, pause):
            longer = min(2 * pause, LONGEST_PAUSE)
            return Open(now + longer, longer)
        case never:  # pragma: no cover - mypy proves that nothing is left
            assert_never(never)

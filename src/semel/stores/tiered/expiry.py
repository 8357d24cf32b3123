"""Until when an answer may be kept: never longer than its record is, whatever was on its way for how long. It asks
nobody but this machine how much time has passed.

The database says how long a record has left, by its own clock, at some moment after it was asked and before it has
answered. Counted from when it was asked, that ends too early or in time.
"""

from __future__ import annotations

import math
import time
from typing import Any

from semel.core.value import value

#: Two clocks that are kept right by NTP may run apart by so much: each is slewed by at most 500 in a million.
DRIFT = 1 / 1000

#: Counts on while the machine sleeps, where there is such a clock: a laptop, or a virtual machine that was paused.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def now() -> float:
    """Return the seconds that have passed, since whenever."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def deadline(asked_at: float, left: float) -> float:
    """Return until when something may be kept that had *left* seconds when it was asked for, or later."""
    return asked_at + left * (1 - DRIFT)


@value
class RedisClock:
    """What a Redis server said that the time is, and when it had said so.

    It is told the expiry of an answer as a time of its own clock: a command that is carried out late, by a server that
    hung, must not keep the answer for that much longer.
    """

    #: Milliseconds since 1970, as the server counts them.
    time: int
    heard_at: float

    @classmethod
    def read(cls, reply: Any, heard_at: float) -> RedisClock:
        """Read the reply to TIME: seconds and microseconds."""
        seconds, microseconds = reply
        return cls(int(seconds) * 1000 + int(microseconds) // 1000, heard_at)

    def at(self, deadline: float) -> int:
        """Return the time that the server shows at *deadline*, or an earlier one: it is further by now than it said."""
        return self.time + math.floor((deadline - self.heard_at) * 1000)

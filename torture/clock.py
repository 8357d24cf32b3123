"""Sets this process's own clock off, as Python code reads it. The database's clock and the monotonic one stay."""

from __future__ import annotations

import datetime as dt
import sys
import time
from types import ModuleType
from typing import Any, Self

#: The names under which modules hold what is replaced.
_READERS = ("time", "time_ns", "datetime")


def set_off(seconds: float) -> None:
    """Let this process's clock be *seconds* ahead for good; behind, where negative. For a child that ends soon."""
    true_time, true_time_ns, true_datetime = time.time, time.time_ns, dt.datetime

    class Shifted(true_datetime):  # type: ignore[misc, valid-type]  # mypy wants a class that it can see
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            now: Self = cls.fromtimestamp(true_time() + seconds, tz)
            return now

        @classmethod
        def utcnow(cls) -> Self:
            now: Self = cls.fromtimestamp(true_time() + seconds, dt.UTC).replace(tzinfo=None)
            return now

    replaced: dict[Any, Any] = {
        true_time: lambda: true_time() + seconds,
        true_time_ns: lambda: true_time_ns() + int(seconds * 1_000_000_000),
        true_datetime: Shifted,
    }
    time.time, time.time_ns = replaced[true_time], replaced[true_time_ns]
    dt.datetime = Shifted  # type: ignore[misc]
    # Modules that imported the names themselves still have the original functions.
    for module in [each for name, each in tuple(sys.modules.items()) if name.partition(".")[0] == "semel"]:
        _replace(module, replaced)


def _replace(module: ModuleType, replaced: dict[Any, Any]) -> None:
    for name in _READERS:
        held = vars(module).get(name)
        if not isinstance(held, ModuleType) and held is not None and held in replaced:
            setattr(module, name, replaced[held])

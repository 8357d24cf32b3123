"""Durations as people type them: ``90d``, ``10s``. How they are printed is the command line's affair."""

from __future__ import annotations

import re
from datetime import timedelta

from semel.errors import ConfigurationError

_SPELLED = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}


def duration(text: str) -> timedelta:
    """Return what *text* says, which must be longer than nothing."""
    match = _SPELLED.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise ConfigurationError(f"{text!r} is not a duration. Write it as 10s, 15m, 12h or 90d.")
    return int(match[1]) * _UNITS[match[2]]

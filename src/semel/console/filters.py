"""What a list of operations is filtered by, in the query of its URL. It reads no record.

Whatever is typed is kept, so that it can be corrected; what can't be read is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from datetime import timedelta
from urllib.parse import urlencode

from semel.core.commands import Filter
from semel.core.key import SHORT_LENGTH
from semel.core.state import State
from semel.core.text import as_typed
from semel.core.value import value

#: Records that a page walks past: milliseconds. Each further look takes four times as many.
SCAN = 5000
MAX_SCAN = 4**4 * SCAN
FURTHER = 4
LIMIT = 50

STUCK = "stuck"
STATES = ("pending", "processing", STUCK, "unknown", "complete", "failed")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AGE = re.compile(r"([<>]?)\s*([0-9]{1,6})\s*([smhd])")
_STATUS = re.compile(r"([1-9])xx|([1-9][0-9]{2})")
_DIGEST = re.compile(rf"[0-9a-f]{{{SHORT_LENGTH},64}}")

FIELDS = ("state", "scope", "endpoint", "key", "age", "status", "reason")


@value
class Asked:
    """A filter as it was typed, and as it was read."""

    typed: Mapping[str, str]
    wanted: Filter
    #: What could not be read.
    wrong: Mapping[str, str] = field(default_factory=dict)
    after: str | None = None
    scan: int = SCAN

    @property
    def is_filtered(self) -> bool:
        """Whether there is any filter."""
        return bool(self.typed)

    @property
    def may_be_digest(self) -> bool:
        """Whether the key may be the digest of one."""
        return _DIGEST.fullmatch(self.typed.get("key", "")) is not None

    def link(self, **changes: str | int | None) -> str:
        """Return the query of the same list with some *changes*; it begins at the newest record again."""
        fields = {name: self.typed.get(name) for name in FIELDS} | changes
        if "scan" not in changes and self.scan != SCAN:
            fields["scan"] = self.scan
        kept = {name: text for name, text in fields.items() if text not in {None, ""}}
        return f"?{urlencode(kept)}" if kept else "?"


def read(asked: Mapping[str, str]) -> Asked:
    """Read the query of a list."""
    typed = {name: asked[name].strip() for name in FIELDS if asked.get(name, "").strip()}
    wrong: dict[str, str] = {}
    state, is_stuck = _state(typed, wrong)
    newer, older = _age(typed, wrong)
    key = typed.get("key")
    wanted = Filter(
        scope=as_typed(typed["scope"]) if "scope" in typed else None,
        key=None if key is None else as_typed(key),
        state=state,
        is_stuck=is_stuck,
        endpoint=typed.get("endpoint"),
        newer_than=newer,
        older_than=older,
        status=_status(typed, wrong),
        reason=typed.get("reason"),
    )
    scan = asked.get("scan", "")
    walked = min(max(int(scan), SCAN), MAX_SCAN) if scan.isascii() and scan.isdigit() and len(scan) < 10 else SCAN  # noqa: PLR2004 - digits
    return Asked(typed, wanted, wrong, asked.get("after") or None, walked)


def _state(typed: Mapping[str, str], wrong: dict[str, str]) -> tuple[State | None, bool]:
    name = typed.get("state")
    if name is None:
        return None, False
    if name == STUCK:
        return None, True
    if name in STATES:
        return State(name), False
    wrong["state"] = f"There is no such state. States are {', '.join(STATES)}."
    return None, False


def _age(typed: Mapping[str, str], wrong: dict[str, str]) -> tuple[timedelta | None, timedelta | None]:
    """Read ``15m`` or ``<15m`` as newer than that, and ``>2h`` as older."""
    text = typed.get("age")
    if text is None:
        return None, None
    match = _AGE.fullmatch(text)
    if match is None:
        wrong["age"] = "Write an age as 15m (made within 15 minutes) or >2h (longer ago); units are s, m, h, d."
        return None, None
    age = timedelta(seconds=int(match[2]) * _UNITS[match[3]])
    return (None, age) if match[1] == ">" else (age, None)


def _status(typed: Mapping[str, str], wrong: dict[str, str]) -> tuple[int, int] | None:
    text = typed.get("status")
    if text is None:
        return None
    match = _STATUS.fullmatch(text.lower())
    if match is None:
        wrong["status"] = "Write a status as 409, or as 5xx."
        return None
    return (int(match[2]),) * 2 if match[2] else (int(match[1]) * 100, int(match[1]) * 100 + 99)

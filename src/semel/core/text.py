"""How values are written for people: durations, untrusted text, bytes. It reads and decides nothing.

Keys, scopes and bodies come from clients, and may hold anything.
"""

from __future__ import annotations

import re
import shlex
from datetime import timedelta

HEX_BYTES_PER_LINE = 16
MAX_BYTE = 0xFF

_UNITS = ((timedelta(days=1), "d"), (timedelta(hours=1), "h"), (timedelta(minutes=1), "m"), (timedelta(seconds=1), "s"))
#: Characters that can move a cursor or change what a terminal shows, break a line, or are not seen at all; and halves
#: of surrogate pairs: none can be sent.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff\ud800-\udfff]"
)
_ESCAPE = re.compile(r"\\\\|\\t|\\x[0-9a-f]{2}|\\u[0-9a-f]{4}")
_CONTROL_BUT_BREAKS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def brief(duration: timedelta) -> str:
    """Spell the length of *duration*, positive or negative, in its largest unit: ``23h``."""
    length = abs(duration)
    for unit, letter in _UNITS:
        if length >= unit:
            return f"{length // unit}{letter}"
    return "0s"


def relative(duration: timedelta) -> str:
    """Say when: ``in 23h``, ``4m ago``."""
    return f"in {brief(duration)}" if duration > timedelta(0) else f"{brief(duration)} ago"


def safe(text: str) -> str:
    """Return *text* escaped for a terminal, on one line."""
    return _CONTROL.sub(lambda match: " " if match[0] == "\t" else f"\\x{ord(match[0]):02x}", text)


def typed(text: str) -> str:
    """Escape *text* for a terminal, on one line, in the way that these commands' options read back."""
    return _CONTROL.sub(_escaped, text.replace("\\", "\\\\"))


def as_typed(text: str) -> str:
    """Read back what :func:`typed` has escaped. A backslash that begins no escape is a backslash."""
    return _ESCAPE.sub(lambda match: _plain(match[0][1:]), text)


def pasteable(text: str) -> str:
    """Quote *text* so that a copy of it works in any shell, as an argument of these commands."""
    shown = typed(text)
    # What begins with a dash would be taken for an option.
    return shlex.quote(f"\\x{ord('-'):02x}{shown[1:]}" if shown.startswith("-") else shown)


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if match[0] == "\t":
        return "\\t"
    return f"\\x{number:02x}" if number <= MAX_BYTE else f"\\u{number:04x}"


def _plain(escape: str) -> str:
    return {"t": "\t", "\\": "\\"}.get(escape) or chr(int(escape[1:], 16))


def as_text(body: bytes) -> str | None:
    """Return *body* as text, or None if it is not text or has characters that control a terminal."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _CONTROL_BUT_BREAKS.search(text) else text


def hex_dump(data: bytes) -> str:
    """Spell *data* as ``hexdump -C`` does."""
    starts = range(0, len(data), HEX_BYTES_PER_LINE)
    return "\n".join(_hex_line(start, data[start : start + HEX_BYTES_PER_LINE]) for start in starts)


def _hex_line(start: int, line: bytes) -> str:
    shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)  # noqa: PLR2004 - ASCII
    return f"{start:08x}  {line.hex(' '):<{3 * HEX_BYTES_PER_LINE - 1}}  |{shown}|"

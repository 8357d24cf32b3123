"""How pages are made: the templates, and how values are written in them. All is escaped; nothing is read here."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from semel.console import charts
from semel.core.key import SHORT_LENGTH, digest_of
from semel.core.place import written_place
from semel.core.text import brief, hex_dump, typed

#: Bytes of a body that are shown.
MAX_SHOWN = 64 * 1024
#: Characters of a key that stay on one line: more than a UUID has. A longer one may be broken every so many.
UNBROKEN, BREAK_EVERY = 40, 12
#: From here on, a count is written in millions.
MILLION = 1_000_000

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@lru_cache(maxsize=1)  # Templates are compiled once for all consoles of a process.
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("semel.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": ago,
        "bars": charts.bars,
        "body": body,
        "brief": brief,
        "clock": clock,
        "count": count,
        "digest": short_digest,
        "duration": lambda number: timedelta(seconds=number),
        "line": charts.line,
        "moment": moment,
        "name": operation_name,
        "percent": lambda fraction: f"{fraction:.0%}",
        "result": lambda result: body(json.dumps(result, ensure_ascii=False, indent=1).encode("utf-8", "replace")),
        "seen": typed,
        "seconds": seconds,
        "without_secrets": without_secrets,
        "wrapped": wrapped,
    }
    return environment


def render(template: str, **values: Any) -> str:
    """Return the text of a page."""
    return _environment().get_template(template).render(**values)


def operation_name(scope: str, key: str) -> str:
    """Return one word for an operation, for a path."""
    return written_place(0, scope, key)


def short_digest(key: str) -> str:
    """Return the digest of a key, as logs have it."""
    return digest_of(key)[:SHORT_LENGTH]


def moment(when: datetime) -> str:
    """Write a time in UTC, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def clock(when: datetime) -> str:
    """Write the time of day in UTC, to the millisecond."""
    return when.astimezone(UTC).strftime("%H:%M:%S.%f")[:-3]


def seconds(when: float) -> datetime:
    """Read a time that is counted in seconds since 1970."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=when)


def ago(when: datetime, now: datetime) -> str:
    """Say how long ago it was, or in how long it will be."""
    return f"{brief(now - when)} ago" if now >= when else f"in {brief(when - now)}"


def count(number: int | None, cap: int | None = None) -> str:
    """Write a count; at its cap there may be more."""
    if number is None:
        return "?"
    if cap is not None and number >= cap:
        return f"{cap:,}+"
    return f"{number / MILLION:.1f} M" if number >= MILLION else f"{number:,}"


def wrapped(text: str) -> Markup:
    """Write a key or a scope: what a terminal or a reader could be misled by is escaped; a long one may be broken."""
    shown = typed(text)
    if len(shown) <= UNBROKEN:
        return Markup("{}").format(shown)
    return Markup("<wbr>").join(shown[start : start + BREAK_EVERY] for start in range(0, len(shown), BREAK_EVERY))


def without_secrets(url: str) -> str:
    """Return a URL without its user, its query and its fragment: receivers are often told apart by a secret there."""
    rest, mark, _ = url.partition("#")
    rest, asks, _ = rest.partition("?")
    scheme, slashes, place = rest.partition("//")
    host, slash, path = place.partition("/")
    shown = f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"
    return f"{shown}?…" if asks or mark else shown


def body(data: bytes) -> str:
    """Write a body as text, if it is one, else as a hex dump. Characters that are not seen are escaped."""
    head = data[:MAX_SHOWN]
    try:
        text = head.decode() if len(data) <= MAX_SHOWN else head.decode("utf-8", "ignore")
        shown = _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    except UnicodeDecodeError:
        head = data[: MAX_SHOWN // 16]
        shown = hex_dump(head)
    return shown if len(head) == len(data) else f"{shown}\n… and {len(data) - len(head):,} bytes more"

"""What a client prefers, in its ``Prefer`` header (RFC 7240). Whether it is honoured is up to the policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

from semel.core.value import value

#: Longer than any useful wait; larger numbers are cut to this.
_LONGEST = timedelta(days=1)

# One preference: a token, perhaps with a value, perhaps with parameters, which are ignored.
# It begins at the header start or after a comma, and nothing is tried twice (+ after a quantifier). Any client may send
# this header, and a few kilobytes that do not match must not take longer to read than those that do.
_PREFERENCE = re.compile(
    rb"""(?<![^,])\s*+([!#$%&'*+.^_`|~0-9A-Za-z-]++)            # its name
         (?:\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^\s",;]*+))?+        # its value, quoted or not
         (?:\s*+;[^,"]*+(?:"(?:[^"\\]|\\.)*+"[^,"]*+)*+)?+      # its parameters
         \s*+(?:,|$)""",
    re.VERBOSE,
)


@value
class Preferences:
    """The preferences of one request that Semel knows."""

    #: ``wait``: how long the client is willing to wait for an answer.
    wait: timedelta | None = None
    #: ``respond-async``: it prefers a status URL to a wait.
    respond_async: bool = False


NONE = Preferences()


def preferences_of(headers: Sequence[tuple[bytes, bytes]]) -> Preferences:
    """Parse the preferences. What can't be parsed is ignored: by the RFC, a preference is never an error."""
    values: list[bytes] = []
    for name, line in headers:
        if name == b"prefer":
            values.append(line)
    if not values:
        return NONE
    told: dict[bytes, bytes] = {}
    for match in _PREFERENCE.finditer(b",".join(values)):
        # Of several of one name, the first counts.
        told.setdefault(match[1].lower(), (match[2] or b"").strip(b'"'))
    return Preferences(_seconds(told.get(b"wait")), b"respond-async" in told)


def _seconds(value: bytes | None) -> timedelta | None:
    if value is None or not value.isdigit():
        return None
    # The length is checked first: a number with a thousand digits is too large for a timedelta.
    return min(timedelta(seconds=int(value)), _LONGEST) if len(value) < 10 else _LONGEST  # noqa: PLR2004 - see above

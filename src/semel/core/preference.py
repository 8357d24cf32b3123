"""What a client would like, in its ``Prefer`` header (RFC 7240). Whether it gets that is for the policy to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

from semel.core.value import value

#: Longer than any policy lets anybody wait; larger numbers are this one.
_LONGEST = timedelta(days=1)

# One preference: a token, perhaps with a value, perhaps with parameters, which change nothing of what we know.
# It begins where the header does, or after a comma, and nothing is tried twice (+ after a quantifier): anybody may send
# this header, and a few kilobytes that fit nowhere must not take longer to read than those that do.
_PREFERENCE = re.compile(
    rb"""(?<![^,])\s*+([!#$%&'*+.^_`|~0-9A-Za-z-]++)            # its name
         (?:\s*+=\s*+("(?:[^"\\]|\\.)*+"|[^\s",;]*+))?+        # its value, quoted or not
         (?:\s*+;[^,"]*+(?:"(?:[^"\\]|\\.)*+"[^,"]*+)*+)?+      # its parameters
         \s*+(?:,|$)""",
    re.VERBOSE,
)


@value
class Preferences:
    """What one request prefers, as far as it is ours to give."""

    #: ``wait``: how long the client is willing to wait for an answer.
    wait: timedelta | None = None
    #: ``respond-async``: it would rather be told where to ask later.
    respond_async: bool = False


NONE = Preferences()


def preferences_of(headers: Sequence[tuple[bytes, bytes]]) -> Preferences:
    """Read what is preferred. What can't be read is not preferred: a preference is no order, and never an error."""
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
    # Compared as text first: a number of a thousand digits is no number for a timedelta.
    return min(timedelta(seconds=int(value)), _LONGEST) if len(value) < 10 else _LONGEST  # noqa: PLR2004 - see above

"""Places in a list of records, as one word for a URL. Only the store that has made one knows what its parts mean.

A place is a number and two texts: the age of a record and its name, or what a store has instead.
"""

from __future__ import annotations

import base64
import json

from semel.errors import ConfigurationError

Place = tuple[int, str, str]


def written_place(number: int, first: str = "", second: str = "") -> str:
    """Return a place as one word."""
    # Not as UTF-8: a key may have half of a surrogate pair.
    text = json.dumps((number, first, second), separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_place(word: str) -> Place:
    """Return the parts of a place; it comes from a URL, and may be anything."""
    try:
        parts = json.loads(base64.b64decode(word + "=" * (-len(word) % 4), b"-_", validate=True))
    except (ValueError, RecursionError):
        parts = None
    match parts:
        case [int(number), str(first), str(second)] if 0 <= number < 2**62:
            return number, first, second
    raise ConfigurationError("This place in the list can't be read. Begin at the newest record again.")

"""The name by which the end of an operation is announced between processes. It reveals neither scope nor key."""

from __future__ import annotations

import hashlib

from semel.core.canonical import pack

#: Sent in place of a name when an operation was accepted, and waits for a worker.
ACCEPTED = "accepted"

#: Enough that two keys never have the same name, and short enough for any channel's payload.
_BYTES = 16


def hint_of(scope: str, key: str) -> str:
    """Return the name of one key among all keys of all scopes."""
    parts = (scope.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(pack(parts)).hexdigest()[: 2 * _BYTES]

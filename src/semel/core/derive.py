"""Keys for calls to other services, derived from the client's key: the same on every retry. They reveal no key."""

from __future__ import annotations

import hmac
from uuid import UUID


def derive(scope: str, key: str, name: str) -> str:
    """Return the key of the call *name* that belongs to the operation (*scope*, *key*).

    If the client's own key were passed on, the keys of two tenants could collide at the provider. It is spelled
    as a UUID because some providers accept nothing else.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (scope, key, name)]
    # Each part follows its length, so that no two lists of parts give the same bytes. The key is among
    # them because HMAC pads its own key with zeros, so that two keys could be equal.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return str(UUID(bytes=hmac.digest(parts[1], message, "sha256")[:16], version=5))

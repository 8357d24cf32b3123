"""Keys for calls to others, derived from the client's: the same on every retry, and no use to anybody who sees one."""

from __future__ import annotations

import hmac
from uuid import UUID


def derive(scope: str, key: str, name: str) -> str:
    """Return the key of the call *name* that belongs to the operation (*scope*, *key*).

    Passing the client's own key on would let one tenant's choice of key meet another's at the provider. It is spelled
    as a UUID because some providers take nothing else.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (scope, key, name)]
    # Each part goes in with its length in front, so that no two lists of parts are the same bytes. The key is among
    # them because HMAC fills its own key up with zeros, and so makes one of two.
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return str(UUID(bytes=hmac.digest(parts[1], message, "sha256")[:16], version=5))

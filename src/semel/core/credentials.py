"""Which request headers look like credentials, by their names, and are not stored. A policy can change the list.

A stored request is run again for the principal that was stored with it, so it needs no credentials; and they are
worth more than the operation that they came with. Names are matched by patterns, since a list is soon out of date.
All other headers are stored: without one, the handler might do something else.
"""

from __future__ import annotations

import re

#: No policy can have these stored. Lower case.
NEVER_STORED = frozenset({"authorization", "cookie", "proxy-authorization"})

_LOOKS_SECRET = re.compile(
    r"""
    auth(?!ors?\b)                                       # x-auth-token, authentication-info; not x-author
  | token | secret | signature | credential | assertion | cookie | session
  | passw | passphrase | passcode | macaroon | pwd | bearer | hmac | jwt | oidc | saml | wsse | dpop | [cx]srf
  | keys?\d*\b                                         # x-api-key, x-masterkey, x-api-key2; not keep-alive
  | \b(sig|pin|otp|totp|tan|mfa|2fa)\b
    """,
    re.VERBOSE,
)
#: It ends in "key" and is not a secret: the idempotency key, under any vendor's name.
_IS_NONE = re.compile(r".*idempotency-?key")


def looks_secret(name: str) -> bool:
    """Return whether the header *name*, in lower case, is likely to hold a credential."""
    # In a regular expression an underscore is part of a word; in header names it separates words.
    words = name.replace("_", "-")
    return bool(_LOOKS_SECRET.search(words)) and not _IS_NONE.fullmatch(words)

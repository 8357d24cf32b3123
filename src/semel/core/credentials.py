"""Which headers of a request are not stored with it, going by their names. What is stored besides, a policy says.

A stored request is run again for the principal that was known at the time, so it needs no credentials; and they are
worth more than the operation that they came with. A list of names would know those of yesterday: there are patterns.
What else a handler may read is stored: run without it, the handler might do something else.
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
#: Ends as a secret does, and is none: the header that this is all about, under any vendor's name.
_IS_NONE = re.compile(r".*idempotency-?key")


def looks_secret(name: str) -> bool:
    """Tell whether the header *name*, in lower case, is likely to hold something that a client proves itself with."""
    # An underscore is part of a word to regular expressions, and not to those who name headers.
    words = name.replace("_", "-")
    return bool(_LOOKS_SECRET.search(words)) and not _IS_NONE.fullmatch(words)

"""The user of a proxied request: from a header, a verified or a whole token, or a cookie. Nothing is forwarded here.

A scope decides which stored answers a client can be given, so a client must not be able to choose that of another.
A header counts from trusted peers only (``headers.py`` refuses it from others). A token's claim counts when its
signature was verified here; otherwise the whole token is the scope, which only its owner can send. A cookie, and a
header that holds a credential, are hashed: the store must not hold what logs a user in.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

from semel.core.credentials import looks_secret
from semel.core.scope import MAX_PRINCIPAL_LENGTH, SINGLE_TENANT
from semel.errors import ConfigurationError, IdentityRefused, ScopeMissing, Unauthenticated
from semel.guard.request import RequestView
from semel.proxy.headers import NO_IDENTITY
from semel.proxy.published_keys import PublishedKeys
from semel.proxy.tokens import KeyNotKnown, TokenRefused, Verifier, check_recipient, claims_of

NamesUser = Callable[[RequestView], Any]

#: Their own processes: a sidecar and its neighbours.
TRUSTED = ("127.0.0.0/8", "::1/128")

SPELLINGS = "header:NAME, jwt:CLAIM, cookie:NAME or single"
UNVERIFIED = (
    "--scope jwt:%s without --jwt-key: signatures are not verified here, so the scope of a request is its claim and "
    "its whole token. A retry with a renewed token is then a new operation, and runs again. Give --jwt-key FILE."
)
NO_AUDIENCE = (
    "--jwt-key without --jwt-audience: tokens that name an audience (aud) are refused with 401, and all others are "
    "accepted, whichever application their provider made them for. Give --jwt-audience NAME."
)

#: What HTTP takes for white space around a value. Python takes more, bytes of letters in UTF-8 among it: two users
#: would become one.
_BLANK = " \t"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: An address of IPv6 as URLs have it.
_BRACKETED = re.compile(r"\A\[(.*)\]")
#: Control characters, and halves of characters, which JSON can spell and no store can hold.
_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Peers:
    """Which peers are trusted to name the user of a request, by network. A Unix socket has its file's permissions."""

    def __init__(self, networks: Iterable[str] = TRUSTED, *, is_unix: bool = False) -> None:
        """Trust *networks*, such as ``10.0.0.0/8``; all peers where the listener is a Unix socket."""
        self.is_unix = is_unix
        try:
            self._networks = tuple(ipaddress.ip_network(_BRACKETED.sub(r"\1", each), strict=False) for each in networks)
        except ValueError as error:
            raise ConfigurationError(f"trusted: {error}. Write networks as 10.0.0.0/8, or one address.") from None
        self.trusts = lru_cache(maxsize=1024)(self._trusts)

    def _trusts(self, address: str | None) -> bool:
        if self.is_unix or address is None:
            # A TCP connection that was reset has no address any more: that proves nothing.
            return self.is_unix
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if found.version == 6 and found.ipv4_mapped is not None:  # noqa: PLR2004 - of IP
            found = found.ipv4_mapped
        return any(found in network for network in self._networks)


class ByHeader:
    """The value of one header. ``HeaderRules`` has seen to it that there is one at most, from a trusted peer."""

    def __init__(self, name: str) -> None:
        """Read the header *name*."""
        self._name = name.lower()
        self._is_secret = looks_secret(self._name)

    @property
    def identity(self) -> bytes | None:
        """The header that only trusted peers may send; None: what it holds proves itself."""
        return None if self._is_secret else self._name.encode()

    def __call__(self, request: RequestView) -> str | None:
        """Name the user."""
        values = [each for name, each in request.raw["headers"] if name == self._name.encode()]
        if len(values) > 1:
            raise IdentityRefused("The header that names the user was sent more than once.")
        text = values[0].decode("latin-1").strip(_BLANK) if values else ""
        if not text:
            return None
        return _hashed(self._name, text) if self._is_secret else _bounded(text)


class ByCookie:
    """The hash of one cookie, such as that of a session."""

    def __init__(self, name: str) -> None:
        """Read the cookie *name*."""
        self._name = name

    def __call__(self, request: RequestView) -> str | None:
        """Name the user."""
        found = [
            each.strip(_BLANK)
            for name, line in request.raw["headers"]
            if name == b"cookie"
            for each in line.decode("latin-1").split(";")
        ]
        values = {text for name, equals, text in (each.partition("=") for each in found) if name == self._name}
        if len(values) > 1:
            raise IdentityRefused("The cookie that names the user was sent more than once.")
        text = values.pop() if values else ""
        return _hashed(self._name, text) if text else None


class ByToken:
    """A claim of the bearer token."""

    def __init__(
        self,
        claim: str,
        verifier: Verifier | PublishedKeys | None,
        audiences: Collection[str] = (),
        issuers: Collection[str] = (),
    ) -> None:
        """Read *claim* of a token that *verifier* has accepted; without one, the whole token is part of the scope.

        Of which issuer a token is need not be set: the issuer is part of the scope, too.
        """
        self._claim = claim
        self._verifier = verifier
        self._audiences = frozenset(audiences)
        self._issuers = tuple(issuers)

    def __call__(self, request: RequestView) -> Any:
        """Name the user."""
        lines = [each for name, each in request.raw["headers"] if name == b"authorization"]
        if len(lines) > 1:
            raise IdentityRefused("Authorization was sent more than once.")
        scheme, _, token = (lines[0].decode("latin-1") if lines else "").strip(_BLANK).partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated
        token = token.strip(_BLANK)
        try:
            return self._user(token)
        except KeyNotKnown as refused:
            if isinstance(self._verifier, PublishedKeys):
                return self._user_of_new_key(token, self._verifier)
            raise _not_accepted(refused) from None
        except TokenRefused as refused:
            raise _not_accepted(refused) from None

    async def _user_of_new_key(self, token: str, keys: PublishedKeys) -> str:
        """Name the user of *token*, which was signed with a key that was published since, or that is not ours."""
        await keys.renewed()
        try:
            return self._user(token)
        except TokenRefused as refused:
            raise _not_accepted(refused) from None

    def _user(self, token: str) -> str:
        if self._verifier is None:
            claims = claims_of(token)
        else:
            claims = self._verifier.verified(token)
            check_recipient(claims, self._audiences, self._issuers)
        claim, issuer = claims.get(self._claim), claims.get("iss")
        if not isinstance(claim, str | int) or isinstance(claim, bool) or claim == "":
            raise ScopeMissing(f"The bearer token has no claim {self._claim!r} that names a user.")
        names = [str(each) for each in (issuer, claim) if isinstance(each, str | int)]
        user = "/".join(each.replace("%", "%25").replace("/", "%2F") for each in names)
        if self._verifier is None:
            user = f"{user}/{hashlib.sha256(token.encode('latin-1')).hexdigest()}"
        return _bounded(user)


def _not_accepted(refused: TokenRefused) -> Unauthenticated:
    # RFC 6750: another token may be accepted, so a client renews its own.
    return Unauthenticated(f"The bearer token is not accepted: {refused}", challenge='Bearer error="invalid_token"')


def scope_of(
    spelled: str,
    verifier: Verifier | PublishedKeys | None = None,
    audiences: Collection[str] = (),
    issuers: Collection[str] = (),
) -> NamesUser:
    """Return what names the user, as it was *spelled* on the command line."""
    kind, colon, name = spelled.partition(":")
    if spelled == "single":
        made: NamesUser = SINGLE_TENANT
    elif not colon or kind not in {"header", "jwt", "cookie"} or not name:
        raise ConfigurationError(f"--scope can't be {spelled!r}: it is {SPELLINGS}.")
    elif kind == "jwt":
        return ByToken(name, verifier, audiences, issuers)
    elif not _NAME.fullmatch(name):
        raise ConfigurationError(f"--scope: {name!r} can't be the name of a {kind}.")
    elif kind == "header" and name.lower().encode() in NO_IDENTITY:
        raise ConfigurationError(f"--scope: the header {name} is of the connection, or of the proxy itself.")
    else:
        made = ByHeader(name) if kind == "header" else ByCookie(name)
    if verifier is not None:
        raise ConfigurationError("--jwt-key is for --scope jwt:CLAIM.")
    return made


def _bounded(text: str) -> str:
    """Return *text* as a principal. It comes from a client, so what does not fit is the client's mistake."""
    if _UNFIT.search(text):
        raise IdentityRefused("The name of the user has a control character in it, or half of a character.")
    return text if len(text) <= MAX_PRINCIPAL_LENGTH else _hashed("long", text)


def _hashed(what: str, text: str) -> str:
    return f"{what}:sha256:{hashlib.sha256(text.encode()).hexdigest()}"[-MAX_PRINCIPAL_LENGTH:]

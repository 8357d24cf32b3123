"""The settings of an encrypting store: one frozen value, given in place of a store, or a part of its URL. It opens
nothing, and reads no secret.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from semel.errors import ConfigurationError
from semel.stores.secrets import check_reference

#: The setting in a store's URL.
SETTING = "encrypt"


@dataclass(frozen=True, slots=True)
class Encrypted:
    """A store, and where the secrets are that it encrypts with."""

    #: A URL, a store, an engine, a pool or a ``Tiered``. It is not shown: a URL may hold a password.
    store: Any = field(repr=False)
    #: ``env:NAME`` or ``file:PATH``. The first secret there writes, and all of them read.
    secrets: str

    def __post_init__(self) -> None:
        """Check every field."""
        if self.store is None or isinstance(self.store, Encrypted):
            raise ConfigurationError('Which store? Write Encrypted("postgresql://user@host/db", "env:SEMEL_SECRETS").')
        check_reference(self.secrets)


def split(url: str) -> tuple[str, str | None]:
    """Return *url* without its ``encrypt=``, and what that says; None if it has none."""
    before, _, query = url.partition("?")
    pairs = query.split("&")
    ours = [pair for pair in pairs if pair.partition("=")[0] == SETTING]
    if not ours:
        if f"{SETTING}=" in url.lower():
            # Some drivers leave a fragment out, and a file may have any name: then nothing would be encrypted.
            raise ConfigurationError(
                f"{SETTING}= is not where a URL has its settings: write it after ? or &, as it is here."
            )
        return url, None
    if len(ours) > 1:
        raise ConfigurationError(f"The store's URL has {SETTING}= twice. Name one place, with every secret in it.")
    place = dict(parse_qsl(ours[0], keep_blank_values=True))[SETTING]
    check_reference(place)
    rest = "&".join(pair for pair in pairs if pair not in ours)
    return (f"{before}?{rest}" if rest else before), place


def plain(url: str) -> str:
    """Return *url* without its ``encrypt=``, for those who look at the store and not at what is kept in it."""
    return split(url)[0]

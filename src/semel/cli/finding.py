"""Which record a command is about. It changes none. If several scopes have the key, the operator has to choose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import typer

from semel.cli.output import as_typed, pasteable
from semel.core.commands import Browse, Look
from semel.core.key import SHORT_LENGTH
from semel.core.record import Record
from semel.errors import ConfigurationError, SemelError
from semel.stores import Store

#: How many scopes of one key are listed for the operator to choose from.
SCOPES_SHOWN = 20

KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="The key; or its digest, as a log shows it: 12 digits or more.")
]
ScopeOption = Annotated[
    str | None, typer.Option(help="The owner of the key, if several use the same, spelled as it is shown.")
]

_DIGEST = re.compile(rf"[0-9a-f]{{{SHORT_LENGTH},64}}")


class KeyNotFound(SemelError):
    """The store has no such key."""


def find(keys: Store, key: str, scope: str | None) -> Record | None:
    """Return the whole record of *key*; raise ``ConfigurationError`` if *scope* is needed to choose one."""
    found = next((records for records in map(keys.perform, _readings(key, scope)) if records), ())
    if len(found) > 1:
        raise ConfigurationError(_which(found))
    return keys.perform(Look(found[0].scope, found[0].key)) if found else None


def find_required(keys: Store, key: str, scope: str | None) -> Record:
    """Return the record of *key*, which must be there."""
    record = find(keys, key, scope)
    if record is None:
        raise KeyNotFound(missing(key, scope))
    return record


def missing(key: str, scope: str | None) -> str:
    """Return the message that *key* is not there."""
    said = f"The store has no key {pasteable(key)}" + (f" of {pasteable(scope)}." if scope else ".")
    return f"{said} It is not the digest of a key either." if _DIGEST.fullmatch(key) else said


def spellings(text: str) -> tuple[str, ...]:
    """Return *text* unescaped, as these commands print it, so that a copy of their output works; then as it is."""
    return tuple(dict.fromkeys((as_typed(text), text)))


def _readings(key: str, scope: str | None) -> Iterator[Browse]:
    """Everything that *key* may mean: a key first, and only then the digest of one."""
    scopes = (None,) if scope is None else spellings(scope)
    yield from (Browse(SCOPES_SHOWN, key=each, scope=owner) for each in spellings(key) for owner in scopes)
    if _DIGEST.fullmatch(key):
        yield from (Browse(SCOPES_SHOWN, digest=key, scope=owner) for owner in scopes)


def _which(found: tuple[Record, ...]) -> str:
    more = ", and perhaps others" if len(found) == SCOPES_SHOWN else ""
    if len({record.key for record in found}) > 1:
        keys = ", ".join(f"{pasteable(record.key)} of {pasteable(record.scope)}" for record in found)
        return f"Several keys have this digest. Name one: {keys}{more}."
    scopes = ", ".join(pasteable(record.scope) for record in found)
    return f"Several owners use this key. Name one with --scope: {scopes}{more}."

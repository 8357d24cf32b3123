"""Which record a command is about. A key alone may be several owners'; then a person has to choose."""

from __future__ import annotations

from typing import Annotated

import typer

from semel.cli.output import pasteable
from semel.core.commands import Browse, Look
from semel.core.record import Record
from semel.errors import ConfigurationError, SemelError
from semel.stores import Store

#: As many owners of one key as are listed before a person is asked to choose.
SCOPES_SHOWN = 20

KeyArgument = Annotated[str, typer.Argument(metavar="KEY")]
ScopeOption = Annotated[str | None, typer.Option(help="Whose key, where several owners use the same.")]


class KeyNotFound(SemelError):
    """The store has no such key."""


def find(keys: Store, key: str, scope: str | None) -> Record | None:
    """Return the record of *key*, whole; raise ``ConfigurationError`` where *scope* is needed to say which."""
    found = keys.perform(Browse(limit=SCOPES_SHOWN, key=key, scope=scope))
    if len(found) > 1:
        raise ConfigurationError(_which(found))
    return keys.perform(Look(found[0].scope, key)) if found else None


def find_required(keys: Store, key: str, scope: str | None) -> Record:
    """Return the record of *key*, which must be there."""
    record = find(keys, key, scope)
    if record is None:
        raise KeyNotFound(missing(key, scope))
    return record


def missing(key: str, scope: str | None) -> str:
    """Say that *key* is not there."""
    return f"The store has no key {pasteable(key)}" + (f" of {pasteable(scope)}." if scope else ".")


def _which(found: tuple[Record, ...]) -> str:
    scopes = ", ".join(pasteable(record.scope) for record in found)
    more = ", and perhaps others" if len(found) == SCOPES_SHOWN else ""
    return f"Several owners use this key. Say whose with --scope: {scopes}{more}."

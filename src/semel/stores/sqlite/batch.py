"""A batch of commands on one connection: what is there is read first, and the rest is written in one transaction.

Reads take no write lock. Of the writes, one that the table refuses fails alone, and its neighbours go on; trouble with
the file fails them all, and nothing of the transaction stays.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from semel.core.commands import (
    Browse,
    Claim,
    Command,
    Complete,
    Decree,
    Discard,
    FindStuck,
    Look,
    Mark,
    Note,
    Now,
    Park,
    ReadRequest,
    ReadTrail,
    Reap,
    ReapTrail,
    Release,
    Renew,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Unpark,
)
from semel.stores.lane import refused
from semel.stores.sqlite.keys import Item, Items, Keys
from semel.stores.sqlite.session import Session
from semel.stores.sqlite.statements import Statements, chunks
from semel.stores.sqlite.upkeep import Upkeep

#: The row's fault, not the file's: a constraint, or a value that SQLite can't hold.
_ROW_REFUSED = (
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    AttributeError,
    LookupError,
    OverflowError,
    TypeError,
    ValueError,
)

Table = dict[type[Command[Any]], Callable[[Any], Any]]


class Batch:
    """One batch, carried out once."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        statements: Statements,
        commands: Sequence[Command[Any]],
        actor: str | None = None,
    ) -> None:
        """Nothing happens yet. Without an *actor* there is no audit trail."""
        self.outcomes: list[Any] = [None] * len(commands)
        #: Whether the end of the transaction is under way: if that fails, it may have been carried out all the same.
        self.is_committing = False
        self._commands = commands
        #: The places of the commands that have no lasting outcome yet.
        self._open: Sequence[int] = range(len(commands))
        self._session = Session(connection, statements, actor)
        self._keys = keys = Keys(self._session, self.outcomes)
        upkeep = Upkeep(self._session)
        self._reads: Table = {
            Look: keys.look,
            Browse: keys.browse,
            Now: keys.now,
            FindStuck: upkeep.find_stuck,
            ReadRequest: upkeep.read_request,
            ReadTrail: upkeep.read_trail,
        }
        self._writes: Table = {
            TakeOver: keys.take_over,
            Save: keys.save,
            Mark: keys.mark,
            Park: keys.park,
            Release: keys.release,
            Renew: keys.renew,
            Sweep: upkeep.sweep,
            Discard: upkeep.discard,
            Unpark: upkeep.unpark,
            Decree: upkeep.decree,
            Reap: upkeep.reap,
            ReapTrail: upkeep.reap_trail,
            Note: upkeep.note,
            # A read, but under the write lock: no transaction that it is to wait for goes on once that is had.
            Settle: keys.settle,
        }

    def carry_out(self) -> None:
        """Fill in the outcomes."""
        kinds: defaultdict[type[Command[Any]], list[Item]] = defaultdict(list)
        for place, command in enumerate(self._commands):
            kinds[type(command)].append((place, command))
        self._each(kinds, self._reads)
        claims = kinds.get(Claim, [])
        self._in_bulk(self._keys.find, claims)
        # Claims come first: of a claim and a release of one caller, the claim was asked for first.
        claims = [item for item in claims if self.outcomes[item[0]] is None]
        writes = [*claims, *kinds.get(Complete, ()), *[item for kind in self._writes for item in kinds.get(kind, ())]]
        self._open = [place for place, _ in writes]
        if self._open:
            self._session.run("BEGIN IMMEDIATE")
            self._in_bulk(self._keys.claim, claims)
            self._in_bulk(self._keys.complete, kinds.get(Complete, []))
            self._each(kinds, self._writes)
            self._session.write_down()
            self.is_committing = True
            self._session.run("COMMIT")

    def fail(self, error: Exception) -> None:
        """Give *error* to everybody who has no lasting outcome."""
        for place in self._open:
            self.outcomes[place] = error

    def _in_bulk(self, carry_out: Callable[[Items], None], items: Items) -> None:
        for chunk in chunks(items):
            try:
                carry_out(chunk)
            except _ROW_REFUSED as error:
                if len(chunk) == 1:
                    self.outcomes[chunk[0][0]] = refused(error)
                else:
                    for item in chunk:
                        self._in_bulk(carry_out, [item])

    def _each(self, kinds: dict[type[Command[Any]], list[Item]], table: Table) -> None:
        for kind, carry_out in table.items():
            for place, command in kinds.get(kind, ()):
                try:
                    self.outcomes[place] = carry_out(command)
                except _ROW_REFUSED as error:
                    self.outcomes[place] = refused(error)

"""A batch of commands on one connection: what is there is read first, and the rest is written in one transaction.

Reads take no write lock. Of the writes, one that the table refuses fails alone, and its neighbours go on; trouble with
the file fails them all, and nothing of the transaction stays. Every cursor is read to its end: one that is not keeps
its statement running, and with it a transaction that others believe to be committed.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from semel.core.commands import (
    Again,
    Browse,
    Claim,
    Command,
    Complete,
    Look,
    Now,
    Release,
    Renew,
    TakeOver,
    Verdict,
)
from semel.core.record import Found, Hold, Record
from semel.stores.lane import refused
from semel.stores.sqlite import statements as by
from semel.stores.sqlite.statements import Bulk, Statements, chunks

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

#: A command, and its place in the batch.
Item = tuple[int, Any]
Items = Sequence[Item]


class Batch:
    """One batch, carried out once."""

    def __init__(
        self, connection: sqlite3.Connection, statements: Statements, commands: Sequence[Command[Any]]
    ) -> None:
        """Nothing happens yet."""
        self.outcomes: list[Any] = [None] * len(commands)
        #: Whether the end of the transaction is under way: if that fails, it may have been carried out all the same.
        self.is_committing = False
        self._connection = connection
        self._statements = statements
        self._commands = commands
        #: The places of the commands that have no lasting outcome yet.
        self._open: Sequence[int] = range(len(commands))

    def carry_out(self) -> None:
        """Fill in the outcomes."""
        kinds: defaultdict[type[Command[Any]], list[Item]] = defaultdict(list)
        for place, command in enumerate(self._commands):
            kinds[type(command)].append((place, command))
        self._each(kinds, {Look: self._look, Browse: self._browse, Now: self._now})
        claims = kinds.get(Claim, [])
        self._in_bulk(self._find, claims)
        # Claims come first: of a claim and a release of one caller, the claim was asked for first.
        claims = [item for item in claims if self.outcomes[item[0]] is None]
        self._open = [place for kind in _WRITES for place, _ in kinds.get(kind, ())]
        self._open += [place for place, _ in claims]
        if self._open:
            self._run("BEGIN IMMEDIATE")
            self._in_bulk(self._claim, claims)
            self._in_bulk(self._complete, kinds.get(Complete, []))
            self._each(kinds, {TakeOver: self._take_over, Release: self._release, Renew: self._renew})
            self.is_committing = True
            self._run("COMMIT")

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

    def _each(self, kinds: dict[type[Command[Any]], list[Item]], table: dict[Any, Callable[[Any], Any]]) -> None:
        for kind, carry_out in table.items():
            for place, command in kinds.get(kind, ()):
                try:
                    self.outcomes[place] = carry_out(command)
                except _ROW_REFUSED as error:
                    self.outcomes[place] = refused(error)

    def _find(self, items: Items) -> None:
        for place, found in self._found(items).items():
            self.outcomes[place] = found

    def _claim(self, items: Items) -> None:
        rows = [by.claim_row(claim) for _, claim in items]
        if self._write_all(self._statements.claim, rows):
            for place, claim in items:
                self.outcomes[place] = Hold(claim.scope, claim.key, 1, claim.token)
            return
        # Somebody was quicker: another process, or a claim to the same key in this very statement.
        found = self._found(items)
        for place, claim in items:
            there = found.get(place, Again.AGAIN)
            is_mine = isinstance(there, Found) and there.token == claim.token
            self.outcomes[place] = Hold(claim.scope, claim.key, 1, claim.token) if is_mine else there

    def _complete(self, items: Items) -> None:
        rows = [by.complete_row(command) for _, command in items]
        if self._write_all(self._statements.complete, rows):
            for place, _ in items:
                self.outcomes[place] = Verdict.DONE
            return
        found = self._found([(place, command.hold) for place, command in items])
        for place, command in items:
            is_done = by.is_answered(found.get(place), command.hold)
            self.outcomes[place] = Verdict.DONE if is_done else Verdict.FENCED

    def _take_over(self, command: TakeOver) -> Hold | Again:
        if not self._write(self._statements.take_over, by.take_over_row(command)):
            return Again.AGAIN
        claim = command.claim
        ((attempt,),) = self._run(self._statements.exists, (claim.scope, claim.key))
        return Hold(claim.scope, claim.key, attempt, claim.token)

    def _release(self, command: Release) -> Verdict:
        hold = command.hold
        mine = (hold.scope, hold.key, hold.token, hold.attempt)
        if self._write(self._statements.release, mine) or self._write(self._statements.give_up, mine):
            return Verdict.DONE
        return Verdict.FENCED if self._run(self._statements.exists, (hold.scope, hold.key)) else Verdict.DONE

    def _renew(self, command: Renew) -> frozenset[Hold]:
        lost = []
        for chunk in chunks(command.holds):
            rows = [by.renew_row(hold, lease) for hold, lease in chunk]
            if not self._write_all(self._statements.renew, rows):
                lost += [hold for (hold, _), row in zip(chunk, rows, strict=True) if not self._renew_one(row)]
        return frozenset(lost)

    def _renew_one(self, row: tuple[Any, ...]) -> bool:
        return self._write_all(self._statements.renew, [row])

    def _look(self, command: Look) -> Record | None:
        rows = self._run(self._statements.look, (command.scope, command.key))
        return by.read_record(rows[0]) if rows else None

    def _browse(self, command: Browse) -> tuple[Record, ...]:
        wanted = (command.key, command.scope, command.state, command.limit)
        return tuple(map(by.read_record, self._run(self._statements.browse, wanted)))

    def _now(self, _command: Now) -> datetime:
        return by.read_time(self._run(self._statements.now)[0][0])

    def _found(self, items: Items) -> dict[int, Found]:
        wanted = [value for place, each in items for value in (place, each.scope, each.key)]
        return {row[0]: by.read_found(row) for row in self._run(self._statements.find.of(len(items)), wanted)}

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        return self._connection.execute(sql, parameters).fetchall()

    def _write(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run it, and return how many rows it changed."""
        cursor = self._connection.execute(sql, parameters)
        cursor.fetchall()
        return cursor.rowcount

    def _write_all(self, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Run it for all *rows*, and return whether each of them changed one."""
        return self._write(bulk.of(len(rows)), [value for row in rows for value in row]) == len(rows)


_WRITES = (Complete, TakeOver, Release, Renew)

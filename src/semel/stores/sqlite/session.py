"""One connection in the middle of a batch: statements run on it, and lines for the audit trail gather meanwhile.

Every cursor is read to its end: one that is not keeps its statement running, and with it a transaction that others
believe to be committed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from semel.stores.sqlite.statements import Bulk, Statements, chunks

#: Scope, key, attempt, event and detail of a line of the audit trail.
Line = tuple[str, str, int, str, str | None]


class Session:
    """What the commands of one batch share."""

    def __init__(self, connection: sqlite3.Connection, statements: Statements, actor: str | None) -> None:
        """Without an *actor* there is no trail."""
        self.statements = statements
        self._connection = connection
        self._actor = actor
        self._lines: list[Line] = []

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run it, and return its rows."""
        return self._connection.execute(sql, parameters).fetchall()

    def run_all(self, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run it for all *rows*, a power of two of them, and return what came back."""
        return self.run(bulk.of(len(rows)), [value for row in rows for value in row])

    def write_all(self, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Run it for all *rows*, and return whether each of them changed one."""
        cursor = self._connection.execute(bulk.of(len(rows)), [value for row in rows for value in row])
        cursor.fetchall()
        return cursor.rowcount == len(rows)

    def count(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run it, and return how many rows it changed."""
        cursor = self._connection.execute(sql, parameters)
        cursor.fetchall()
        return cursor.rowcount

    def note(self, scope: str, key: str, attempt: int, event: str, detail: str | None = None) -> None:
        """Remember a line for the trail."""
        self._lines.append((scope, key, attempt, event, detail))

    def write_down(self) -> None:
        """Write what was noted, for the whole batch in as few statements as for one command of each kind."""
        noted, self._lines = self._lines, []
        if self._actor is not None:
            for lines in chunks(noted):
                values = [value for line in lines for value in line]
                self.run(self.statements.write_down.of(len(lines)), [*values, self._actor])

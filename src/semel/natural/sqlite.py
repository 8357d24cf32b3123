"""Natural keys on a connection of ``sqlite3``. The statements are in ``text.py``."""

from __future__ import annotations

import sqlite3
from typing import Any

from semel.errors import ConfigurationError
from semel.natural.asked import Asked
from semel.natural.flow import Rows, run
from semel.natural.flow import insert_or_get as flow
from semel.natural.got import Got
from semel.natural.text import Query, SQLiteText, as_dict, plain

_RETURNING_SINCE = (3, 35)


def insert_or_get(connection: sqlite3.Connection, into: object, asked: Asked) -> Got[dict[str, Any]]:
    """Insert the row, or get the stored one."""
    check_version()

    def perform(query: Query) -> Rows:
        cursor = connection.cursor()
        cursor.row_factory = None
        cursor.execute(query.sql, query.parameters)
        # To the end: a RETURNING that is not read to its end keeps the statement and the write lock.
        rows = cursor.fetchall()
        return Rows(tuple(name for name, *_ in cursor.description), rows)

    return run(flow(SQLiteText(asked, plain(asked, into), _mark, as_dict)), perform)


def _mark(_: int) -> str:
    return "?"  # Numbered ones count as names, and sqlite3 will refuse them with a sequence of values.


def check_version() -> None:
    """Refuse a SQLite version without RETURNING."""
    if sqlite3.sqlite_version_info < _RETURNING_SINCE:
        raise ConfigurationError(
            f"Natural keys need SQLite 3.35 or newer, and this is {sqlite3.sqlite_version}: it has no RETURNING."
        )

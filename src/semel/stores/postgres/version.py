"""Whether the tables are of a version that this code can serve on. It asks once, and remembers nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from semel.stores.migration import book_of, lacking
from semel.stores.postgres.builder import PACKAGE
from semel.stores.statement import Joined, Names, Query, Statement, load_migrations

_logger = logging.getLogger("semel")


def tells_version(names: Names) -> Statement[bool]:
    """Ask whether the role may read which migrations the store has. A server logs a statement that is refused."""
    sql = f"SELECT has_table_privilege(to_regclass('{book_of(names)}'), 'SELECT')"
    return Statement(sql, [], lambda rows: rows[0][0] is True)


def check_version(names: Names, where: str) -> Statement[None]:
    """Raise where the tables are too new for this code; where they are older than it, and it can serve, log it."""

    def read(rows: Sequence[Sequence[Any]]) -> None:
        known = [name for name, _ in load_migrations(PACKAGE, names)]
        if missing := lacking([name for (name,) in rows], known, where):
            _logger.warning(
                "%s lacks %s. What needs it is refused until you run: semel migrate", where, ", ".join(missing)
            )

    return Statement(f"SELECT name FROM {book_of(names)}", [], read)  # noqa: S608 - see Names


def version_questions(names: Names, where: str) -> Iterator[Joined[Any]]:
    """Ask and check the same in a transaction of the application's, before its handler runs."""
    told: list[bool] = []
    tells, check = tells_version(names), check_version(names, where)
    yield Joined(Query(tells.sql), {}, lambda rows: told.append(tells.read(rows)))
    if told[-1]:
        yield Joined(Query(check.sql), {}, check.read)

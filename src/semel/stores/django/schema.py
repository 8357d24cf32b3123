"""The tables, made by Django's ``migrate`` from the same ``.sql`` files as by ``semel migrate``. Both note what they
applied in the same table: the second one finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from semel.stores.django.wrapper import Wrapper, name_of
from semel.stores.migration import Book
from semel.stores.postgres.encoding import check_encoding
from semel.stores.postgres.pooler import is_direct
from semel.stores.sqlite import file
from semel.stores.statement import DEFAULT_TABLE, DEFAULT_WATERMARK, Names, load_migrations

#: Where the files of each database are.
PACKAGES = {"postgresql": "semel.stores.postgres", "sqlite": "semel.stores.sqlite"}

#: The table of applied migrations, by Django or by ``semel migrate``.
BOOK = f"{DEFAULT_TABLE}_migrations"

_WRITE_DOWN = {
    "postgresql": f"INSERT INTO {BOOK} (name) VALUES ('%s')",  # noqa: S608 - constants, and names of our own files
    "sqlite": f"INSERT INTO {BOOK} (name, applied_at) SELECT '%s', now FROM {DEFAULT_TABLE}_clock",  # noqa: S608 - as above
}


def applied(wrapper: Wrapper) -> list[str]:
    """Return which migrations this database has, in order."""
    with wrapper.cursor() as cursor:
        if BOOK not in wrapper.introspection.table_names(cursor):
            return []
        cursor.execute(f"SELECT name FROM {BOOK} ORDER BY name")  # noqa: S608 - a constant
        return sorted(Book.of(name for (name,) in cursor.fetchall()).names)


def apply(editor: Any, name: str) -> None:
    """Apply one migration with Django's schema editor, unless it was applied before, or is for another database.

    In a migration of Django's with ``atomic = False``, each statement on PostgreSQL is a transaction of its own, as
    with ``semel migrate``, and an index may be made CONCURRENTLY. In any other, all of it is one.
    """
    wrapper = editor.connection
    scripts = dict(_scripts(wrapper.vendor))
    if name not in scripts:
        return
    if wrapper.vendor == "postgresql" and not editor.collect_sql:
        from semel.stores.postgres.migrating import Migrator  # noqa: PLC0415 - it needs psycopg, as this database does

        migrator = Migrator(_Session(wrapper), Names(), name_of(wrapper))
        if wrapper.in_atomic_block:
            migrator.run_within(name)
        else:
            migrator.run(only=name)
        return
    if not editor.collect_sql and name in applied(wrapper):
        return
    if wrapper.vendor == "postgresql" and name == _scripts(wrapper.vendor)[0][0]:
        from semel.stores.postgres.migrating import BOOK as MADE_BY  # noqa: PLC0415 - as above

        editor.execute(MADE_BY.format(BOOK), params=None)
    for statement in _statements(wrapper.vendor, scripts[name]):
        editor.execute(statement, params=None)
    editor.execute(_WRITE_DOWN[wrapper.vendor] % name, params=None)


def revert(editor: Any, name: str) -> None:
    """Go back to before one migration, with empty tables: there is no way to convert the records back."""
    vendor = editor.connection.vendor
    if vendor == "sqlite":
        editor.execute(f"DROP VIEW IF EXISTS {DEFAULT_TABLE}_clock", params=None)
    for table in (*sorted(Names().tables), Names().answers):
        editor.execute(f"DROP TABLE IF EXISTS {table}", params=None)
    if not editor.collect_sql:
        for earlier, _ in _scripts(vendor):
            if earlier < name:
                apply(editor, earlier)


def clear(wrapper: Wrapper) -> None:
    """Delete every record and the whole audit trail, if there are any. For tests."""
    if wrapper.vendor in PACKAGES and len(applied(wrapper)) == len(_scripts(wrapper.vendor)):
        with wrapper.cursor() as cursor:
            for table in sorted(Names().tables - {BOOK, DEFAULT_WATERMARK}):
                cursor.execute(f"DELETE FROM {table}")  # noqa: S608 - constants


def _scripts(vendor: str) -> list[tuple[str, str]]:
    return load_migrations(PACKAGES[vendor], Names())


def _statements(vendor: str, script: str) -> Iterator[str]:
    if vendor == "postgresql":
        yield script  # It accepts several statements in one text.
    else:
        yield from file._statements(script)  # noqa: SLF001 - a store of the same house


class _Session:
    """Django's own connection, as what runs migrations uses it."""

    def __init__(self, wrapper: Wrapper) -> None:
        wrapper.ensure_connection()
        self._wrapper = wrapper
        check_encoding(wrapper.connection, name_of(wrapper))
        self.is_direct = is_direct(wrapper.connection)

    def run(self, sql: str) -> list[Any]:
        with self._wrapper.cursor() as cursor:
            cursor.execute(sql)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def another(self) -> Iterator[_Session]:
        copy = self._wrapper.copy()
        try:
            yield _Session(copy)
        finally:
            copy.close()

    def sqlstate(self, error: Exception) -> str | None:
        found: str | None = getattr(error.__cause__, "sqlstate", None)
        return found

"""The tables, made by Django's ``migrate`` from the same ``.sql`` files as by ``semel migrate``. Both note what they
applied in the same table: the second one finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.stores.django.wrapper import Wrapper
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
        return [name for (name,) in cursor.fetchall()]


def apply(editor: Any, name: str) -> None:
    """Apply one migration with Django's schema editor, unless it was applied before, or is for another database."""
    wrapper = editor.connection
    scripts = dict(_scripts(wrapper.vendor))
    if name not in scripts:
        return
    if not editor.collect_sql:
        _wait_for_others(wrapper)
        done = applied(wrapper)
        if name in done:
            return
        if wrapper.vendor == "postgresql" and not done:
            _make_book(editor)
    elif wrapper.vendor == "postgresql" and name == _scripts(wrapper.vendor)[0][0]:
        _make_book(editor)
    for statement in _statements(wrapper.vendor, scripts[name]):
        editor.execute(statement, params=None)
    editor.execute(_WRITE_DOWN[wrapper.vendor] % name, params=None)


def revert(editor: Any, name: str) -> None:
    """Go back to before one migration, with empty tables: there is no way to convert the records back."""
    vendor = editor.connection.vendor
    if vendor == "sqlite":
        editor.execute(f"DROP VIEW IF EXISTS {DEFAULT_TABLE}_clock", params=None)
    for table in sorted(Names().tables):
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


def _wait_for_others(wrapper: Wrapper) -> None:
    if wrapper.vendor == "postgresql":
        from semel.stores.postgres.store import MIGRATION_LOCK  # noqa: PLC0415 - it needs psycopg, as this database does

        with wrapper.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])


def _make_book(editor: Any) -> None:
    from semel.stores.postgres.store import _BOOK  # noqa: PLC0415 - as above

    editor.execute(_BOOK.format(BOOK), params=None)

"""A store for one test: empty at its beginning, and deleted at its end. It starts no server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urlsplit
from uuid import uuid4

from semel import stores
from semel.errors import ConfigurationError
from semel.stores.statement import FUNCTIONS

_POSTGRES = ("postgres", "postgresql")


@contextmanager
def fresh_store(where: str, folder: Path) -> Iterator[str]:
    """Return the URL of a new store: ``sqlite`` is a file in *folder*; on a server it is a table, or a prefix, that no
    other test has.
    """
    where = stores.without_driver(where)
    scheme = urlsplit(where).scheme or where
    mark = f"semel_test_{uuid4().hex[:12]}"
    if scheme == "sqlite":
        yield f"sqlite:///{folder / 'semel.db'}"
    elif scheme in _POSTGRES:
        url = _with(where, table=mark)
        with closing(stores.shared_store(url)) as store:
            store.migrate()
            try:
                yield url
            finally:
                # The apps of the test share it, and may have been left open.
                store.close()
                _drop(store)
    elif scheme.startswith("redis"):
        url = _with(where, prefix=mark)
        store = stores.shared_store(url)
        try:
            yield url
        finally:
            # The apps of the test share it, and may have been left open: its counts would come after the deletion.
            store.close()
            clock: Any = import_module("semel.testing.clock")
            clock.forget_redis(url, f"{mark}:*")
    else:
        raise ConfigurationError(
            f"semel_store must be sqlite, or the URL of PostgreSQL or Redis, not {scheme!r}: each store in memory has "
            "its own records. Give an app in memory a MemoryStore()."
        )


def _with(url: str, **ours: str) -> str:
    parts = urlsplit(url)
    # What is not ours stays as it was written, and so do the slashes where there is no host: clients differ in what
    # they read.
    theirs = [pair for pair in parts.query.split("&") if pair and unquote(pair.partition("=")[0]) not in ours]
    return f"{url.partition('?')[0]}?{'&'.join([*theirs, urlencode(ours)])}"


def _drop(store: Any) -> None:
    """Drop the tables, also if they are not empty."""
    names = store.address.names
    psycopg: Any = import_module("psycopg")
    with psycopg.connect(store.address.url, autocommit=True) as connection:
        prefix = f"{names.schema}." if names.schema else ""
        for table in (*sorted(names.tables), names.answers):
            connection.execute(f"DROP TABLE IF EXISTS {prefix}{table} CASCADE")
        for function in FUNCTIONS:
            connection.execute(f"DROP FUNCTION IF EXISTS {names.put_into(function)}")

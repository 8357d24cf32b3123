"""Empty PostgreSQL databases, lent to one test after another. It starts no server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
from psycopg import sql

# As initdb leaves it: no schema but an empty "public", which belongs to whom the database belongs to.
EMPTY = b"""
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
    LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', name);
    END LOOP;
    CREATE SCHEMA public AUTHORIZATION pg_database_owner;
    GRANT USAGE ON SCHEMA public TO PUBLIC;
END $$
"""

LEAVE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
#: How long whoever is connected may take to be gone, and how often we look.
LEAVING, POLL, SECOND = timedelta(seconds=20), timedelta(milliseconds=2), timedelta(seconds=1)

HAS_SETTINGS = "SELECT 1 FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase WHERE datname = %s"


class Databases:
    """The databases of one server.

    To make one is to copy, and later remove, hundreds of files: it takes ten times as long as most tests. So one that
    comes back is emptied for the next test. Each test's has a name of its own: whatever thread or process a test has
    left behind finds no database under the name it knows, not somebody else's tables.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._spare: list[str] = []

    def __enter__(self) -> Self:
        self._admin = psycopg.connect(self._server, autocommit=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._spare:
            self._do("DROP DATABASE {} WITH (FORCE)", name)
        self._admin.close()

    @contextmanager
    def lend(self) -> Iterator[str]:
        """The URL of an empty database, which ends with the block."""
        name = f"semel_{uuid4().hex}"
        if self._spare:
            spare = self._spare.pop()
            self._send_away(spare)
            self._do("ALTER DATABASE {} RENAME TO {}", spare, name)
        else:
            self._do("CREATE DATABASE {}", name)
        try:
            yield self._url(name)
        finally:
            self._take_back(name)

    def _take_back(self, name: str) -> None:
        spare = f"spare_{uuid4().hex}"
        if not self._renamed(name, spare):
            self._do("DROP DATABASE {} WITH (FORCE)", name)
            return
        with psycopg.connect(self._url(spare), autocommit=True) as connection:
            connection.execute(EMPTY)
        self._spare.append(spare)

    def _renamed(self, name: str, spare: str) -> bool:
        """Whether it is nobody's any more, and emptying it makes it like a new one."""
        if self._admin.execute(HAS_SETTINGS, [name]).fetchone():
            return False
        self._send_away(name)
        try:
            self._do("ALTER DATABASE {} RENAME TO {}", name, spare)
        except psycopg.errors.ObjectInUse:  # Somebody has come back meanwhile.
            return False
        return True

    def _send_away(self, name: str) -> None:
        """End every connection to it. A rename would wait for them too, but looks only every tenth of a second."""
        for _ in range(int(LEAVING / POLL)):
            if not self._admin.execute(LEAVE, [name]).fetchall():
                return
            time.sleep(POLL / SECOND)

    def _do(self, statement: str, *names: str) -> None:
        self._admin.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def _url(self, name: str) -> str:
        return urlsplit(self._server)._replace(path=f"/{name}").geturl()

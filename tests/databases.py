"""PostgreSQL databases, empty or with tables in them, lent to one test after another. It starts no server."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
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

# Tables that were not there are dropped, and those that were are emptied, if anything was ever written to them.
CLEARED = """
DO $$
DECLARE
    name text;
BEGIN
    FOR name IN SELECT oid::regclass FROM pg_class
                 WHERE relkind IN ('r', 'p') AND NOT relispartition AND relnamespace = 'public'::regnamespace
                   AND relname <> ALL ({known})
    LOOP
        EXECUTE format('DROP TABLE IF EXISTS %s CASCADE', name);
    END LOOP;
    FOR name IN SELECT oid::regclass FROM pg_class
                 WHERE relkind = 'r' AND relname = ANY ({known}) AND relname <> ALL ({kept})
                   AND pg_relation_size(oid) > 0
    LOOP
        EXECUTE format('TRUNCATE %s RESTART IDENTITY CASCADE', name);
    END LOOP;
END $$
"""

TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"

# All that a test may have changed beside rows, down to what the planner has learnt of the tables.
SHAPE = """
WITH ours AS (
    SELECT oid, nspname, nspowner, nspacl FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
), relation AS (
    SELECT * FROM pg_class WHERE relnamespace IN (SELECT oid FROM ours)
)
SELECT concat_ws(' ', 'schema', nspname, nspowner, nspacl) AS it FROM ours
 UNION ALL
SELECT concat_ws(' ', 'relation', oid::regclass, relkind, relowner, relacl, reloptions, relpersistence, relrowsecurity)
  FROM relation
 UNION ALL
SELECT concat_ws(' ', 'column', attrelid::regclass, attnum, attname, atttypid, attnotnull, atthasdef, attacl)
  FROM pg_attribute WHERE attrelid IN (SELECT oid FROM relation)
 UNION ALL
SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid))
  FROM pg_constraint WHERE connamespace IN (SELECT oid FROM ours)
 UNION ALL
SELECT concat_ws(' ', 'trigger', tgrelid::regclass, tgname, tgenabled) FROM pg_trigger WHERE NOT tgisinternal
 UNION ALL
SELECT concat_ws(' ', 'function', oid::regprocedure, proacl) FROM pg_proc
 WHERE pronamespace IN (SELECT oid FROM ours)
 UNION ALL
SELECT concat_ws(' ', 'type', oid::regtype) FROM pg_type WHERE typnamespace IN (SELECT oid FROM ours)
 UNION ALL
SELECT concat_ws(' ', 'statistics', starelid::regclass, staattnum) FROM pg_statistic
 WHERE starelid IN (SELECT oid FROM relation)
 ORDER BY it
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
            self._make(name)
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
            is_as_new = self._is_cleared(connection)
        if is_as_new:
            self._spare.append(spare)
        else:
            self._do("DROP DATABASE {} WITH (FORCE)", spare)

    def _make(self, name: str) -> None:
        self._do("CREATE DATABASE {}", name)

    def _is_cleared(self, connection: psycopg.Connection[Any]) -> bool:
        """Remove what is in it; return whether it is as a new one then."""
        connection.execute(EMPTY)
        return True

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


class Prepared(Databases):
    """Databases with tables in them. They are made once, and copied; a copy that comes back is cleared of rows and of
    tables that were not there, and kept for the next test unless anything else in it has changed.
    """

    def __init__(self, server: str, prepare: Callable[[str], None], kept: Sequence[str] = ()) -> None:
        """Let *prepare* make the tables, at a URL; *kept* are those of which the rows are a part of that."""
        super().__init__(server)
        self._prepare = prepare
        self._kept = list(kept)
        self._known: list[str] = []
        self._template = ""
        self._wanted: list[Any] = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._template:
            self._spare.append(self._template)
        super().__exit__(kind, error, trace)

    def _make(self, name: str) -> None:
        if not self._template:
            template = f"template_{uuid4().hex}"
            self._do("CREATE DATABASE {}", template)
            self._prepare(self._url(template))
            with psycopg.connect(self._url(template), autocommit=True) as connection:
                self._known = [table for (table,) in connection.execute(TABLES)]
                self._wanted = self._found(connection)
            self._template = template
        self._send_away(self._template)
        self._do("CREATE DATABASE {} TEMPLATE {}", name, self._template)

    def _is_cleared(self, connection: psycopg.Connection[Any]) -> bool:
        connection.execute(sql.SQL(CLEARED).format(known=self._known, kept=self._kept))
        return self._found(connection) == self._wanted

    def _found(self, connection: psycopg.Connection[Any]) -> list[Any]:
        found = connection.execute(SHAPE).fetchall()
        for table in self._kept:
            rows = sql.SQL("SELECT it::text FROM {} AS it ORDER BY 1").format(sql.Identifier(table))
            found += connection.execute(rows).fetchall()
        return found

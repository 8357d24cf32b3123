"""What differs between the databases and drivers below SQLAlchemy: how to begin, what errors mean, what COMMIT says."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from semel.core.commands import Begin, Open
from semel.core.record import Found
from semel.errors import ConfigurationError, StoreError, StoreUnavailable
from semel.stores.connections.endings import FAILED_INSIDE, Notices, is_fence, of_commit, of_statement
from semel.stores.connections.urls import postgres_url, sqlite_url
from semel.stores.postgres.address import Address
from semel.stores.postgres.encoding import check_encoding
from semel.stores.postgres.joined import NOTE_TABLE
from semel.stores.sqlite.file import explained, locate
from semel.stores.sqlite.statements import Statements
from semel.stores.sqlite.transactions import Lender
from semel.stores.transaction import Fenced

#: psycopg's word for a transaction in which a statement has failed; named, so that psycopg need not be there.
_IN_ERROR = "INERROR"


class Dialect(Protocol):
    """One database below SQLAlchemy."""

    #: Whether to ``peek`` before the write lock is waited for; it reads a file.
    peeks: bool

    def start(self, command: Begin | Open) -> Found | None:
        """Set down that a transaction of this process is at a key; or say what another one is at there."""

    def peek(self, command: Begin | Open) -> Found | None:
        """Read what makes the write lock needless."""

    def stop(self, command: Begin | Open) -> None:
        """Set down that it has ended, however it ended."""

    def close(self) -> None:
        """Let go of what is not the engine's."""

    def begin(self, connection: Connection, command: Begin | Open) -> None:
        """Begin what ``connection.begin()`` has only promised."""

    def of_statement(self, error: DBAPIError) -> Exception | None:
        """Return what an error of a statement of ours means; None: it is raised as it is."""

    def of_commit(self, error: DBAPIError) -> StoreError | None:
        """Return what an error of COMMIT means; None: the server has said no, and it is raised as it is."""

    def commit(self, connection: Connection, commit: Callable[[], None]) -> Notices | None:
        """Commit; return what was said beside."""

    def check(self, notices: Notices | None) -> None:
        """Raise what was said beside, where it matters."""


class Postgres:
    """PostgreSQL, below psycopg or asyncpg. Its locks tell at once who is at a key, in any process."""

    peeks = False

    def __init__(self, url: str) -> None:
        """Name the server in messages as *url* does, but for the password."""
        self._address = Address.of(url)

    def start(self, command: Begin | Open) -> None:
        """Nothing: the first statement tells."""

    def peek(self, command: Begin | Open) -> None:
        """Nothing: the first statement tells."""

    def stop(self, command: Begin | Open) -> None:
        """Nothing: the end of the transaction tells."""

    def close(self) -> None:
        """Nothing is ours."""

    def begin(self, connection: Connection, command: Begin | Open) -> None:
        """See that there will be a transaction: the driver begins it with the first statement."""
        if getattr(connection.connection.dbapi_connection, "autocommit", False):
            raise ConfigurationError(
                'This engine has isolation_level="AUTOCOMMIT", so it has no transactions. Give one that has.'
            )
        check_encoding(connection.connection.driver_connection, self._address)
        if isinstance(command, Open):
            connection.exec_driver_sql(self._address.names.put_into(NOTE_TABLE))

    def of_statement(self, error: DBAPIError) -> Exception | None:
        """Return what an error of a statement of ours means."""
        origin, sqlstate = _origin(error), _sqlstate(error)
        if is_fence(origin, sqlstate, self._address.names):
            return Fenced()
        return of_statement(origin, sqlstate, self._address)

    def of_commit(self, error: DBAPIError) -> StoreError | None:
        """Return what an error of COMMIT means."""
        return of_commit(_origin(error), _sqlstate(error), self._address, is_lost=error.connection_invalidated)

    def commit(self, connection: Connection, commit: Callable[[], None]) -> Notices:
        """Commit; return what was said beside."""
        notices = Notices()
        driver: Any = connection.connection.driver_connection
        if connection.dialect.driver == "asyncpg":
            # What COMMIT is answered with, SQLAlchemy keeps to itself. It can't be ROLLBACK: a statement of ours has
            # just gone through, and in a transaction that has failed none does.
            driver.add_log_listener(notices.from_asyncpg)
            commit()
            driver.remove_log_listener(notices.from_asyncpg)
        else:
            if driver.info.transaction_status.name == _IN_ERROR:
                raise _failed_inside()
            driver.add_notice_handler(notices.from_psycopg)
            commit()
            driver.remove_notice_handler(notices.from_psycopg)
        return notices

    def check(self, notices: Notices | None) -> None:
        """Raise ``AnswerNotStored`` where the commit may not outlive the server."""
        if notices is not None:
            notices.check(self._address)


class SQLite:
    """SQLite, below pysqlite or aiosqlite. One transaction has the write lock; who need not wait for it does not."""

    peeks = True

    def __init__(self, url: str) -> None:
        """Peek into the file, and the table, that *url* names."""
        self._place = locate(url)
        self._lender = Lender(self._place)
        self._write_nothing = Statements(self._place.names).write_nothing

    def start(self, command: Begin | Open) -> Found | None:
        """Set down that a transaction of this process is at a key; or say what another one is at there."""
        return self._lender.start(command) if isinstance(command, Begin) else None

    def peek(self, command: Begin | Open) -> Found | None:
        """Read an answer, or that another worker has the key, without waiting for its handler."""
        return self._lender.peek(command)

    def stop(self, command: Begin | Open) -> None:
        """Set down that it has ended, however it ended."""
        self._lender.stop(command)

    def close(self) -> None:
        """Close what was opened to peek."""
        self._lender.close()

    def begin(self, connection: Connection, command: Begin | Open) -> None:
        """Take the write lock now: a transaction that has read before it writes can be too late to write."""
        # An application may have had a plain BEGIN sent, as SQLAlchemy's manual advises. Nothing was done in it yet.
        if _is_in_transaction(connection.connection.driver_connection):
            connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        if isinstance(command, Begin):
            # Where the file can only be read, that is known now, before a handler runs. A phase has a claim already.
            connection.exec_driver_sql(self._write_nothing)

    def of_statement(self, error: DBAPIError) -> StoreError | None:
        """Return what an error of a statement of ours means."""
        origin = _origin(error)
        if isinstance(origin, sqlite3.OperationalError) or type(origin) is sqlite3.DatabaseError:
            return explained(origin, self._place)
        return None

    def of_commit(self, error: DBAPIError) -> StoreError | None:
        """Return what an error of COMMIT means: whatever it was, SQLite has not committed."""
        return self.of_statement(error)

    def commit(self, connection: Connection, commit: Callable[[], None]) -> None:  # noqa: ARG002 - PostgreSQL's concern
        """Commit."""
        commit()

    def check(self, notices: Notices | None) -> None:
        """Nothing is said beside."""


def dialect_of(engine: Engine, url: str | None = None) -> Dialect:
    """Return the database below *engine*, or say that it is none that is known."""
    match engine.dialect.name, engine.dialect.driver:
        case "postgresql", "psycopg" | "psycopg_async" | "asyncpg":
            return Postgres(url or url_of_engine(engine))
        case "sqlite", "pysqlite" | "aiosqlite":
            return SQLite(url or url_of_engine(engine))
        case name, driver:
            raise ConfigurationError(
                f"SQLAlchemy on {name}+{driver} is not known here. Use postgresql+psycopg, postgresql+asyncpg, "
                "sqlite or sqlite+aiosqlite."
            )


def url_of_engine(engine: Engine) -> str:
    """Return where *engine* connects to, as the URL of a store. Of PostgreSQL, it is a name: ``made_by`` connects."""
    url = engine.url
    if engine.dialect.name == "sqlite":
        return sqlite_url(url.database)
    query = {name: value if isinstance(value, str) else ",".join(value) for name, value in url.query.items()}
    parts = {
        "host": url.host or query.get("host"),
        "port": url.port or query.get("port"),
        "user": url.username,
        "dbname": url.database,
    }
    return postgres_url(parts)


def made_by(engine: Engine) -> Any:
    """Make a connection of the driver's as *engine* does, with its ``connect_args``, ``creator`` and events, and keep
    it out of its pool: a pool like it, of our own, makes the connection and lets go of it.
    """
    made = engine.pool.recreate().connect()
    try:
        made.commit()  # what was SET as it was made is to stay
    except BaseException:
        made.invalidate()
        raise
    connection = made.driver_connection
    made.detach()
    return connection


def no_connection(error: Exception, engine: Engine, dialect: Dialect) -> StoreError:
    """Say why *engine* had no connection to give."""
    if isinstance(error, PoolTimeout):
        checked_out = getattr(engine.pool, "checkedout", lambda: "its")()
        return StoreUnavailable(
            f"{engine.url!r}: all {checked_out} connections are in use. Raise pool_size or max_overflow of the engine; "
            "and let no request keep one while it waits for another: end a login's session before the guard."
        )
    known = dialect.of_statement(error) if isinstance(error, DBAPIError) else None
    if isinstance(known, StoreError):
        return known
    return StoreUnavailable(f"{engine.url!r} can't be reached: {' '.join(str(error).split())}")


def _origin(error: DBAPIError) -> Exception:
    return error.orig if isinstance(error.orig, Exception) else error


def _sqlstate(error: DBAPIError) -> str | None:
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state


def _is_in_transaction(driver: Any) -> bool:
    return bool(driver.in_transaction)


def _failed_inside() -> Exception:
    from psycopg.errors import InFailedSqlTransaction  # noqa: PLC0415 - it is psycopg's connection that has failed

    return InFailedSqlTransaction(FAILED_INSIDE)

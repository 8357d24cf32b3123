"""Transactions on psycopg: from a pool of the store's own, or from the application's. Which statements join them is
the stores' affair.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Self, TypeVar

from semel.core.commands import Begin, Open
from semel.errors import StoreError, StoreReadOnly
from semel.stores.connections.endings import (
    APPLICATION_NAME,
    FAILED_INSIDE,
    HAS_LOCK,
    RESET,
    WAIT_SECONDS,
    Notices,
    all_in_use,
    commit_sql,
    ended_inside,
    lost,
    of_commit,
    of_statement,
)
from semel.stores.connections.urls import postgres_url, unknown_address
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, STATEMENT_SECONDS, Address
from semel.stores.postgres.durability import FOR_TRANSACTION, is_off
from semel.stores.postgres.errors import unreachable
from semel.stores.postgres.opening import as_given
from semel.stores.postgres.pooler import is_direct
from semel.stores.statement import Joined
from semel.stores.transaction import Connections, Unit

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
    from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg and its pool. Run: pip install 'semel[postgres]'") from error

T = TypeVar("T")

_MORE = "Add ?pool= with a higher number to the store's URL."
MORE_OF_THEIRS = "Raise the max_size of the pool."

#: What an address is made of.
_PARTS = ("dbname", "host", "hostaddr", "port", "user")


class PsycopgConnections(Connections):
    """Transactions for threads, on psycopg."""

    def __init__(self, address: Address, pool: ConnectionPool[Any] | None = None) -> None:
        """Open a pool of its own on first use; or take from *pool*, which the application opens and closes."""
        self._address = address
        self.opener = address.opener
        self._given = pool
        self._own: ConnectionPool[Any] | None = None
        self._failures = 0
        self._lock = Lock()
        start_afresh_in_children(self)

    @classmethod
    def of(cls, pool: ConnectionPool[Any], url: str | None = None) -> Self:
        """Take connections from a pool of the application's. Without *url*, the store's own are made as the pool's."""
        return cls(Address.of(url or cls.url_of(pool), None if url else partial(_made_by, pool)), pool)

    @staticmethod
    def url_of(pool: ConnectionPool[Any]) -> str:
        """Return where *pool* connects to."""
        return pool_url(pool)

    def begin(self, command: Begin | Open, opening: str | None = None) -> Unit:  # noqa: ARG002 - the same for both
        """Begin a transaction, *opening* with it."""
        pool = self._given or self._opened()
        for is_last in (False, True):
            unit = _Unit(self._connection(pool), pool, self._address)
            try:
                unit.begin(opening)
            except StoreError:
                was_broken = unit.connection.closed
                unit.rollback()
                if is_last or not was_broken:
                    raise
                # The server was restarted, or another is the primary now: what else is idle in the pool is as useless.
                pool.check()
            except BaseException:
                unit.rollback()
                raise
            else:
                return unit
        raise AssertionError  # pragma: no cover - the last round returned or raised

    def close(self) -> None:
        """Close the pool, if it is the store's own."""
        with self._lock:
            pool, self._own = self._own, None
        if pool is not None:
            pool.close()

    def start_afresh(self) -> None:
        """Have no pool: its threads and connections are the parent's."""
        leave_alone(self._own)
        self._own = None
        self._lock = Lock()

    def _opened(self) -> ConnectionPool[Any]:
        pool = self._own
        if pool is None:
            self._probe()
            with self._lock:
                if self._own is None:
                    self._own = ConnectionPool(
                        self._address.url,
                        kwargs=SESSION,
                        connection_class=_Connection,
                        configure=_Connection.configure,
                        min_size=0,
                        max_size=self._address.pool,
                        open=True,
                        name="semel",
                    )
                    self._failures = 0
                return self._own
        figures = pool.get_stats()
        failures = figures.get("connections_errors", 0)
        if failures != self._failures and not figures.get("pool_available"):
            # The pool connects behind our back and goes on trying for minutes, while whoever waits is told nothing.
            self._probe()
            self._failures = failures
        return pool

    def _probe(self) -> None:
        try:
            if self._address.opener is None:
                psycopg.connect(self._address.url, **SESSION).close()
            else:
                as_given(self._address, {}).close()
        except psycopg.Error as error:
            raise unreachable(error, self._address) from error

    def _connection(self, pool: ConnectionPool[Any]) -> psycopg.Connection[Any]:
        try:
            connection: psycopg.Connection[Any] = pool.getconn(timeout=WAIT_SECONDS)
            return connection
        except PoolTimeout as error:
            self._probe()  # a pool that can't connect has nothing to give either, and says the same
            raise all_in_use(self._address, pool.max_size, MORE_OF_THEIRS if self._given else _MORE) from error
        except psycopg.Error as error:  # the pool is closed, or has a limit on those who wait
            raise unreachable(error, self._address) from error


class _Connection(psycopg.Connection[Any]):
    """One of our own."""

    #: Whether it is to the server itself, and not to a pooler.
    is_direct = True
    #: Whether its COMMIT would be answered too early.
    is_off = False

    def configure(self) -> None:
        """Find out what it is, when it is made."""
        self.is_direct, self.is_off = is_direct(self), is_off(self)
        if not self.is_direct:
            self.prepare_threshold = None

    def begin_sql(self, opening: str | None) -> str:
        """How to begin on it: without what an earlier handler has set, and with *opening* last."""
        first = "; ".join(filter(None, (FOR_TRANSACTION if self.is_off else None, opening)))
        return f"{RESET}; {begin_sql(self, first or None, is_ours=True)}"

    def commit_sql(self) -> str:
        """How to commit on it."""
        return commit_sql(is_direct=self.is_direct, is_off=self.is_off)


class _Unit(Unit):
    connection: psycopg.Connection[Any]

    def __init__(self, connection: psycopg.Connection[Any], pool: ConnectionPool[Any], address: Address) -> None:
        self.connection = connection
        self._pool = pool
        self._address = address
        self._was_autocommit = connection.autocommit
        self._factories = connection.row_factory, connection.cursor_factory

    def begin(self, opening: str | None) -> None:
        own = _own(self.connection)
        try:
            # Else psycopg would send a BEGIN of its own, and whether it has can't be seen.
            self.connection.autocommit = True
            begin = own.begin_sql(opening) if own else begin_sql(self.connection, opening, is_ours=False)
            self.has_lock = self._execute(begin) == HAS_LOCK
        except psycopg.Error as error:
            raise_known(error, self._address)
            raise

    def run(self, joined: Joined[T]) -> T:
        check_open(self.connection)
        try:
            cursor = psycopg.RawCursor(self.connection, row_factory=tuple_row)
            cursor.execute(joined.query.numbered.encode(), joined.in_order, binary=True)
            rows = cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise_known(error, self._address)
            raise
        except BaseException:
            self._drop()
            raise
        try:
            return joined.read(rows)
        except StoreReadOnly:
            if _own(self.connection):
                # The last handler may have made its session so, which the RESET of a transaction that is begun
                # already can't undo; or it was the primary once. A new connection is neither.
                self._drop()
            raise

    def commit(self) -> None:
        notices = Notices()
        own = _own(self.connection)
        try:
            check_before_commit(self.connection, self._address)
            self.connection.add_notice_handler(notices.from_psycopg)
            # How long it may take, nobody here limits: TCP ends it when the server is gone (for our own connections
            # after STATEMENT_SECONDS, by tcp_user_timeout), and the server ends it when its operator says so.
            tag = self._execute(own.commit_sql() if own else "COMMIT")
            self.connection.remove_notice_handler(notices.from_psycopg)
        except psycopg.Error as error:
            known = of_commit(error, error.sqlstate, self._address, is_lost=self.connection.closed)
            if known is None:
                self.connection.remove_notice_handler(notices.from_psycopg)
                raise
            self._drop()
            raise known from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._let_go()
        check_tag(tag)
        notices.check(self._address)

    def rollback(self) -> None:
        try:
            if self.connection.info.transaction_status in IN_TRANSACTION:
                self._execute("ROLLBACK")
        except psycopg.Error:
            self._drop()
        finally:
            self._let_go()

    def _execute(self, sql: str) -> str | None:
        # Not the connection's own cursor: which kind that is, the application has said.
        cursor = psycopg.Cursor(self.connection).execute(sql.encode(), prepare=False)
        while cursor.nextset():
            pass
        return cursor.statusmessage

    def _drop(self) -> None:
        # Not close(): a pool may have made "give it back" of that.
        self.connection.pgconn.finish()

    def _let_go(self) -> None:
        if self.connection.info.transaction_status == TransactionStatus.IDLE:
            self.connection.autocommit = self._was_autocommit
            self.connection.row_factory, self.connection.cursor_factory = self._factories
        else:
            self._drop()
        with suppress(psycopg.Error, ValueError):  # a pool that is closed closes it; one that is gone can't
            self._pool.putconn(self.connection)


def _own(connection: psycopg.Connection[Any]) -> _Connection | None:
    return connection if isinstance(connection, _Connection) else None


#: The handler's own statements run on it, so it has none of the settings that suit ours alone.
SESSION: dict[str, Any] = {
    "autocommit": True,
    "prepare_threshold": 0,
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": STATEMENT_SECONDS * 1000,
    "fallback_application_name": APPLICATION_NAME,
}

IN_TRANSACTION = frozenset({TransactionStatus.INTRANS, TransactionStatus.INERROR})

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
AnyPool = ConnectionPool[Any] | AsyncConnectionPool[Any]


def begin_sql(connection: AnyConnection, opening: str | None, *, is_ours: bool) -> str:
    """Return how to begin: on a connection of the application's, in the isolation that it has asked for, and read-only
    if it has asked for that. Never READ WRITE: that would force a server which was made read-only on purpose.
    """
    level = connection.isolation_level or (psycopg.IsolationLevel.READ_COMMITTED if is_ours else None)
    modes = [f"ISOLATION LEVEL {level.name.replace('_', ' ')}"] if level else []
    if connection.read_only:
        modes.append("READ ONLY")
    begin = " ".join(("BEGIN", ", ".join(modes))).strip()
    return f"{begin}; {opening}" if opening else begin


def check_open(connection: AnyConnection) -> None:
    """Raise where the handler has ended the transaction."""
    if connection.info.transaction_status == TransactionStatus.IDLE:
        raise ended_inside()


def check_before_commit(connection: AnyConnection, address: Address) -> None:
    """Raise where there is nothing to commit: the handler has ended it, or the connection is gone."""
    check_open(connection)
    if connection.closed:
        raise lost(address)


def raise_known(error: psycopg.Error, address: Address) -> None:
    """Raise what the *error* of a statement means, where it is the store's affair."""
    known = of_statement(error, error.sqlstate, address)
    if known is not None:
        raise known from error


def check_tag(tag: str | None) -> None:
    """Raise where the server's reply to COMMIT is that it has rolled back."""
    if tag != "COMMIT":
        raise psycopg.errors.InFailedSqlTransaction(FAILED_INSIDE)


def pool_url(pool: AnyPool) -> str:
    """Name where *pool* connects to, as far as it says so beforehand."""
    if not hasattr(pool, "_configure"):  # see _made_by
        raise unknown_address("this pool")
    conninfo = "" if callable(pool.conninfo) else pool.conninfo or ""
    kwargs = {} if callable(pool.kwargs) else pool.kwargs or {}
    try:
        return postgres_url(conninfo_to_dict(conninfo, **{each: kwargs[each] for each in _PARTS if each in kwargs}))
    except psycopg.ProgrammingError:
        # The driver's own words may quote the password, so they go no further.
        raise unknown_address("this pool") from None


def _made_by(pool: ConnectionPool[Any]) -> psycopg.Connection[Any]:
    """Make a connection as *pool* does, and keep it out of there."""
    conninfo = pool.conninfo() if callable(pool.conninfo) else pool.conninfo or ""
    kwargs = pool.kwargs() if callable(pool.kwargs) else pool.kwargs or {}
    connection: psycopg.Connection[Any] = pool.connection_class.connect(conninfo, **kwargs)
    # The pool has no other name for it. It may say which schema is searched.
    if configure := pool._configure:  # noqa: SLF001 - see above
        try:
            configure(connection)
        except BaseException:
            connection.close()
            raise
    return connection

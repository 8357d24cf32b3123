"""The PostgreSQL store for threads, on psycopg. What it says is in ``queries.sql``, and its migrations run in
``migrating.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar, cast

from semel.core.commands import Claim, Command, Complete, FindStuck, Renew, Settle
from semel.core.record import Hold
from semel.errors import ConfigurationError, StoreError, StoreNotPermitted, StoreReadOnly
from semel.stores.base import Store
from semel.stores.batching import Batcher, refused
from semel.stores.forks import importing, start_afresh_in_children
from semel.stores.migration import Layout, PlannedMigration
from semel.stores.postgres.address import CONNECT_SECONDS, MAX_CONNECTIONS, SESSION, Address
from semel.stores.postgres.base import SHARES, PostgresBase, retried
from semel.stores.postgres.bounds import walks_of
from semel.stores.postgres.encoding import ENCODING, check_encoding
from semel.stores.postgres.errors import read_only, translated, unreachable
from semel.stores.postgres.layouts import LayoutMigrator
from semel.stores.postgres.listening import Listener
from semel.stores.postgres.network import STATEMENTS
from semel.stores.postgres.opening import as_given, settle
from semel.stores.postgres.pooler import BEGIN, is_direct
from semel.stores.postgres.statements import (
    MAX_BATCH,
    OWNED,
    UPKEEP,
    terms_of_claim,
    terms_of_complete,
)
from semel.stores.postgres.upkeep import MAX_WALKS, advance
from semel.stores.postgres.version import check_version, tells_version
from semel.stores.statement import DEFAULT_TABLE, Statement
from semel.stores.transaction import Connections, Transaction

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg. Run: pip install 'semel[postgres]'") from error

T = TypeVar("T")


class PostgresStore(PostgresBase, Store):
    """Records in one PostgreSQL table. Claims, answers, leases, settlements and upkeep have a connection each, if
    ``?connections=`` does not let all but leases share some.
    """

    _links: list[_Link]

    def __init__(self, url: str, *, connections: Connections | None = None) -> None:
        """Use the server and the table that *url* names; *connections* are the application's own, for transactions that
        the handler writes in. Connects on first use.
        """
        super().__init__(url, connections)
        self._listener = Listener(self.address)
        self._given = connections
        self._connections: Connections | None = None
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        if self._liveness is not None and type(command) in OWNED:
            self._liveness.settle()
        match command:
            case Claim():
                return cast("T", self._claims.submit(command))
            case Complete():
                return cast("T", self._answers.submit(command))
            case Renew():
                return cast("T", self._leases.submit(command))
            case Settle():
                return cast("T", self._settlements.submit(command))
            case _:
                batcher = self._upkeep if type(command) in UPKEEP else self._others
                return cast("T", batcher.submit(command))

    def renewals(self) -> Callable[[Renew], frozenset[Hold]]:
        """Return what renews leases in this thread."""
        link = _Link(self.address)

        def renew(command: Renew) -> frozenset[Hold]:
            outcome = self._other(link, command)
            if isinstance(outcome, Exception):
                raise outcome
            return cast("frozenset[Hold]", outcome)

        return renew

    def transaction(self) -> Transaction:
        """Return a transaction of the application's own, not begun yet."""
        if self._liveness is not None:
            self._liveness.settle()
        with self._mutex:
            if self._connections is None:
                # Here, because it imports a pool that most stores never need.
                with importing:
                    from semel.stores.connections.psycopg import PsycopgConnections  # noqa: PLC0415

                self._connections = PsycopgConnections(self.address)
            return Transaction(self._connections, self._joined, self._durability)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call *on_end* with every hint from now on."""
        self._listener.add(on_end)

    def open(self) -> None:
        """Connect, and see whether the server can serve."""
        with _Link(self.address) as link:
            if link.run(self._statements.check()):
                raise read_only(str(self.address))
            self._check(link)

    def migrate(self) -> list[str]:
        """Apply the migrations that are missing, each statement in a transaction of its own."""
        return self._migrating(LayoutMigrator.run)

    def plan(self) -> tuple[PlannedMigration, ...]:
        """Return what ``migrate`` would do, and what that would lock."""
        return self._migrating(LayoutMigrator.plan)

    def lay_out(self, layout: Layout) -> list[str]:
        """Have large answers in partitions, or in the rows."""
        return self._migrating(lambda migrator: migrator.lay_out(layout))

    def plan_layout(self, layout: Layout) -> tuple[PlannedMigration, ...]:
        """Return what ``lay_out`` would do, and what that would lock."""
        return self._migrating(lambda migrator: migrator.plan_layout(layout))

    def has_neighbours(self) -> bool:
        """Whether the schema of its tables has tables of others."""
        names = self.address.names
        asked = [names.put_into(DEFAULT_TABLE), [*sorted(names.tables), names.answers]]
        with _Link(self.address) as link:
            rows = link.guarded(lambda connection: connection.execute(_NEIGHBOURS, asked).fetchall())
        return bool(rows[0][0])

    def close(self) -> None:
        """Disconnect."""
        self.ended.close()
        with self._mutex:
            connections, self._connections = self._connections, self._given
        if connections is not None:
            connections.close()
        for link in self._links:
            link.close()
        self._listener.close()
        if self._liveness is not None:
            self._liveness.close()

    def start_afresh(self) -> None:
        """Have no connection."""
        self._mutex = threading.Lock()
        self._connections = self._given
        count = self.address.connections
        self._links = [(_Link if count == MAX_CONNECTIONS else _SharedLink)(self.address) for _ in range(count)]
        claims, answers, settlements, others, upkeep = (self._links[share] for share in SHARES[count])
        self._claims = Batcher[Claim](lambda batch: self._claim(claims, batch), terms_of_claim, MAX_BATCH)
        self._answers = Batcher[Complete](lambda batch: self._complete(answers, batch), terms_of_complete, MAX_BATCH)
        # Renewals skip locked rows, and must not wait behind those who don't: however few connections there are, they
        # have one beside them.
        leases = _Link(self.address)
        self._links.append(leases)
        self._leases = Batcher[Any](lambda batch: [self._other(leases, command) for command in batch])
        # It waits for a transaction that may hang, and none of the others has to.
        self._settlements = Batcher[Any](lambda batch: [self._other(settlements, command) for command in batch])
        self._others = Batcher[Any](lambda batch: [self._other(others, command) for command in batch])
        # Reaping takes its time, and no request waits for it.
        self._upkeep = Batcher[Any](lambda batch: [self._other(upkeep, command) for command in batch])

    def _migrating(self, do: Callable[[LayoutMigrator], T]) -> T:
        with _MigratingSession(self.address) as session:
            migrator = LayoutMigrator(session, self.address.names, str(self.address), with_post=self.migrates_post)
            return do(migrator)

    def _claim(self, link: _Link, batch: list[Claim]) -> list[Any]:
        if not self._may_write:
            self._check(link)
        return link.run(self._statements.claim(batch), is_shared=len(batch) > 1)

    def _check(self, link: _Link) -> None:
        # Once: a role that may claim but not complete, or tables of another version, are told before a handler runs.
        link.run(self._statements.check_privileges(str(self.address)))
        if link.run(tells_version(self.address.names)):
            link.run(check_version(self.address.names, str(self.address)))
        self._may_write = True

    def _complete(self, link: _Link, batch: list[Complete]) -> list[Any]:
        verdicts = link.run(self._statements.complete(batch), is_shared=len(batch) > 1)
        return [
            verdict or self._caught(partial(link.run, self._statements.completed(command.hold)))
            for command, verdict in zip(batch, verdicts, strict=True)
        ]

    def _other(self, link: _Link, command: Command[Any]) -> Any:
        def run() -> Any:
            if isinstance(command, Settle):
                link.run(self._statements.wait(command))
            elif isinstance(command, FindStuck):
                self._advance(link)
            for walk in walks_of(command):
                link.run(self._statements.bounds.look(self._statements, walk))
            return link.run(self._statements.of(command))

        return self._caught(run)

    def _advance(self, link: _Link) -> None:
        with suppress(StoreNotPermitted, StoreReadOnly):  # A role that may only read sees what is followed already.
            for _ in range(MAX_WALKS):
                if not link.run(advance(self._statements)):
                    return

    @staticmethod
    def _caught(run: Callable[[], Any]) -> Any:
        try:
            return run()
        except StoreError as error:
            return error
        except Exception as error:  # noqa: BLE001 - these are no batch: each has its own fate
            return refused(error)


_NEIGHBOURS = """\
SELECT EXISTS (SELECT FROM pg_class
                WHERE relkind IN ('r', 'p') AND NOT relispartition AND relname <> ALL ($2::text[])
                  AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = $1::regclass))
"""


class _Link:
    """One connection, opened when it is needed and opened again when it is lost. Used by one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None
        #: Whether it is to the server itself, and not to a pooler; None: not known before it is connected.
        self.is_direct: bool | None = None

    def run(self, statement: Statement[T], *, is_shared: bool = False) -> T:
        """Run one statement in its own transaction. It may be shared by several callers."""
        once = partial(self.guarded, lambda connection: self._run_once(connection, statement))
        return retried(once, self._address, is_shared=is_shared)

    def guarded(self, use: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Let *use* have the connection, and say in Semel's words what goes wrong with it."""
        connection = self._connection or self._connect()
        try:
            return use(connection)
        except psycopg.Error as error:
            known = translated(error, error.sqlstate, self._address)
            if known is None:
                raise
            # The next statement is better off with a new connection: to a server that is up again, or to the one
            # that is the primary now.
            self.close()
            raise known from error
        except BaseException:
            # Interrupted in the middle: what comes back on this connection next would be the answer to another request.
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = self._opened_by_url() if self._address.opener is None else as_given(self._address, STATEMENTS)
            self.is_direct = is_direct(connection)
            if self.is_direct:
                settle(connection, SESSION if self._address.opener else {})
        except psycopg.Error as error:
            raise unreachable(error, self._address) from error
        try:
            check_encoding(connection, self._address)
        except BaseException:
            connection.close()
            raise
        connection.cursor_factory = psycopg.RawCursor
        if not self.is_direct:
            connection.prepare_threshold = None
        self._connection = connection
        return connection

    def _opened_by_url(self) -> psycopg.Connection[Any]:
        try:
            given = conninfo_to_dict(self._address.url)
        except psycopg.ProgrammingError:
            # The driver's own words may quote the password, so they go no further.
            raise ConfigurationError(f"{self._address} can't be read as the address of a PostgreSQL server.") from None
        try:
            return self._open({"options": f"{given.get('options', '')} {_OPTIONS}".strip()})
        except psycopg.OperationalError as error:
            if "startup parameter" not in str(error):
                raise
            # A pooler that passes no session settings on.
            return self._open({})

    def _run_once(self, connection: psycopg.Connection[Any], statement: Statement[T]) -> T:
        if self.is_direct:
            return statement.read(_sent(connection, statement).fetchall())
        # What a session would have is said in each transaction. A pipeline would make one round trip of the three, but
        # PgBouncer 1.18 loses count in one now and then, and keeps a connection for a client that is done with it.
        try:
            connection.execute(BEGIN.encode())
            rows = _sent(connection, statement).fetchall()
            connection.execute("COMMIT")
        except psycopg.Error:
            if not connection.closed:
                connection.rollback()
            raise
        return statement.read(rows)

    def _open(self, more: dict[str, Any]) -> psycopg.Connection[Any]:
        return psycopg.connect(
            self._address.url,
            autocommit=True,
            prepare_threshold=0,
            connect_timeout=CONNECT_SECONDS,
            client_encoding=ENCODING,
            **STATEMENTS,
            **more,
        )


class _MigratingSession:
    """One connection, as what runs migrations uses it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._link = _Link(address)
        self._link.guarded(lambda _: None)  # connects
        self.is_direct = bool(self._link.is_direct)

    def run(self, sql: str) -> list[Any]:
        def use(connection: psycopg.Connection[Any]) -> list[Any]:
            cursor = connection.execute(sql.encode(), prepare=False)
            return cursor.fetchall() if cursor.description else []

        return self._link.guarded(use)

    def another(self) -> _MigratingSession:
        return _MigratingSession(self._address)

    def sqlstate(self, error: Exception) -> str | None:
        return getattr(error, "sqlstate", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()


class _SharedLink(_Link):
    """One connection for several kinds of statements, which wait for each other."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self._mutex = threading.Lock()

    def run(self, statement: Statement[T], *, is_shared: bool = False) -> T:
        with self._mutex:
            return super().run(statement, is_shared=is_shared)


_OPTIONS = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in SESSION.items())


def _sent(connection: psycopg.Connection[Any], statement: Statement[Any]) -> psycopg.Cursor[Any]:
    return connection.execute(statement.sql.encode(), statement.parameters, binary=True)

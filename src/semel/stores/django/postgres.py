"""PostgreSQL in Django, through psycopg 3: the statements of ``stores/postgres`` on Django's own connection.

The sessions belong to the application, so no session settings are changed here. Time-outs and prepared statements
(``prepare_threshold``, which Django does not set) are configured in OPTIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from django.db import Error as DjangoError

from semel.core.commands import Begin, Claim, Command, Complete, FindStuck, Open, Settle
from semel.core.trail import Audit
from semel.errors import (
    ConfigurationError,
    StoreError,
    StoreNotPermitted,
    StoreNotReady,
    StoreReadOnly,
)
from semel.stores.batching import refused
from semel.stores.connections.endings import Notices, is_fence, lost, of_commit, of_statement, tells_clear
from semel.stores.connections.script import is_short, plain
from semel.stores.django.units import Database, no_tables
from semel.stores.django.wrapper import Block, Wrapper, close, name_of
from semel.stores.postgres.address import LOCK_SECONDS, Address
from semel.stores.postgres.base import retried
from semel.stores.postgres.bounds import walks_of
from semel.stores.postgres.durability import Durability
from semel.stores.postgres.encoding import check_encoding
from semel.stores.postgres.errors import translated, unreachable
from semel.stores.postgres.joined import NOTE_TABLE, JoinedStatements
from semel.stores.postgres.statements import Statements
from semel.stores.postgres.upkeep import MAX_WALKS, advance
from semel.stores.postgres.version import check_version, tells_version
from semel.stores.statement import Joined, Names, Statement
from semel.stores.transaction import Fenced

try:
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
except ImportError as error:
    raise ImportError("PostgreSQL needs psycopg 3. Run: pip install 'semel[postgres]'") from error

T = TypeVar("T")

_PROBE = Statement(NOTE_TABLE, [], lambda _rows: None)


@dataclass(frozen=True)
class _Name(Address):
    """A database's name, in place of its address, for messages."""

    def __str__(self) -> str:
        return self.url


class Postgres(Database):
    """One PostgreSQL database of Django."""

    pipelines = True

    def __init__(self, alias: str, *, audit: Audit, actor: Callable[[], str]) -> None:
        """Nothing is connected yet."""
        self._alias = alias
        self._may_write = False
        self._statements = Statements(Names(), audit=audit, actor=actor)
        self._address = _Name(f'DATABASES["{alias}"]', Names())
        self._joined = JoinedStatements(self._statements, str(self._address))
        self._durability = Durability(self._address)

    def connect(self, wrapper: Wrapper) -> None:
        """Connect, and check that the driver is psycopg 3."""
        try:
            if not wrapper.in_atomic_block:
                wrapper.close_if_health_check_failed()
            wrapper.ensure_connection()
        except DjangoError as error:
            raise unreachable(error, self._address) from error
        if not isinstance(wrapper.connection, psycopg.Connection):
            raise ConfigurationError(
                f"{name_of(wrapper)} uses {wrapper.Database.__name__}. Semel needs psycopg 3, which Django "
                "prefers if it is installed: pip install 'psycopg[binary]'"
            )
        check_encoding(wrapper.connection, self._address)

    def drop(self, wrapper: Wrapper) -> None:
        """Close a broken connection, and the idle ones of its pool: the server was restarted, or another is the primary
        now.
        """
        close(wrapper)
        pool = getattr(wrapper, "pool", None)  # Django has none before 5.1.
        if pool:
            with suppress(psycopg.Error):
                pool.check()

    def carry_out(self, wrapper: Wrapper, command: Command[T], *, is_nested: bool) -> T:
        """Carry out one command."""
        run = self._run_once if is_nested else self._run
        outcome: Any
        match command:
            case Claim():
                if not self._may_write:
                    self._check(partial(run, wrapper))
                outcome = run(wrapper, self._statements.claim([command]))[0]
            case Complete():
                outcome = run(wrapper, self._statements.complete([command]))[0]
                outcome = outcome or run(wrapper, self._statements.completed(command.hold))
            case Settle():
                run(wrapper, self._statements.wait(command), is_patient=False)
                outcome = run(wrapper, self._statements.of(command), is_patient=False)
            case FindStuck():
                for _ in range(MAX_WALKS):
                    if not run(wrapper, advance(self._statements)):
                        break
                outcome = self._walked(run, wrapper, command)
            case _:
                outcome = self._walked(run, wrapper, command)
        return outcome  # type: ignore[no-any-return]  # by the command's own type

    def _walked(self, run: Callable[..., Any], wrapper: Wrapper, command: Command[Any]) -> Any:
        for walk in walks_of(command):
            run(wrapper, self._statements.bounds.look(self._statements, walk))
        return run(wrapper, self._statements.of(command))

    def check(self, wrapper: Wrapper) -> None:
        """Raise if the tables are missing, or the server is a replica."""
        if self._run_once(wrapper, self._statements.check()):
            raise self._read_only()
        self._check(partial(self._run_once, wrapper))

    def _check(self, run: Callable[[Statement[Any]], Any]) -> None:
        # Once: a role that may claim but not complete, or tables of another version, are found out before a view runs.
        run(self._statements.check_privileges(str(self._address)))
        if run(tells_version(Names())):
            run(check_version(Names(), str(self._address)))
        self._may_write = True

    def joined(self) -> JoinedStatements:
        """Return the statements that join."""
        return self._joined

    def start(self, wrapper: Wrapper, command: Begin | Open) -> None:
        """Do nothing: the first statement takes the key's lock, across processes."""

    def stop(self, command: Begin | Open) -> None:
        """Do nothing: the end of the transaction frees the lock."""

    def begin(self, wrapper: Wrapper, block: Block, command: Begin | Open) -> None:
        """Enter the block. psycopg begins with the first statement. If that were the handler's, the handler would get
        the error of a lost server.
        """
        try:
            block.__enter__()
        except DjangoError as error:
            raise unreachable(error, self._address) from error
        if isinstance(command, Open):
            try:
                self._execute(wrapper, _PROBE)
            except psycopg.Error as error:
                raise self._meaning(error) or refused(error) from error

    def is_lost(self, wrapper: Wrapper) -> bool:
        """Whether the connection is closed."""
        return wrapper.connection is None or wrapper.closed_in_transaction or bool(wrapper.connection.closed)

    def is_over(self, wrapper: Wrapper) -> bool:
        """Whether a COMMIT or ROLLBACK was sent as a statement."""
        return bool(wrapper.connection.info.transaction_status == TransactionStatus.IDLE)

    def has_failed(self, wrapper: Wrapper) -> bool:
        """Whether a statement has failed."""
        return bool(wrapper.connection.info.transaction_status == TransactionStatus.INERROR)

    def run(self, wrapper: Wrapper, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return self._in_transaction(
            wrapper,
            lambda: self._execute(wrapper, Statement(joined.query.numbered, joined.in_order, joined.read)),
        )

    def run_opening(self, wrapper: Wrapper, opening: Sequence[Joined[Any]]) -> bool:
        """Run an opening as one text. Its last statement sees what was committed before the first had the lock: each
        statement has its own snapshot.
        """
        tag = self._in_transaction(wrapper, lambda: _sent(wrapper, "; ".join(map(plain, opening))))
        self._look_at_durability(wrapper)
        return tells_clear(tag)

    def _in_transaction(self, wrapper: Wrapper, send: Callable[[], T]) -> T:
        try:
            return send()
        except psycopg.Error as error:
            self._raise_known(error)
            raise
        except Exception:
            raise  # A value that can't be sent.
        except BaseException:
            close(wrapper)
            raise

    def _raise_known(self, error: psycopg.Error) -> None:
        if is_fence(error, error.sqlstate, self._address.names):
            raise Fenced from error
        known = of_statement(error, error.sqlstate, self._address)
        if known is not None:
            raise (self._in_our_words(known) or known if isinstance(known, StoreError) else known) from error

    def commit_with(self, wrapper: Wrapper, last: Joined[Any]) -> StoreError | None:
        """Run the last statement and COMMIT."""
        if is_short(last):
            return self._commit(wrapper, f"{plain(last)}; ")
        self.run(wrapper, last)
        return self._commit(wrapper)

    def commit(self, wrapper: Wrapper) -> StoreError | None:
        """Send COMMIT; return a warning if the server says that it may not have reached a replica."""
        return self._commit(wrapper)

    def _commit(self, wrapper: Wrapper, last: str = "") -> StoreError | None:
        connection, notices = wrapper.connection, Notices()
        try:
            connection.add_notice_handler(notices.from_psycopg)
            try:
                _sent(wrapper, f"{last}COMMIT")
            finally:
                connection.remove_notice_handler(notices.from_psycopg)
        except psycopg.Error as error:
            if last and self.has_failed(wrapper):
                # COMMIT ends the transaction even if it is refused. This one is still open, so the statement failed.
                self._raise_known(error)
                raise
            known = of_commit(error, error.sqlstate, self._address, is_lost=connection.closed)
            if known is None:
                # Refused by a deferred constraint of the application: raised as Django's own error.
                with wrapper.wrap_database_errors:
                    raise
            close(wrapper)
            raise known from error
        except BaseException:
            close(wrapper)
            raise
        try:
            notices.check(self._address)
        except StoreError as said:
            return said
        return None

    def lost(self) -> StoreError:
        """Return the error of a connection that was lost before COMMIT."""
        return lost(self._address)

    def _run(self, wrapper: Wrapper, statement: Statement[T], *, is_patient: bool = True) -> T:
        """Run one statement in its own transaction. After a lost connection or a deadlock it is tried again, and the
        caller gets no error if that succeeds.
        """
        once = partial(self._run_once, wrapper, statement, is_patient=is_patient)
        return retried(once, self._address, connect=partial(self.connect, wrapper))

    def _run_once(self, wrapper: Wrapper, statement: Statement[T], *, is_patient: bool = True) -> T:
        try:
            if is_patient or wrapper.in_atomic_block:
                return self._execute(wrapper, statement)
            # It waits for another transaction, which may hang because its client has gone.
            with wrapper.connection.transaction():
                psycopg.Cursor(wrapper.connection).execute(_IMPATIENT)
                return self._execute(wrapper, statement)
        except psycopg.Error as error:
            known = self._meaning(error)
            if known is None:
                raise
            if not (isinstance(known, StoreNotReady) or wrapper.in_atomic_block):
                # The next statement needs a new connection: to a server that was restarted, or to the one
                # that is the primary now.
                self.drop(wrapper)
            raise known from error
        except Exception:
            raise  # A value that can't be sent.
        except BaseException:
            # Interrupted in the middle: the next reply on this connection would belong to another statement.
            close(wrapper)
            raise

    def _execute(self, wrapper: Wrapper, statement: Statement[T]) -> T:
        # Not the connection's own cursor class or row factory: both are the application's choice.
        cursor = psycopg.RawCursor(wrapper.connection, row_factory=tuple_row)
        cursor.execute(statement.sql.encode(), statement.parameters, binary=True)
        rows = cursor.fetchall() if cursor.description else []
        self._look_at_durability(wrapper)
        return statement.read(rows)

    def _look_at_durability(self, wrapper: Wrapper) -> None:
        if question := self._durability.question():
            # Once, after a statement that succeeded. These sessions are Django's, and are not changed.
            with suppress(psycopg.Error):  # the next statement will fail, too
                cursor = psycopg.RawCursor(wrapper.connection, row_factory=tuple_row)
                question.read(cursor.execute(question.query.numbered.encode()).fetchall())

    def _meaning(self, error: psycopg.Error) -> StoreError | None:
        return self._in_our_words(translated(error, error.sqlstate, self._address))

    def _in_our_words(self, known: StoreError | None) -> StoreError | None:
        if isinstance(known, StoreNotReady) and not isinstance(known, StoreNotPermitted):
            return no_tables(self._alias)
        return self._read_only() if isinstance(known, StoreReadOnly) else known

    def _read_only(self) -> StoreReadOnly:
        return StoreReadOnly(
            f"{self._address} takes no writes: it is a replica, or default_transaction_read_only is on for the server, "
            'the database or the role. Name the primary in SEMEL["DATABASE"], or switch it off.'
        )


_IMPATIENT = f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'".encode()


def _sent(wrapper: Wrapper, sql: str) -> str | None:
    """Send statements without parameters in one round trip; return the command tag of the last."""
    cursor = psycopg.Cursor(wrapper.connection).execute(sql.encode(), prepare=False)
    while cursor.nextset():
        pass
    return cursor.statusmessage

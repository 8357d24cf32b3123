"""How a shared transaction on PostgreSQL can go wrong and end, in Semel's words, for every driver. It sends nothing."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from semel.errors import (
    AnswerNotStored,
    CommitUnknown,
    ConfigurationError,
    Overtaken,
    SemelError,
    StoreError,
    StoreUnavailable,
)
from semel.stores.postgres.address import Address
from semel.stores.postgres.durability import FOR_TRANSACTION
from semel.stores.postgres.errors import TRANSIENT, translated
from semel.stores.postgres.joined import ENDED, FENCED, MOVED
from semel.stores.statement import Names

#: How long to wait for a connection while all are in use. A client that waits longer has given up by itself.
WAIT_SECONDS = 10
#: How long a COMMIT may take. One that waits for a synchronous replica takes as long as that is away.
COMMIT_SECONDS = 30
#: How long a ROLLBACK may take. The connection is closed then, which does the same.
ROLLBACK_SECONDS = 5

#: How there can be more of them.
MORE = "Add ?pool= with a higher number to the store's URL."
MORE_OF_THEIRS = "Raise the max_size of the pool."

#: What our own sessions are called in ``pg_stat_activity``. The rest of a session's settings is the handler's affair.
APPLICATION_NAME = "semel"

#: On connections of our own: what a handler has SET, its role among it, must not be there for the next. Sent with the
#: next BEGIN, in one round trip, and not with COMMIT: deferred triggers run then, for the user that the handler set.
RESET = "RESET ROLE; RESET ALL"
#: A pooler lends the session to others before our next BEGIN. So what is deferred is run first, and then reset.
_BEFORE_COMMIT = f"SET CONSTRAINTS ALL IMMEDIATE; {RESET}"

#: What the server says of an opening that was sent with BEGIN: nothing is in the way of the handler.
CLEAR = "SELECT 0"

#: A key that is there already, and a text that is no number.
_DUPLICATE = "23505"
_NO_NUMBER = "22P02"

FAILED_INSIDE = "a statement of this transaction had failed, so COMMIT rolled everything back; nothing was written"

#: A WARNING without a number of its own. Of those that can come with a COMMIT, one says that a synchronous replica
#: may not have it; what a trigger of the application's says comes from another function of the server's.
_WARNING = "01000"
_TRIGGERS_OWN = "exec_stmt_raise"


def commit_sql(*, is_direct: bool, is_off: bool) -> str:
    """Return how to commit on a connection of our own: *is_off*, if its COMMIT would be answered too early."""
    if is_direct:
        return "COMMIT"
    # What BEGIN has said about the disk is reset with the rest, and is for this COMMIT.
    return "; ".join(filter(None, (_BEFORE_COMMIT, FOR_TRANSACTION if is_off else None, "COMMIT")))


def tells_clear(tag: str | None) -> bool:
    """Read the command tag of an opening."""
    return tag == CLEAR


def is_fence(error: BaseException, sqlstate: str | None, names: Names) -> bool:
    """Tell whether a statement has failed because the record is not the one that was seen: there is one by now, or it
    is another's.
    """
    if sqlstate == _DUPLICATE:
        return _table_of(error) == names.table or _table_of(error.__cause__) == names.table
    return sqlstate == _NO_NUMBER and FENCED in str(error)


def is_end(error: BaseException, sqlstate: str | None) -> bool:
    """Tell whether a statement has failed because it runs in another transaction than the one that was begun for it."""
    return sqlstate == _NO_NUMBER and ENDED in str(error)


def _table_of(error: BaseException | None) -> str | None:
    name: str | None = getattr(getattr(error, "diag", error), "table_name", None)
    return name


def of_statement(error: Exception, sqlstate: str | None, address: Address) -> SemelError | None:
    """Return what an *error* of a statement of ours means; None: it is raised as it is."""
    if sqlstate == _NO_NUMBER and MOVED in str(error):
        return moved_inside()
    if sqlstate in TRANSIENT:
        # Under SERIALIZABLE or REPEATABLE READ. The whole transaction would have to be run again, not the statement.
        return Overtaken(_in_the_way(error, address))
    return translated(error, sqlstate, address)


def _in_the_way(error: Exception, address: Address) -> str:
    return f"{address}: another transaction was in the way: {' '.join(str(error).split())}"


def of_commit(error: Exception, sqlstate: str | None, address: Address, *, is_lost: bool) -> StoreError | None:
    """Return what an *error* of COMMIT means; None: the server has said no, and it is raised as it is."""
    if is_lost or isinstance(translated(error, sqlstate, address), StoreUnavailable):
        return unknown(address, error)
    # What else `translated` knows would be said of a table of ours. At COMMIT it is about a deferred trigger's.
    return Overtaken(_in_the_way(error, address)) if sqlstate in TRANSIENT else None


def unknown(address: Address, error: BaseException) -> CommitUnknown:
    """Say that the reply to a COMMIT was lost."""
    why = " ".join(str(error).split()) or type(error).__name__
    return CommitUnknown(f"{address}: the reply to COMMIT was lost: {why}")


def lost(address: Address) -> StoreUnavailable:
    """Say that the connection was lost before the COMMIT: nothing was written."""
    return StoreUnavailable(f"{address}: the connection was lost before COMMIT; nothing was written.")


def all_in_use(address: Address, count: int, how: str) -> StoreUnavailable:
    """Say that every connection was busy for too long, and *how* there can be more."""
    return StoreUnavailable(f"{address}: all {count} connections are in use, for {WAIT_SECONDS} s now. {how}")


def ended_inside() -> ConfigurationError:
    """Say that the handler has ended the transaction that was lent to it."""
    return ConfigurationError(
        "The transaction was ended inside the handler, so its record could not be committed with it. "
        "Don't COMMIT or ROLLBACK on operation.connection: Semel does, when the answer is known."
    )


def moved_inside() -> ConfigurationError:
    """Say that a handler has hidden Semel's tables."""
    return ConfigurationError(
        "The handler changed search_path, or made a temporary table, so that another table is found by the name of "
        "Semel's. Nothing was written. Name the schema in the store's URL, as in ?schema=public, and for an engine or "
        "a pool in url=; or set search_path back before the handler ends."
    )


def hang_up(connection: Any) -> None:
    """End a connection of asyncpg's or psycopg's under a COMMIT that takes too long, without a word to the server.

    A driver's own time limit, and a task that is cancelled, have the server cancel what it does. A COMMIT that waits
    for a synchronous replica is then over at once, and shown to others: what they are told is lost if that replica
    becomes the primary. Left alone, it is shown when the replica has it, and until then its locks keep others away.
    """
    if hasattr(connection, "terminate"):
        with suppress(Exception):
            connection.terminate()
    elif hasattr(connection, "pgconn"):
        # Not closed: who waits for it waits for its socket.
        with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)


class Notices:
    """What the server says beside its reply to one COMMIT."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.is_not_replicated = False

    def from_psycopg(self, said: Any) -> None:
        """Hear a ``psycopg.errors.Diagnostic``."""
        self._hear(said.sqlstate, said.source_function)

    def from_asyncpg(self, _connection: Any, said: Any) -> None:
        """Hear an ``asyncpg.PostgresLogMessage``."""
        self._hear(said.sqlstate, getattr(said, "server_source_function", None))

    def check(self, address: Address) -> None:
        """Raise ``AnswerNotStored`` where the commit may not outlive this server."""
        if self.is_not_replicated:
            raise AnswerNotStored(f"{address} has committed, but the commit may not have reached the replica.")

    def _hear(self, sqlstate: str | None, function: str | None) -> None:
        if sqlstate == _WARNING and function != _TRIGGERS_OWN:
            self.is_not_replicated = True

"""Whether a connection is to the server itself, or to a pooler such as PgBouncer. It opens none.

A pooler in transaction mode lends a client one of its own connections for each transaction, and the next transaction
may be on another. So what belongs to a session is lost or, worse, another session's: prepared statements, SET, LISTEN,
advisory locks that outlive a transaction. What belongs to a transaction works.

How to tell: a server says in its greeting which of its processes serves this connection. A pooler greets its clients
before it knows, with a number that it has made up, and the process itself says another. A pooler in session mode is
told apart from a server by this too, though it need not be: no harm, but some speed.
"""

from __future__ import annotations

from typing import Any

from semel.stores.postgres.address import CONNECT_SECONDS, SESSION
from semel.stores.postgres.durability import FOR_TRANSACTION_IF_OFF

_NOT_LOCAL = frozenset({"application_name", "default_transaction_isolation"})
#: Begins a transaction with what a session of ours would have, all but its name.
BEGIN = "; ".join(
    ["BEGIN ISOLATION LEVEL READ COMMITTED"]
    + [f"SET LOCAL {name} = '{value}'" for name, value in SESSION.items() if name not in _NOT_LOCAL]
    + [FOR_TRANSACTION_IF_OFF]
)

_IT_IS = "SELECT 1"


def question(greeted: int) -> str:
    """Return a statement of which the command tag tells whether process *greeted* is the one that serves us.

    The tag, not a row: asyncpg reads rows through a prepared statement only.
    """
    return f"SELECT WHERE pg_backend_pid() = {greeted:d}"


def is_yes(tag: str | None) -> bool:
    """Read the command tag of ``question``."""
    return tag == _IT_IS


def is_direct(connection: Any) -> bool:
    """Ask on a connection of psycopg's. One that does not answer is closed."""
    try:
        return is_yes(connection.execute(question(connection.info.backend_pid), prepare=False).statusmessage)
    except BaseException:
        connection.close()
        raise


async def is_direct_async(connection: Any) -> bool:
    """Ask on a connection of asyncpg's. One that does not answer is closed."""
    try:
        return is_yes(await connection.execute(question(connection.get_server_pid()), timeout=CONNECT_SECONDS))
    except BaseException:
        connection.terminate()
        raise

"""Whether a session's COMMIT is answered before it is on the disk, and what is done about it. It opens no connection.

With ``synchronous_commit = off``, as a role, a database or a server may have it, a server that crashes forgets commits
that it has reported: claims are taken twice, and answers that were sent are gone. So sessions of Semel's own turn it
on. Only *off* is changed: *local* and *remote_write* are on this server's disk, and what a fail-over may lose then is
the operator's choice; *remote_apply* waits for more than *on* does.
"""

from __future__ import annotations

import logging
from typing import Any

from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.statement import Joined, Query

_logger = logging.getLogger("semel")

_IS_OFF = "current_setting('synchronous_commit') = 'off'"
#: Its command tag tells, as in ``pooler.py``.
_QUESTION = f"SELECT WHERE {_IS_OFF}"
_YES = "SELECT 1"
_SHOW = Query("SHOW synchronous_commit")

#: For one transaction. It needs no snapshot, so the transaction's isolation can still be chosen after it.
FOR_TRANSACTION = "SET LOCAL synchronous_commit = on"
#: The same where it is not known whether it is off.
FOR_TRANSACTION_IF_OFF = f"SELECT set_config('synchronous_commit', 'on', true) WHERE {_IS_OFF}"
#: For a session, if it is off.
FOR_SESSION_IF_OFF = f"SELECT set_config('synchronous_commit', 'on', false) WHERE {_IS_OFF}"

WARNING = (
    "%s has synchronous_commit = off for the transactions that your handlers write in: a COMMIT is answered before it "
    "is on the disk, so after a crash of the server an operation that was answered may never have happened. Set it to "
    "on for this role, or in the settings of your connections."
)


class Durability:
    """Looks once whether the application's own transactions are durable, and says so where they are not."""

    def __init__(self, address: Address) -> None:
        """Name *address* in what is said."""
        self._address = address
        self._has_looked = False

    def question(self) -> Joined[None] | None:
        """Return what to ask in a transaction of the application's; None: it was asked already."""
        if self._has_looked:
            return None
        self._has_looked = True
        # It needs no snapshot, as above.
        return Joined(_SHOW, {}, lambda rows: self.note(rows[0][0]))

    def note(self, value: str) -> None:
        """Take note of what ``synchronous_commit`` is there."""
        if value == "off":
            _logger.warning(WARNING, self._address)


def is_off(connection: Any) -> bool:
    """Ask on a connection of psycopg's. One that does not answer is closed."""
    try:
        return bool(connection.execute(_QUESTION, prepare=False).statusmessage == _YES)
    except BaseException:
        connection.close()
        raise


async def is_off_async(connection: Any) -> bool:
    """Ask on a connection of asyncpg's. One that does not answer is closed."""
    try:
        return bool(await connection.execute(_QUESTION, timeout=CONNECT_SECONDS) == _YES)
    except BaseException:
        connection.terminate()
        raise

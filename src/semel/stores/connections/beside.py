"""What an application does over other connections of its engine, beside a transaction of ours. SQLAlchemy's events tell
of it, and it is logged once; nothing is changed or refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, event

#: The connection of the transaction that the code of this context was lent last.
_lent: ContextVar[Connection | None] = ContextVar("semel.sqlalchemy.lent", default=None)

#: How a statement begins that writes, and to which table: what the log may show of it.
_WRITES = re.compile(r"\s*((?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO)\s+[\w.\"]+)", re.IGNORECASE)
#: Of so many tables the log has a line.
MAX_TOLD = 20

_TWO = (
    "%r: a request has two connections of this pool at once, that of its operation and one of another session: a "
    "login's, or its handler's. As many such requests as the pool has connections wait for each other until "
    "pool_timeout. End the login's session before the guard (in the login itself, `async with sessions() as session:`, "
    "and not by a dependency that yields it), and use semel.current().connection in the handler; or give the other "
    "session an engine of its own."
)
_BESIDE = (
    "%r: a handler wrote beside the transaction of its operation (%s), over another connection. That is not committed "
    "with the answer: after a crash in between, a retry writes it again. Write through semel.current().connection, or "
    "through what the phase is given."
)

_logger = logging.getLogger("semel")


class Watch:
    """What is seen of one engine, from its first transaction of ours on."""

    def __init__(self, engine: Engine) -> None:
        """See nothing yet."""
        self._engine = engine
        self._is_on = False
        # Only those who share a pool with a bound wait for each other.
        self._has_told_of_two = not isinstance(engine.pool, QueuePool)
        #: Which task or thread has which connection out of the pool.
        self._holders: dict[Any, object] = {}
        self._told: set[str] = set()

    def before(self) -> None:
        """Look whether the caller, who is about to wait for a connection, has one."""
        if not self._is_on:
            self._is_on = True
            event.listen(self._engine, "before_cursor_execute", self._execute)
            event.listen(self._engine, "checkout", self._out)
            event.listen(self._engine, "checkin", self._back)
            event.listen(self._engine, "detach", self._back)
        elif not self._has_told_of_two and _holder() in tuple(self._holders.values()):
            self._tell_of_two()

    def lend(self, connection: Connection) -> None:
        """Take note of what the code of this context is to write over."""
        _lent.set(connection)

    def _out(self, _connection: object, record: object, _proxy: object) -> None:
        if self._has_told_of_two:
            return
        self._holders[record] = _holder()
        lent = _lent.get()
        if lent is not None and not lent.closed and lent.engine is self._engine:
            self._tell_of_two()

    def _back(self, _connection: object, record: object) -> None:
        self._holders.pop(record, None)

    def _tell_of_two(self) -> None:
        self._has_told_of_two = True
        self._holders.clear()
        _logger.warning(_TWO, self._engine.url)

    def _execute(self, connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        lent = _lent.get()
        if lent is None or connection is lent or lent.closed or lent.engine is not connection.engine:
            return
        found = _WRITES.match(statement)
        if found is not None and len(self._told) < MAX_TOLD and found[1] not in self._told:
            self._told.add(found[1])
            _logger.warning(_BESIDE, self._engine.url, found[1])


def _holder() -> object:
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()

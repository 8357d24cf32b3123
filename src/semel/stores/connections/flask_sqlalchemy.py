"""Transactions on Flask-SQLAlchemy: the request's own ``db.session`` is lent, so a view writes as it always did. No
second session is made: what the login has loaded belongs to the first.

While it is lent, the session works in a savepoint on the transaction's connection. Before, whatever it had open is
committed: it was begun before the guarded view, and its connection goes back to the pool. Afterwards it is as it was.
"""

from __future__ import annotations

from typing import Any, Self, cast

from semel.core.commands import Begin, Open
from semel.core.record import Found
from semel.errors import ConfigurationError
from semel.stores.connections.sqlalchemy import SQLAlchemyConnections
from semel.stores.transaction import Connections, Unit

try:
    from flask import g, has_app_context
    from flask_sqlalchemy import SQLAlchemy
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy.orm import Session
except ImportError as error:  # pragma: no cover - seen only where the package is missing
    raise ImportError("db.session needs Flask-SQLAlchemy 3. Run: pip install flask-sqlalchemy") from error

#: Where the lent connection is found, in the application context that the session belongs to.
_LENT = "_semel_lent"


class FlaskSQLAlchemyConnections(Connections):
    """Transactions for views that use ``db.session``, which is also what ``operation.connection`` is."""

    def __init__(self, given: SQLAlchemy, url: str | None = None) -> None:
        """Take connections from the default engine that *given* has for the current app; *url* names it in messages."""
        self._db = given
        self._connections = SQLAlchemyConnections(cast("Any", _Lender(given, given.engine)), url)
        self.opener = self._connections.opener
        if not event.contains(given.session, "after_begin", _stay_inside):
            event.listen(given.session, "after_begin", _stay_inside)

    @classmethod
    def of(cls, given: SQLAlchemy, url: str | None = None) -> Self:
        """Take connections from the extension of the application's."""
        return cls(given, url)

    @staticmethod
    def url_of(given: SQLAlchemy) -> str:
        """Return where its default engine connects to."""
        return SQLAlchemyConnections.url_of(given.engine)

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit | Found:
        """Begin a transaction, unless what is there makes it needless."""
        # First of all: a request that waits for a second connection while it has one can wait for others that do, too.
        self._db.session.commit()
        begun = self._connections.begin(command, opening)
        if isinstance(begun, Unit):
            begun.connection = self._db.session()
        return begun

    def close(self) -> None:
        """Close what is not the engine's."""
        self._connections.close()


def undo_uncommitted() -> None:
    """Undo what a guarded view has not committed: it has raised, and the end of its request would have undone it."""
    lent: _LentSession | None = g.get(_LENT)
    if lent is not None:
        lent.session.rollback()


class _Lender:
    """What stands in for a sessionmaker: it makes no session, and lends the request's own."""

    def __init__(self, db: SQLAlchemy, engine: Engine) -> None:
        self._db = db
        self.kw = {"bind": engine}

    def __call__(self, *, bind: Connection, join_transaction_mode: Any) -> _LentSession:
        return _LentSession(self._db.session(), bind, join_transaction_mode)


class _LentSession:
    """A session of the application's, on the transaction's connection until it is closed."""

    def __init__(self, session: Session, connection: Connection, mode: Any) -> None:
        self.session = session
        self.connection = connection
        self._mode_before = session.join_transaction_mode
        self._is_lent = True
        session.join_transaction_mode = mode
        choose = session.get_bind

        def get_bind(*args: Any, **kwargs: Any) -> Engine | Connection:
            chosen = choose(*args, **kwargs)
            return connection if chosen is connection.engine else chosen

        # Flask-SQLAlchemy's session asks its engines and not its bind, so it is to be met where it asks.
        vars(session)["get_bind"] = get_bind
        setattr(g, _LENT, self)

    def flush(self) -> None:
        self.session.flush()

    def in_transaction(self) -> bool:
        return self.session.in_transaction()

    def commit(self) -> None:
        self.session.commit()

    def close(self) -> None:
        """Undo what is not committed, and give the session back. What it has loaded stays in it."""
        if not self._is_lent:
            return
        self._is_lent = False
        try:
            self.session.rollback()
        except BaseException:
            self.session.invalidate()
            raise
        finally:
            vars(self.session).pop("get_bind", None)
            self.session.join_transaction_mode = self._mode_before
            g.pop(_LENT, None)


def _stay_inside(_session: Session, _transaction: object, connection: Connection) -> None:
    """Refuse a session that would write beside the transaction it belongs in."""
    lent: _LentSession | None = g.get(_LENT) if has_app_context() else None
    if lent is not None and connection.engine is lent.connection.engine and connection is not lent.connection:
        raise ConfigurationError(
            "db.session.remove() was called inside a guarded view, and another session would write outside its "
            "transaction. Use db.session.rollback() or close(); the session is removed when the request ends."
        )

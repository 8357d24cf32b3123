"""Transactions for handlers, as Django's ``atomic`` blocks: what the ORM writes in the same thread is in them. Which
statements join them, and what their errors mean, is in ``postgres.py`` and ``sqlite.py``.

Django's own state is kept as Django would have it, so that ``on_commit``, ``set_rollback`` and inner ``atomic`` blocks
work as usual. Only COMMIT is sent here directly: Django's error would not distinguish a COMMIT that was refused from
one without a reply.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from django.db.transaction import TransactionManagementError

from semel.core.commands import Begin, Command, Open
from semel.core.key import Key
from semel.core.record import Found
from semel.errors import CommitUnknown, ConfigurationError, StoreError, StoreNotReady
from semel.stores.connections.endings import FAILED_INSIDE, ended_inside
from semel.stores.django.wrapper import Block, Opened, Standing, Wrapper, close, standing_of, wrapper_of
from semel.stores.statement import Joined
from semel.stores.transaction import Connections, JoinedStatements, Unit

T = TypeVar("T")

_logger = logging.getLogger("semel")


class Database(ABC):
    """One Django database, for one alias. Errors of the store are raised as Semel's own exceptions."""

    #: Whether there is a ``commit_with``.
    pipelines: bool = False

    @abstractmethod
    def connect(self, wrapper: Wrapper) -> None:
        """Connect, and check that the driver is supported."""

    def drop(self, wrapper: Wrapper) -> None:
        """Close a broken connection. Never raises."""
        close(wrapper)

    @abstractmethod
    def carry_out(self, wrapper: Wrapper, command: Command[T], *, is_nested: bool) -> T:
        """Carry out one command: in its own transaction, or *nested* in that of a test."""

    @abstractmethod
    def check(self, wrapper: Wrapper) -> None:
        """Raise if the tables are missing, or can't be written."""

    @abstractmethod
    def joined(self) -> JoinedStatements:
        """Return the statements that join."""

    @abstractmethod
    def start(self, wrapper: Wrapper, command: Begin | Open) -> Found | None:
        """Note that a transaction of this process has a key, and wait for its turn; or return why it need not run."""

    @abstractmethod
    def stop(self, command: Begin | Open) -> None:
        """Note that it has ended, in any way."""

    @abstractmethod
    def begin(self, wrapper: Wrapper, block: Block, command: Begin | Open) -> None:
        """Enter *block*, the outermost, and begin the transaction, which Django itself would delay."""

    @abstractmethod
    def is_lost(self, wrapper: Wrapper) -> bool:
        """Whether the connection is closed."""

    @abstractmethod
    def is_over(self, wrapper: Wrapper) -> bool:
        """Whether the handler has ended the transaction by its own statement."""

    @abstractmethod
    def has_failed(self, wrapper: Wrapper) -> bool:
        """Whether a statement has failed, so that the transaction can only be rolled back."""

    @abstractmethod
    def run(self, wrapper: Wrapper, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""

    def run_opening(self, wrapper: Wrapper, opening: Sequence[Joined[Any]]) -> bool:
        """Run an opening in one round trip; return whether the handler can run."""
        raise NotImplementedError  # pragma: no cover - asked only where the statements have an opening

    def commit_with(self, wrapper: Wrapper, last: Joined[Any]) -> StoreError | None:
        """Run the last statement and COMMIT, in one round trip; return the same as ``commit``. Raises ``Fenced``."""
        raise NotImplementedError  # pragma: no cover - asked only where the statements have an opening

    @abstractmethod
    def commit(self, wrapper: Wrapper) -> StoreError | None:
        """Send COMMIT; return a warning of the server, if there is one that matters."""

    @abstractmethod
    def lost(self) -> StoreError:
        """Return the error of a connection that was lost before COMMIT."""


def no_tables(alias: str) -> StoreNotReady:
    """Return the error of missing tables, with the command that makes them."""
    return StoreNotReady(
        f'DATABASES["{alias}"] has no tables of Semel, or old ones. Run: python manage.py migrate semel '
        f"--database={alias} (first with `zero --fake` if SEMEL named another database before)."
    )


class DjangoConnections(Connections):
    """Transactions on the calling thread's own connection."""

    def __init__(self, alias: str, database: Database) -> None:
        """Nothing is begun yet."""
        self._alias = alias
        self._database = database

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit | Found:
        """Begin a transaction, unless what is there makes it unnecessary."""
        wrapper, database = wrapper_of(self._alias), self._database
        opened = Opened(wrapper)
        try:
            database.connect(wrapper)
            standing = _outermost(wrapper)
            found = database.start(wrapper, command)
        except BaseException:
            opened.tidy()
            raise
        if found is not None:
            opened.tidy()
            return found
        unit = DjangoUnit(wrapper, database, command, opened, is_nested=standing is Standing.IN_TEST)
        try:
            unit.begin(opening)
        except BaseException:
            unit.rollback()
            raise
        return unit

    def close(self) -> None:
        """Do nothing: the connections are Django's."""


def _outermost(wrapper: Wrapper) -> Standing:
    standing = standing_of(wrapper)
    if standing is Standing.LENT:
        raise ConfigurationError(
            "A guarded operation was begun inside the transaction of another. Begin it before or after; "
            "or, in an async app, serve each request in its own thread (ThreadSensitiveContext)."
        )
    return standing


class _Undone(Exception):
    """Tells Django to roll back."""


class DjangoUnit(Unit):
    """One transaction; ``connection`` is ``django.db.connections[alias]`` of the thread that it was begun in."""

    def __init__(
        self,
        wrapper: Wrapper,
        database: Database,
        command: Begin | Open,
        opened: Opened,
        *,
        is_nested: bool,
    ) -> None:
        """Nothing is begun yet. *nested*: in the transaction of a test."""
        self.connection = wrapper
        self._database = database
        self._command = command
        self._opened = opened
        self._block = Block(wrapper.alias, savepoint=True, durable=True)
        self._is_nested = is_nested
        #: Whether its first statement, which is Semel's, is still to come. After an Open there was one.
        self._is_untouched = isinstance(command, Begin)
        self._has_ended = False

    def begin(self, opening: Sequence[Joined[Any]] | None) -> None:
        """Begin it, and check by *opening*, if there is one, whether the handler can run."""
        self._database.begin(self.connection, self._block, self._command)
        # Without an opening, beginning takes the lock.
        self.has_lock = opening is None
        if opening is not None:
            self.has_lock = self.is_clear = self._send(lambda: self._database.run_opening(self.connection, opening))
        # In the transaction of a test there is nothing to commit.
        self.pipelines = self._database.pipelines and not self._is_nested

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return self._send(lambda: self._database.run(self.connection, joined))

    def _send(self, send: Callable[[], T]) -> T:
        self._check(may_be_inside=True)
        was_untouched, self._is_untouched = self._is_untouched, False
        try:
            return send()
        except StoreError:
            # The first statement may fail because the server was restarted since the connection was last used.
            if self._is_nested or not was_untouched or not self._database.is_lost(self.connection):
                raise
        self._database.drop(self.connection)
        self._leave(_Undone())
        self._block = Block(self.connection.alias, savepoint=True, durable=True)
        self._database.connect(self.connection)
        self._database.begin(self.connection, self._block, self._command)
        return send()

    def commit_with(self, last: Joined[Any]) -> None:
        """Run the last statement and commit; then run the ``on_commit`` functions."""
        self._commit(lambda: self._database.commit_with(self.connection, last))

    def commit(self) -> None:
        """Commit; then run the ``on_commit`` functions."""
        self._commit(lambda: self._database.commit(self.connection))

    def _commit(self, commit: Callable[[], StoreError | None]) -> None:
        wrapper = self.connection
        waiting: list[Any] = []
        said: StoreError | None = None
        try:
            self._check()
            if self._is_nested:
                self._leave(None)
            else:
                # Removed, so that an error in one of them is not mistaken for an error of the commit.
                waiting, wrapper.run_on_commit = wrapper.run_on_commit, []
                said = commit()
        except BaseException as error:
            if isinstance(error, CommitUnknown) and waiting:
                names = ", ".join(_name(function) for _, function, *_ in waiting)
                _logger.warning(
                    "%d on_commit functions were not run (%s): %s%s", len(waiting), names, error, self._of()
                )
            self.rollback()
            raise
        try:
            self._leave(None)
        except Exception:  # noqa: BLE001 - all is committed; the next use gets another connection
            close(wrapper)
        self._end(waiting)
        if said is not None:
            raise said

    def rollback(self) -> None:
        """Roll back. Never raises; a broken connection is closed."""
        if self._has_ended:
            return
        try:
            if self._database.is_lost(self.connection):
                close(self.connection)
            self._leave(_Undone())
        except Exception:  # noqa: BLE001 - whatever it was, closing does the same
            self._tear_off()
        except BaseException:
            self._tear_off()
            raise
        finally:
            self._end([])

    def _check(self, *, may_be_inside: bool = False) -> None:
        """Raise if there is nothing that could be committed. A handler that publishes *may be inside* of other blocks:
        a view has one of its own (``django/atomicity.py``).
        """
        wrapper = self.connection
        if self._database.is_lost(wrapper):
            raise self._database.lost()
        if wrapper.needs_rollback or self._database.has_failed(wrapper):
            raise TransactionManagementError(FAILED_INSIDE) from wrapper.rollback_exc
        is_ours = self._block in (wrapper.atomic_blocks if may_be_inside else wrapper.atomic_blocks[-1:])
        if not is_ours or (not self._is_untouched and self._database.is_over(wrapper)):
            raise ended_inside()

    def _leave(self, error: _Undone | None) -> None:
        """Leave the block, and the inner blocks that the handler has not left."""
        blocks = self.connection.atomic_blocks
        while self._block in blocks:
            blocks[-1].__exit__(type(error) if error else None, error, None)
            blocks = self.connection.atomic_blocks

    def _tear_off(self) -> None:
        """Close the connection, and reset Django's state of its blocks."""
        close(self.connection)
        with suppress(Exception):
            self._leave(_Undone())

    def _end(self, waiting: list[Any]) -> None:
        """Pass the turn on, run the ``on_commit`` functions, and close the connection if it has to be closed."""
        if self._has_ended:
            return
        self._has_ended = True
        self._database.stop(self._command)
        try:
            if waiting:
                self._run_all(waiting)
        finally:
            self._opened.tidy()

    def _run_all(self, waiting: list[Any]) -> None:
        """Run the ``on_commit`` functions. The answer is committed, and is what the client gets now and on a retry: an
        error here is logged. As always in Django, the functions after the one that failed are not run.
        """
        wrapper = self.connection
        wrapper.run_on_commit = waiting
        try:
            wrapper.run_and_clear_commit_hooks()
        except Exception:
            _logger.exception(
                "A function given to on_commit failed. The transaction itself is committed.%s", self._of()
            )

    def _of(self) -> str:
        """Return which operation it is, for the log. Of a phase it is not known here."""
        return f" key={Key(self._command.claim.key).short()}" if isinstance(self._command, Begin) else ""


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))

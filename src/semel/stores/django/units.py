"""Transactions for handlers, as ``atomic`` blocks of Django's: what the ORM writes in the same thread is in them by
itself. Which statements join, and what goes wrong with them, is for the databases to say.

Django's own state is kept as Django would have it, so that ``on_commit``, ``set_rollback`` and inner ``atomic`` blocks
mean what they always mean. Only COMMIT is said here by name: what Django makes of its failure does not tell a
transaction that was refused from one whose reply was lost.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from django.db.transaction import TransactionManagementError

from semel.core.commands import Begin, Command, Open
from semel.core.record import Found
from semel.errors import CommitUnknown, ConfigurationError, StoreError, StoreNotReady
from semel.stores.connections.endings import FAILED_INSIDE, ended_inside
from semel.stores.django.wrapper import Block, Opened, Standing, Wrapper, close, standing_of, wrapper_of
from semel.stores.statement import Joined
from semel.stores.transaction import Connections, JoinedStatements, Unit

T = TypeVar("T")

_logger = logging.getLogger("semel")


class Database(ABC):
    """One database below Django, for one alias. Errors that are the store's affair are raised in Semel's words."""

    #: Whether there is a ``commit_with``.
    pipelines: bool = False

    @abstractmethod
    def connect(self, wrapper: Wrapper) -> None:
        """See that there is a connection, of a driver that is known."""

    def drop(self, wrapper: Wrapper) -> None:
        """Close a connection that is broken. Never raises."""
        close(wrapper)

    @abstractmethod
    def carry_out(self, wrapper: Wrapper, command: Command[T], *, is_nested: bool) -> T:
        """Carry out one command: in a transaction of its own, or *nested* in that of a test."""

    @abstractmethod
    def check(self, wrapper: Wrapper) -> None:
        """Raise where the tables are missing, or can't be written."""

    @abstractmethod
    def joined(self) -> JoinedStatements:
        """Return the statements that join."""

    @abstractmethod
    def start(self, wrapper: Wrapper, command: Begin | Open) -> Found | None:
        """Set down that a transaction of this process is at a key, and wait for its turn; or say why it need not."""

    @abstractmethod
    def stop(self, command: Begin | Open) -> None:
        """Set down that it has ended, however it ended."""

    @abstractmethod
    def begin(self, wrapper: Wrapper, block: Block, command: Begin | Open) -> None:
        """Enter *block*, outermost, and begin what Django has only promised."""

    @abstractmethod
    def is_lost(self, wrapper: Wrapper) -> bool:
        """Whether there is no connection any more."""

    @abstractmethod
    def is_over(self, wrapper: Wrapper) -> bool:
        """Whether somebody has ended the transaction by a statement of their own."""

    @abstractmethod
    def has_failed(self, wrapper: Wrapper) -> bool:
        """Whether a statement has failed, so that the transaction can only be rolled back."""

    @abstractmethod
    def run(self, wrapper: Wrapper, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""

    def run_opening(self, wrapper: Wrapper, opening: Sequence[Joined[Any]]) -> bool:
        """Run an opening in one round trip; say whether nothing is in the way."""
        raise NotImplementedError  # pragma: no cover - asked only where the statements have an opening

    def commit_with(self, wrapper: Wrapper, last: Joined[Any]) -> StoreError | None:
        """Run the last statement and say COMMIT, in one round trip; return as ``commit``. Raises ``Fenced``."""
        raise NotImplementedError  # pragma: no cover - asked only where the statements have an opening

    @abstractmethod
    def commit(self, wrapper: Wrapper) -> StoreError | None:
        """Say COMMIT; return what was said beside, where it matters."""

    @abstractmethod
    def lost(self) -> StoreError:
        """Say that the connection was lost before COMMIT."""


def no_tables(alias: str) -> StoreNotReady:
    """Say that there are no tables, and what makes them."""
    return StoreNotReady(
        f'DATABASES["{alias}"] has no tables of Semel\'s, or old ones. Run: python manage.py migrate semel '
        f"--database={alias} (first with `zero --fake` where SEMEL named another database before)."
    )


class DjangoConnections(Connections):
    """Transactions on the calling thread's own connection."""

    def __init__(self, alias: str, database: Database) -> None:
        """Nothing is begun yet."""
        self._alias = alias
        self._database = database

    def begin(self, command: Begin | Open, opening: Any = None) -> Unit | Found:
        """Begin a transaction, unless what is there makes it needless."""
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
        """Nothing is ours."""


def _outermost(wrapper: Wrapper) -> Standing:
    standing = standing_of(wrapper)
    if standing is Standing.LENT:
        raise ConfigurationError(
            "A guarded operation was begun inside another, in the transaction of that one. Begin it before or after; "
            "or, in an async app, serve each request in a thread of its own (ThreadSensitiveContext)."
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
        #: Whether its first statement is still to come, which is ours. After an Open there was one.
        self._is_untouched = isinstance(command, Begin)
        self._has_ended = False

    def begin(self, opening: Sequence[Joined[Any]] | None) -> None:
        """Begin it, and look whether the handler can be run, where *opening* tells."""
        self._database.begin(self.connection, self._block, self._command)
        # Without an opening, to begin is to have the lock.
        self.has_lock = opening is None
        if opening is not None:
            self.has_lock = self.is_clear = self._send(lambda: self._database.run_opening(self.connection, opening))
        # In the transaction of a test there is nothing to commit.
        self.pipelines = self._database.pipelines and not self._is_nested

    def run(self, joined: Joined[T]) -> T:
        """Run one statement in the transaction."""
        return self._send(lambda: self._database.run(self.connection, joined))

    def _send(self, send: Callable[[], T]) -> T:
        self._check()
        was_untouched, self._is_untouched = self._is_untouched, False
        try:
            return send()
        except StoreError:
            # The first statement may find that the server was restarted since the connection was last used.
            if self._is_nested or not was_untouched or not self._database.is_lost(self.connection):
                raise
        self._database.drop(self.connection)
        self._leave(_Undone())
        self._block = Block(self.connection.alias, savepoint=True, durable=True)
        self._database.connect(self.connection)
        self._database.begin(self.connection, self._block, self._command)
        return send()

    def commit_with(self, last: Joined[Any]) -> None:
        """Run the last statement and commit; then run what waits for that with ``on_commit``."""
        self._commit(lambda: self._database.commit_with(self.connection, last))

    def commit(self) -> None:
        """Commit; then run what waits for that with ``on_commit``."""
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
                # Taken away, so that what goes wrong with them is not taken for the commit's own trouble.
                waiting, wrapper.run_on_commit = wrapper.run_on_commit, []
                said = commit()
        except BaseException as error:
            if isinstance(error, CommitUnknown) and waiting:
                _logger.warning("%d on_commit functions were not run: %s", len(waiting), error)
            self.rollback()
            raise
        try:
            self._leave(None)
        except Exception:  # noqa: BLE001 - all is committed; whoever comes next gets another connection
            close(wrapper)
        self._end(waiting)
        if said is not None:
            raise said

    def rollback(self) -> None:
        """Roll back. Never raises; what is broken is closed."""
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

    def _check(self) -> None:
        """Raise where there is nothing that could be committed."""
        wrapper = self.connection
        if self._database.is_lost(wrapper):
            raise self._database.lost()
        if wrapper.needs_rollback or self._database.has_failed(wrapper):
            raise TransactionManagementError(FAILED_INSIDE) from wrapper.rollback_exc
        is_ours = bool(wrapper.atomic_blocks) and wrapper.atomic_blocks[-1] is self._block
        if not is_ours or (not self._is_untouched and self._database.is_over(wrapper)):
            raise ended_inside()

    def _leave(self, error: _Undone | None) -> None:
        """Leave the block, and with it those inside which the handler has not left."""
        blocks = self.connection.atomic_blocks
        while self._block in blocks:
            blocks[-1].__exit__(type(error) if error else None, error, None)
            blocks = self.connection.atomic_blocks

    def _tear_off(self) -> None:
        """Close the connection, and have Django forget the blocks that it was in."""
        close(self.connection)
        with suppress(Exception):
            self._leave(_Undone())

    def _end(self, waiting: list[Any]) -> None:
        """Give the turn on, run what waits for the commit, and see to the connection."""
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
        error here is for the log. As ever in Django, the functions after the one that failed are not run.
        """
        wrapper = self.connection
        wrapper.run_on_commit = waiting
        try:
            wrapper.run_and_clear_commit_hooks()
        except Exception:
            _logger.exception("A function given to on_commit failed. What it waited for is committed all the same.")

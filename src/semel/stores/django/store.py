"""The store in one of Django's databases, for threads. Each command goes over the calling thread's own connection.
Semel does not touch test databases, routers, backends, passwords and limits: they are Django's.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TypeVar

from django.core.management import call_command
from django.db import transaction

from semel.core.commands import Claim, Command, Now, Renew, TakeOver
from semel.core.record import Hold
from semel.core.trail import Audit
from semel.errors import ConfigurationError, SemelError
from semel.stores.base import Store, this_process
from semel.stores.batching import refused
from semel.stores.dialect import Dialect
from semel.stores.django import schema
from semel.stores.django.units import Database, DjangoConnections
from semel.stores.django.wrapper import (
    Opened,
    Standing,
    Wrapper,
    is_test_run,
    name_of,
    standing_of,
    wrapper_of,
)
from semel.stores.endings import Endings
from semel.stores.forks import importing
from semel.stores.statement import Names
from semel.stores.transaction import JoinedStatements, Transaction

T = TypeVar("T")

#: Each is imported on first use: its driver is an extra.
_DATABASES = {
    "postgresql": ("semel.stores.django.postgres", "Postgres"),
    "sqlite": ("semel.stores.django.sqlite", "SQLite"),
}

#: Commands that are allowed in the middle of a handler's transaction: they write nothing, and do not depend on it.
_HARMLESS = frozenset({Now})


class _Unadded(Endings):
    """Adds nothing: a thread beside a test would write to its database, and after the last test to the real one."""

    def begin(self) -> None:
        """Do not begin."""


class DjangoStore(Store):
    """Records in Django's database *alias*."""

    is_callers = True

    def __init__(self, alias: str = "default", *, audit: Audit = "on") -> None:
        """Nothing is connected yet."""
        self.alias = alias
        self.notes_replays = audit == "replays"
        self._audit: Audit = audit
        self._databases: dict[str, Database] = {}
        #: Claimed inside the transaction of a test: no other process can see them, or take them over.
        self._sheltered: set[Hold] = set()

    @cached_property
    def ended(self) -> Endings:
        """How many requests of this process have ended how. In a test run, the store's counts stay as they are."""
        return _Unadded(self) if is_test_run() else Endings(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command, in its own transaction."""
        if isinstance(command, Renew) and self._sheltered:
            command = Renew(tuple(each for each in command.holds if each[0] not in self._sheltered))  # type: ignore[assignment]  # of the same kind
        wrapper = wrapper_of(self.alias)
        opened = Opened(wrapper)
        try:
            database = self._database(wrapper)
            database.connect(wrapper)
            return self._carry_out(database, wrapper, command)
        finally:
            opened.tidy()

    @property
    def dialect(self) -> Dialect:
        """The database, with the usual tables."""
        vendor = str(wrapper_of(self.alias).vendor)
        self._database(wrapper_of(self.alias))  # Says so where it is none that is known.
        return Dialect(vendor, Names(), has_trail=self._audit != "off", where=f'DATABASES["{self.alias}"]')

    def transaction(self) -> Transaction:
        """Return a transaction for the application, on ``django.db.connections[alias]``; not begun yet."""
        return Transaction(*self.parts())

    def parts(self) -> tuple[DjangoConnections, JoinedStatements]:
        """Return the parts of a transaction, sync or async."""
        database = self._database(wrapper_of(self.alias))
        return DjangoConnections(self.alias, database), database.joined()

    def open(self) -> None:
        """Check whether the tables are there, and can be written."""
        wrapper = wrapper_of(self.alias)
        opened = Opened(wrapper)
        try:
            database = self._database(wrapper)
            database.connect(wrapper)
            database.check(wrapper)
        finally:
            opened.tidy()

    def ping(self) -> None:
        """As in ``Store``. Nothing else is asked: there may be a transaction of the application's around it."""
        self.open()

    def migrate(self) -> list[str]:
        """Do what ``manage.py migrate semel`` does; return which of Semel's own migrations were applied."""
        wrapper = wrapper_of(self.alias)
        before = schema.applied(wrapper)
        call_command("migrate", "semel", database=self.alias, verbosity=0, interactive=False)
        return [each for each in schema.applied(wrapper) if each not in before]

    def close(self) -> None:
        """Add what was counted. The connections are Django's."""
        self.ended.close()

    def _database(self, wrapper: Wrapper) -> Database:
        vendor: str = wrapper.vendor
        if vendor not in self._databases:
            self._databases[vendor] = self._made(wrapper, vendor)
        return self._databases[vendor]

    def _made(self, wrapper: Wrapper, vendor: str) -> Database:
        if vendor not in _DATABASES:
            raise ConfigurationError(
                f"{name_of(wrapper)} is {wrapper.display_name}. Semel keeps its records in PostgreSQL or SQLite: name "
                'one of these in SEMEL["DATABASE"], or give a store of its own in SEMEL["STORE"].'
            )
        module, name = _DATABASES[vendor]
        try:
            with importing:
                kind = getattr(import_module(module), name)
        except ImportError as error:
            raise ConfigurationError(f"{name_of(wrapper)}: {error}") from error
        made: Database = kind(self.alias, audit=self._audit, actor=self._author)
        return made

    def _author(self) -> str:
        # An actor's name that can't be encoded must not make the command fail.
        return (self.actor or this_process()).encode("utf-8", "replace").decode()

    def _carry_out(self, database: Database, wrapper: Wrapper, command: Command[T]) -> T:
        match standing_of(wrapper):
            case Standing.FREE:
                return _carried_out(database, wrapper, command, is_nested=False)
            case Standing.IN_TEST:
                return self._sheltering(database, wrapper, command)
            case Standing.LENT if type(command) in _HARMLESS:
                return _carried_out(database, wrapper, command, is_nested=True)
            case Standing.LENT:
                raise ConfigurationError(
                    f"{type(command).__name__} was used inside the transaction of a guarded handler, "
                    "and would be rolled back with it. Use it before or after."
                )

    def _sheltering(self, database: Database, wrapper: Wrapper, command: Command[T]) -> T:
        """Carry it out inside the transaction of a test, which a failed statement must not break."""
        with transaction.atomic(using=self.alias):
            outcome = _carried_out(database, wrapper, command, is_nested=True)
        if isinstance(command, Claim | TakeOver) and isinstance(outcome, Hold):
            self._sheltered.add(outcome)
        return outcome


def _carried_out(database: Database, wrapper: Wrapper, command: Command[T], *, is_nested: bool) -> T:
    try:
        return database.carry_out(wrapper, command, is_nested=is_nested)
    except SemelError:
        raise
    except Exception as error:
        raise refused(error) from error

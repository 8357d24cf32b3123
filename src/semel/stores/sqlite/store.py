"""The SQLite store for threads: whichever thread finds it free carries a batch for all that wait."""

from __future__ import annotations

from typing import Any, TypeVar

from semel.core.commands import Command
from semel.stores.base import Store
from semel.stores.forks import start_afresh_in_children
from semel.stores.lane import Lane
from semel.stores.sqlite.file import has_neighbours
from semel.stores.sqlite.ledger import Ledger
from semel.stores.sqlite.units import SQLiteConnections
from semel.stores.transaction import Connections, Transaction

T = TypeVar("T")


class SQLiteStore(Store):
    """Keys in a SQLite file: ``sqlite:///file.db``, ``sqlite:////folder/file.db``, ``sqlite:///file.db?table=name``."""

    def __init__(self, url: str, *, connections: Connections | None = None) -> None:
        """Nothing is opened yet. *connections* are where transactions come from, if not from the file itself."""
        self._ledger = Ledger(url)
        self.place = self._ledger.place
        self._connections = connections or SQLiteConnections(self._ledger.place)
        self.notes_replays = self._ledger.place.audit == "replays"
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        return self._lane.submit(command)  # type: ignore[no-any-return]  # by the command's own type

    def transaction(self) -> Transaction:
        """Return a transaction of the application's own, on a ``sqlite3.Connection`` to the same file."""
        return Transaction(self._connections, self._ledger.joins(self.actor))

    def open(self) -> None:
        """Open the file, and make the tables where there are none."""
        self._ledger.open()

    def migrate(self) -> list[str]:
        """Bring the schema up to date; return what was applied."""
        return self._ledger.open()

    def has_neighbours(self) -> bool:
        """Whether the file holds tables of others."""
        return has_neighbours(self.place)

    def close(self) -> None:
        """Let go of the file. Using the store again opens it again."""
        self._connections.close()
        self._ledger.close()

    def start_afresh(self) -> None:
        """Have nobody waiting: in a child, nobody is left to lead those who were in the parent's lane."""
        self._lane: Lane[Command[Any]] = Lane(self._execute)

    def _execute(self, batch: list[Command[Any]]) -> list[Any]:
        return self._ledger.execute(batch, self.actor)

"""Shops: a store, a way to let time pass in it, and books that the shop's handlers write in, in the same database."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from semel import stores
from semel.core.commands import Command, Commit, Finish, Undo, Verdict
from semel.stores.base import Store
from semel.stores.memory import MemoryStore, MemoryTransaction

TIMES = ("created_at", "lease_expires_at", "completed_at", "expires_at")
BOOKS = "CREATE TABLE books (customer TEXT NOT NULL, entry TEXT NOT NULL)"


@dataclass(frozen=True)
class Shop:
    """One shop."""

    store: Store
    #: Whether it is in memory, where there is time for everything.
    is_quick: bool
    #: Make the record of a key older.
    age: Callable[[str, timedelta], None]
    #: Enter (customer, entry) into the books, through the connection of an open transaction.
    enter: Callable[[Any, str, str], None]
    #: Read what is committed of one customer's entries.
    entries: Callable[[str], list[str]]


class Pages(MemoryTransaction):
    """A transaction on books in memory: what was entered is there when it commits."""

    def __init__(self, store: "MemoryShop") -> None:
        super().__init__(store)
        self._books = store.books
        self._entered: list[tuple[str, str]] = []

    @property
    def connection(self) -> Any:
        super().connection  # noqa: B018 - it raises where nothing is open
        return self._entered

    def perform(self, command: Command[Any]) -> Any:
        answer = super().perform(command)
        if isinstance(command, Commit | Finish) and answer is Verdict.DONE:
            self._books.extend(self._entered)
        if isinstance(command, Commit | Finish | Undo):
            self._entered = []
        return answer


class MemoryShop(MemoryStore):
    """Records and books in memory."""

    def __init__(self) -> None:
        self.time = datetime(2025, 1, 1, tzinfo=UTC)
        self.books: list[tuple[str, str]] = []
        super().__init__(clock=lambda: self.time)

    def transaction(self) -> MemoryTransaction:
        return Pages(self)


@contextmanager
def memory() -> Iterator[Shop]:
    store = MemoryShop()

    def age(_key: str, duration: timedelta) -> None:
        store.time += duration

    yield Shop(
        store,
        True,
        age,
        lambda entered, *line: entered.append(line),
        lambda customer: [entry for who, entry in store.books if who == customer],
    )


@contextmanager
def sqlite(url: str) -> Iterator[Shop]:
    path = Path(url.removeprefix("sqlite:///"))
    back = ", ".join(f"{time} = {time} - :milliseconds" for time in TIMES)
    make_older = f"UPDATE semel_keys SET {back} WHERE key = :key"
    with closing(stores.store(url)) as store, closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as other:
        store.migrate()
        other.execute(BOOKS)

        def age(key: str, duration: timedelta) -> None:
            other.execute(make_older, {"milliseconds": duration // timedelta(milliseconds=1), "key": key})

        def enter(connection: Any, *line: str) -> None:
            connection.execute("INSERT INTO books VALUES (?, ?)", line)

        def entries(customer: str) -> list[str]:
            return [entry for (entry,) in other.execute("SELECT entry FROM books WHERE customer = ?", [customer])]

        yield Shop(store, False, age, enter, entries)


@contextmanager
def postgres(url: str) -> Iterator[Shop]:
    back = ", ".join(f"{time} = {time} - %(duration)s" for time in TIMES)
    make_older = f"UPDATE semel_keys SET {back} WHERE key = %(key)s".encode()
    with closing(stores.store(url)) as store, psycopg.connect(url, autocommit=True) as other:
        store.migrate()
        # In which order rows lie is the server's affair.
        other.execute(BOOKS.replace("(", "(line bigint GENERATED ALWAYS AS IDENTITY, ", 1).encode())

        def age(key: str, duration: timedelta) -> None:
            other.execute(make_older, {"duration": duration, "key": key})
            other.execute("UPDATE semel_keys_watermark SET swept_to = swept_to - %s", [duration])

        def enter(connection: Any, *line: str) -> None:
            connection.execute("INSERT INTO books (customer, entry) VALUES (%s, %s)", line)

        def entries(customer: str) -> list[str]:
            rows = other.execute("SELECT entry FROM books WHERE customer = %s ORDER BY line", [customer])
            return [entry for (entry,) in rows]

        yield Shop(store, False, age, enter, entries)

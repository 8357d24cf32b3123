"""Migrations as values: their phases, which of them a store lacks, and what a plan says of each. Nothing is run here.

A file is named ``0006_pre_traceparent.sql``. *Pre* is run before the new code is deployed: the code of the version
before goes on serving on the new tables. *Post* is run when no process has the old code any more. Of every statement,
a store's table of migrations says whether it was run: a migration that stopped on the way has the row
``0006_pre_traceparent (2 of 5)``, until it is finished and has one with its plain name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, cast

from semel.errors import ConfigurationError, StoreNotReady
from semel.stores.statement import DEFAULT_TABLE, Names

Phase = Literal["pre", "post"]
#: Where the bodies of large answers are, on PostgreSQL.
Layout = Literal["plain", "partitioned"]
#: What a statement does to the rows that are there.
Work = Literal["nothing", "reads", "rewrites"]

_NAME = re.compile(r"\d{4}_(pre|post)_[a-z0-9_]+")
_HALF = re.compile(r"(\S+) \((\d+) of \d+\)")

#: A name, and the script.
Migration = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PlannedStatement:
    """A statement of a migration, and what it does to those who use the table meanwhile."""

    sql: str
    table: str
    lock: str
    work: Work
    #: What has to wait, in plain words.
    blocks: str


@dataclass(frozen=True, slots=True)
class PlannedMigration:
    """A migration that is missing, with those of its statements that are to be run."""

    name: str
    #: How many statements an earlier run, which stopped on the way, has behind it.
    done: int
    statements: tuple[PlannedStatement, ...]


@dataclass(frozen=True, slots=True)
class Book:
    """What a store's table of migrations says."""

    names: frozenset[str] = frozenset()
    #: By name, how many statements of a migration were run that is not finished.
    half: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Read the names as they stand in the table."""
        given = frozenset(names)
        halves = [match for match in map(_HALF.fullmatch, sorted(given)) if match]
        return cls(given - {match[0] for match in halves}, tuple((match[1], int(match[2])) for match in halves))

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever run: there are no tables, and no code that uses them."""
        return not self.names and not self.half

    def done(self, name: str) -> int:
        """Return how many statements of an unfinished migration were run."""
        return dict(self.half).get(name, 0)

    def pending(self, migrations: Sequence[Migration], *, with_post: bool) -> Iterator[Migration]:
        """Return the migrations that are to be run now; a new store has no old code that those of post would break."""
        with_post = with_post or self.is_new
        return (each for each in migrations if each[0] not in self.names and (with_post or phase_of(each[0]) == "pre"))


def phase_of(name: str) -> Phase:
    """Return when a migration is run, as its name says."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(f"{name} is no name of a migration, such as 0006_pre_traceparent.")
    return cast("Phase", match[1])


def half_name(name: str, done: int, count: int) -> str:
    """Return what stands in the table of a migration that is not finished."""
    return f"{name} ({done} of {count})"


def book_of(names: Names) -> str:
    """Return the name of the table of migrations."""
    return names.put_into(DEFAULT_TABLE) + "_migrations"


def lacking(there: Iterable[str], known: Iterable[str], where: str) -> list[str]:
    """Return which of the *known* migrations a store lacks that this code can serve on.

    Raises ``StoreNotReady`` where it can't: a migration of a newer version has removed what this one needs.
    """
    book, here = Book.of(there), list(known)
    if strange := [name for name in sorted(book.names - set(here)) if "_post_" in name]:
        raise StoreNotReady(
            f"{where} was changed by a newer version of Semel, for which this one is too old ({', '.join(strange)}). "
            "Run: pip install --upgrade semel"
        )
    return [name for name in here if name not in book.names and phase_of(name) == "pre"]

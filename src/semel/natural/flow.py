"""The order of statements to insert or get a row, once for every driver. It sends nothing by itself: it yields
statements, and receives their rows.

Insert first, and read only if that returned nothing: if two callers read first, both would see nothing and both would
insert. The read is a separate statement, since only a new snapshot shows what another transaction has committed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from semel.errors import ConfigurationError, RowDiffers, RowNotSeen
from semel.natural.asked import Asked
from semel.natural.faults import explain
from semel.natural.got import Got

S = TypeVar("S")
R = TypeVar("R")
S_co = TypeVar("S_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

#: Each further try needs one transaction that deletes the row between the two statements, and another that inserts it
#: again. Ten in a row do not happen by chance.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a statement."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


class Language(Protocol[S_co, R_co]):
    """The statements of a database, or of a toolkit above it."""

    @property
    def asked(self) -> Asked:
        """The arguments of the call."""

    def insert(self) -> S_co:
        """Insert the row unless its key is there; return it, whether the key is not NULL, and the predicate's value."""

    def stored(self) -> Generator[S_co, Rows, Rows]:
        """Read the row under the key; return it, and after it a boolean for each compared column."""

    def row(self, columns: tuple[str, ...], values: Sequence[Any]) -> R_co:
        """Convert the database's row to the caller's."""


def insert_or_get(language: Language[S, R]) -> Generator[S, Rows, Got[R]]:
    """Insert the row, or get the stored one."""
    asked = language.asked
    for _ in range(TRIES):
        try:
            new = yield language.insert()
            stored = new if new.rows else (yield from language.stored())
        except Exception as error:
            explain(error, asked)
            raise
        if new.rows:
            return _new(language, new)
        if stored.rows:
            return _stored(language, stored)
    raise RowNotSeen(
        f"{asked.into}: no row could be inserted under this key ({asked.key}), and none was found there, in {TRIES} "
        "tries. Look for a row-level security policy that hides it, a trigger that drops it, or a unique index with "
        "another collation than its column."
    )


def _new(language: Language[Any, R], rows: Rows) -> Got[R]:
    asked = language.asked
    row, (is_key, *holds) = _split(language, rows, 1 if asked.where is None else 2)
    if not is_key:
        raise ConfigurationError(
            f"{asked.into}: the key ({asked.key}) is NULL in the inserted row, though a value was given, and a "
            "retry would add another. Roll back, and give a value that is not stored as NULL."
        )
    if not all(holds):
        raise ConfigurationError(
            f"{asked.into}: where= is false for the inserted row, so it is not in the index, and a "
            "retry would add another. Roll back, and give values for which it is true."
        )
    return Got(row, is_new=True)


def _stored(language: Language[Any, R], rows: Rows) -> Got[R]:
    asked = language.asked
    row, flags = _split(language, rows, len(asked.compared))
    differs = tuple(name for name, is_same in zip(asked.compared, flags, strict=True) if not is_same)
    got = Got(row, is_new=False, differs=differs)
    if wrong := [name for name in differs if name in asked.same]:
        raise RowDiffers(
            f"{asked.into}: the stored row under this key ({asked.key}) differs from the given one in "
            f"{', '.join(wrong)}. If a retry may differ there, leave it out of same=.",
            got=got,
        )
    return got


def _split(language: Language[Any, R], rows: Rows, flags: int) -> tuple[R, list[bool]]:
    values = list(rows.rows[0])
    end = len(values) - flags
    return language.row(rows.columns[:end], values[:end]), [bool(flag) for flag in values[end:]]


def run(flow: Generator[S, Rows, Got[R]], perform: Callable[[S], Rows]) -> Got[R]:
    """Run the statements in this thread."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = perform(statement)
            except Exception as error:  # noqa: BLE001 - the flow explains it, and raises it again
                statement = flow.throw(error)
            else:
                statement = flow.send(rows)
    except StopIteration as end:
        got: Got[R] = end.value
        return got


async def arun(flow: Generator[S, Rows, Got[R]], perform: Callable[[S], Awaitable[Rows]]) -> Got[R]:
    """Run the statements on this event loop."""
    try:
        statement = next(flow)
        while True:
            try:
                rows = await perform(statement)
            except Exception as error:  # noqa: BLE001 - the flow explains it, and raises it again
                statement = flow.throw(error)
            else:
                statement = flow.send(rows)
    except StopIteration as end:
        got: Got[R] = end.value
        return got

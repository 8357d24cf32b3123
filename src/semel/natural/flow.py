"""In what order a row is inserted or got, once for every driver. It sends nothing by itself: it yields statements, and
is sent their rows.

Insert first, and look only when that brought nothing: looking first would let two callers see nothing and both insert.
The look is a statement of its own, since only a new snapshot shows what a rival has committed meanwhile.
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

#: Each further try takes a rival that deletes the row between two statements of ours, and one more that inserts it
#: again. Nobody meets ten by chance.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Rows:
    """What a statement brought."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


class Language(Protocol[S_co, R_co]):
    """How a database, or a toolkit above it, says it."""

    @property
    def asked(self) -> Asked:
        """What it says."""

    def insert(self) -> S_co:
        """Insert the row unless its key is there; bring it back, whether the key is no NULL, and any predicate."""

    def stored(self) -> Generator[S_co, Rows, Rows]:
        """Read the row under the key; bring it, and last a yes or no for each compared column."""

    def row(self, columns: tuple[str, ...], values: Sequence[Any]) -> R_co:
        """Make of what was brought what the caller is given."""


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
        f"{asked.into}: no row could be inserted under this key ({asked.key}), and none was found there, {TRIES} times "
        "over. Look for a row-level security policy that hides it, a trigger that drops it, or a unique index whose "
        "collation is not its column's."
    )


def _new(language: Language[Any, R], rows: Rows) -> Got[R]:
    asked = language.asked
    row, (is_key, *holds) = _split(language, rows, 1 if asked.where is None else 2)
    if not is_key:
        raise ConfigurationError(
            f"{asked.into}: the key ({asked.key}) is NULL in the row that went in, whatever was given for it, and a "
            "retry would add another. Roll back, and give a value that is stored as one."
        )
    if not all(holds):
        raise ConfigurationError(
            f"{asked.into}: where= does not hold for the row that went in, so the index does not have it, and a "
            "retry would add another. Roll back, and give values for which it holds."
        )
    return Got(row, is_new=True)


def _stored(language: Language[Any, R], rows: Rows) -> Got[R]:
    asked = language.asked
    row, flags = _split(language, rows, len(asked.compared))
    differs = tuple(name for name, is_same in zip(asked.compared, flags, strict=True) if not is_same)
    got = Got(row, is_new=False, differs=differs)
    if wrong := [name for name in differs if name in asked.same]:
        raise RowDiffers(
            f"{asked.into}: the row that is stored under this key ({asked.key}) differs from the given one in "
            f"{', '.join(wrong)}. If a retry may differ there, leave it out of same=.",
            got=got,
        )
    return got


def _split(language: Language[Any, R], rows: Rows, flags: int) -> tuple[R, list[bool]]:
    values = list(rows.rows[0])
    end = len(values) - flags
    return language.row(rows.columns[:end], values[:end]), [bool(flag) for flag in values[end:]]


def run(flow: Generator[S, Rows, Got[R]], perform: Callable[[S], Rows]) -> Got[R]:
    """Carry it out in this thread."""
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
    """Carry it out on this event loop."""
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

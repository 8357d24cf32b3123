"""The version of a store's schema, judged alike for every database: by the names of its migrations. It reads none of
them from a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from semel.doctor.model import Judgement, ok, wrong
from semel.stores.migration import Book, phase_of
from semel.stores.statement import Names, load_migrations


@dataclass(frozen=True, slots=True)
class Applied:
    """The migrations that a store has, and those that this version of Semel knows."""

    there: tuple[str, ...]
    known: tuple[str, ...]


def known_migrations(package: str, names: Names) -> tuple[str, ...]:
    """Return the migrations of this version of Semel."""
    return tuple(name for name, _ in load_migrations(package, names))


def judge_older(seen: Applied) -> Judgement:
    """Judge whether a migration is missing."""
    book = Book.of(seen.there)
    missing = [name for name in seen.known if name not in book.names and phase_of(name) == "pre"]
    last = max(book.names, default="none")
    halves = "".join(f" {name} stopped after {done} of its statements." for name, done in book.half)
    if missing:
        return wrong(f"Not applied: {', '.join(missing)}; the last is {last}.{halves}")
    later = [name for name in seen.known if name not in book.names]
    return ok(
        f"The last is {last}." + (f" Once all run this version: semel migrate --post ({later[0]})." if later else "")
    )


def judge_newer(seen: Applied) -> Judgement:
    """Judge whether there is a migration that is not known."""
    strange = sorted(Book.of(seen.there).names - set(seen.known))
    if any("_post_" in name for name in strange):
        return wrong(
            f"Not known here: {', '.join(strange)}. This version is too old for these tables, and won't start."
        )
    return wrong(f"Not known here: {', '.join(strange)}.") if strange else ok("All of them are known.")

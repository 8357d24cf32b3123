"""The version of a store's schema, judged alike for every database: by the names of its migrations. It reads none of
them from a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from semel.doctor.model import Judgement, ok, wrong
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
    missing = [name for name in seen.known if name not in seen.there]
    last = seen.there[-1] if seen.there else "none"
    return wrong(f"Not applied: {', '.join(missing)}; the last is {last}.") if missing else ok(f"The last is {last}.")


def judge_newer(seen: Applied) -> Judgement:
    """Judge whether there is a migration that is not known."""
    strange = [name for name in seen.there if name not in seen.known]
    return wrong(f"Not known here: {', '.join(strange)}.") if strange else ok("All of them are known.")

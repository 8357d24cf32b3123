"""The walk of an erasure along the records of one owner, for stores that have them in the order of scope and key. It
reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from semel.core.commands import Erase, Erased, EraseTrail, Left
from semel.core.place import read_place, written_place
from semel.core.scope import scopes_of
from semel.core.state import TERMINAL, State
from semel.core.value import value


@value
class Walked:
    """A record that the walk came past."""

    scope: str
    key: str
    state: State
    #: Whether it has ended, and there was something to erase; and whether that was done.
    has_data: bool
    is_erased: bool


def span(command: Erase | EraseTrail) -> tuple[str, str, int, str]:
    """Return the scope, the key and the number that the walk goes on behind, and the scope that it ends before."""
    first, end = scopes_of(command.scope)
    if command.after is None:
        return first, "", 0, end
    number, scope, key = read_place(command.after)
    # A place of another owner's walk must not lead to records of others.
    return (scope, key, number, end) if scope >= first else (first, "", 0, end)


def records(command: Erase, walked: Sequence[Walked]) -> Erased:
    """Return what came of the records that were walked past, in their order."""
    last = walked[-1] if len(walked) >= command.limit else None
    return Erased(
        sum(each.has_data if command.is_preview else each.is_erased for each in walked),
        tuple((each.scope, each.key) for each in walked if each.state in TERMINAL),
        tuple(Left(each.scope, each.key, each.state) for each in walked if _is_left(command, each)),
        None if last is None else written_place(0, last.scope, last.key),
    )


def _is_left(command: Erase, each: Walked) -> bool:
    is_missed = each.has_data and not each.is_erased and not command.is_preview
    return each.state not in TERMINAL or is_missed


def lines(command: EraseTrail, count: int, walked: Sequence[tuple[str, str, int]]) -> Erased:
    """Return what came of the lines that were walked past, in their order: scope, key and number of each."""
    if len(walked) < command.limit:
        return Erased(count)
    scope, key, number = walked[-1]
    return Erased(count, further=written_place(number, scope, key))

"""Commands that erase what a store has of one owner. Nothing here is asked by a request, and nothing runs again for it.

Both walk along the records, or the lines of the audit trail, of one owner: those of the scope, and of the scopes that
begin with it and a tab (``core/scope.py``). Each goes on where the one before it ended, so that a walk reads everything
once. They may be repeated, and be broken off anywhere.
"""

from __future__ import annotations

from semel.core.commands.base import Command
from semel.core.place import read_place
from semel.core.state import State
from semel.core.value import value


@value
class Left:
    """A record that was not erased: it has not ended, or another process is changing it at this moment."""

    scope: str
    key: str
    state: State


@value
class Erased:
    """The result of one part of a walk."""

    #: How many records, or lines, were erased; in a preview, how many would be.
    count: int = 0
    #: Scope and key of every record that has ended, erased now or before: the memory in front of a store drops these.
    ended: tuple[tuple[str, str], ...] = ()
    left: tuple[Left, ...] = ()
    #: Where to go on, for ``after``; None: this was the last part.
    further: str | None = None
    #: How many answers of the owner were deleted from a cache in front of the store, with the last part; None: there is
    #: no such cache.
    copies: int | None = None


@value
class Erase(Command[Erased]):
    """Make tombstones of the records of *scope* that have ended, walking past about *limit* records.

    Answer, steps, request, request line, trace and progress are deleted. State, attempt, token, status, fingerprint and
    times stay until the retention ends, so that a retry is refused and does not run. What has not ended stays as it is.
    """

    scope: str
    limit: int
    #: ``Erased.further`` of the part before this one.
    after: str | None = None
    #: Whether to count, and change nothing.
    is_preview: bool = False
    #: Why, for the one line of the audit trail, which names neither scope nor key.
    reason: str | None = None

    def __post_init__(self) -> None:
        """Refuse a place that no store has made."""
        _check(self.after)


@value
class EraseTrail(Command[Erased]):
    """Delete the lines of the audit trail of *scope*, walking past about *limit*. Lines of a record that has not ended
    stay with it.
    """

    scope: str
    limit: int
    #: As of ``Erase``.
    after: str | None = None
    is_preview: bool = False
    reason: str | None = None

    def __post_init__(self) -> None:
        """Refuse a place that no store has made."""
        _check(self.after)


def _check(after: str | None) -> None:
    if after is not None:
        read_place(after)

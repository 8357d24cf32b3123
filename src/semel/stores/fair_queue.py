"""The queue of a batcher: scopes take turns, and a batch is bounded in number and in bytes. It carries out nothing.

One tenant that sends a thousand requests, or sixty of eight megabytes, must not keep another's small one waiting for
all of them. What one scope asks for goes out in the order in which it was asked.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

from semel.core.commands import (
    Claim,
    Command,
    Complete,
    Discard,
    Look,
    Mark,
    Note,
    Park,
    ReadRequest,
    ReadTrail,
    Release,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Unpark,
)

T = TypeVar("T")

#: Past this a statement takes longer to plan and to send than a second one costs.
MAX_BATCH = 128
#: Of bodies in one statement: so much is on its way in a few milliseconds, and a driver keeps a few copies of it
#: meanwhile. What is larger by itself goes alone.
MAX_BATCH_BYTES = 1024 * 1024


class FairQueue(Generic[T]):
    """Commands that wait, each with what its caller has to be told by. It locks nothing."""

    def __init__(self, limit: int | None = None) -> None:
        """Have none. A batch is of *limit* commands at most, if that is given."""
        self._limit = limit
        #: What came since a batch was last taken, and how many bytes that is. Mostly it all goes out at once, and then
        #: there are no turns to take.
        self._arrived: list[tuple[int, Command[Any], T]] = []
        self._bytes = 0
        self._by_scope: OrderedDict[str, deque[tuple[int, T]]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._arrived or self._by_scope)

    def __iter__(self) -> Iterator[T]:
        """Go through all that wait, in no order."""
        self._line_up()
        return iter([item for waiting in self._by_scope.values() for _, item in waiting])

    def append(self, command: Command[Any], item: T) -> None:
        """Add *item*, which stands for *command*, behind the others of its scope."""
        size = size_of(command)
        self._bytes += size
        self._arrived.append((size, command, item))

    @property
    def first(self) -> T | None:
        """What is in the next batch for certain. It stays the same until then, or until it is removed."""
        for waiting in self._by_scope.values():
            return waiting[0][1]
        return self._arrived[0][2] if self._arrived else None

    def remove(self, item: T) -> None:
        """Take *item* out, if it still waits."""
        self._line_up()
        for scope, waiting in self._by_scope.items():
            for place, (_, each) in enumerate(waiting):
                if each is item:
                    del waiting[place]
                    if not waiting:
                        del self._by_scope[scope]
                    return

    def take(self) -> list[T]:
        """Take the next batch: one of each scope in turn, as long as it is not too many, or too much."""
        if not self._by_scope and len(self._arrived) <= (self._limit or MAX_BATCH) and self._bytes <= MAX_BATCH_BYTES:
            batch = list(map(_item, self._arrived))
            self._arrived, self._bytes = [], 0
            return batch
        self._line_up()
        return self._take_in_turn()

    def clear(self) -> None:
        """Have none."""
        self._arrived, self._bytes = [], 0
        self._by_scope.clear()

    def _line_up(self) -> None:
        arrived, self._arrived, self._bytes = self._arrived, [], 0
        for size, command, item in arrived:
            scope = scope_of(command)
            waiting = self._by_scope.get(scope)
            if waiting is None:
                waiting = self._by_scope[scope] = deque()
            waiting.append((size, item))

    def _take_in_turn(self) -> list[T]:
        batch: list[T] = []
        total = 0
        by_scope = self._by_scope
        limit = self._limit or MAX_BATCH
        while by_scope and len(batch) < limit:
            scope, waiting = next(iter(by_scope.items()))
            size, item = waiting[0]
            total += size
            if batch and total > MAX_BATCH_BYTES:
                break  # It is the first of the next batch.
            waiting.popleft()
            batch.append(item)
            if waiting:
                by_scope.move_to_end(scope)
            else:
                del by_scope[scope]
        return batch


def scope_of(command: Command[Any]) -> str:
    """Return the scope that *command* is about; those about none, or about many, are of a scope of their own."""
    find = _SCOPES.get(type(command))
    return "" if find is None else find(command)


def size_of(command: Command[Any]) -> int:
    """Return how many bytes of bodies go out with *command*."""
    # Asked of every claim and every answer, so it is one call.
    if isinstance(command, Complete | Resolution):
        return len(command.answer.body or b"")
    claim = command.claim if isinstance(command, TakeOver) else command
    if isinstance(claim, Claim) and claim.request is not None:
        return len(claim.request.body)
    return 0


_item: Callable[[Any], Any] = itemgetter(2)
_in_hold: Callable[[Any], str] = attrgetter("hold.scope")
_in_claim: Callable[[Any], str] = attrgetter("claim.scope")
_plain: Callable[[Any], str] = attrgetter("scope")
_SCOPES: dict[type[Command[Any]], Callable[[Any], str]] = {
    **dict.fromkeys((Claim, Look, ReadTrail), _plain),
    **dict.fromkeys((Complete, Resolution, Discard, Mark, Note, Park), _in_hold),
    **dict.fromkeys((ReadRequest, Release, Save, Settle, Sweep, Unpark), _in_hold),
    TakeOver: _in_claim,
}

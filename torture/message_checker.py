"""Judges messages by what is in the broker and in the outbox: each order under one id, none missing, overtaken or left
behind. What became of orders and parcels is judged by ``checker``.

It imports nothing of Semel: a library can't prove its own claims.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torture.checker import Violation


@dataclass(frozen=True, slots=True)
class Sent:
    """One entry at the broker, in its order. The same message may be there more than once."""

    message_id: str
    order: str

    @property
    def group(self) -> str:
        """What it is sent in the order of: the last word of the order's key."""
        return self.order.rpartition("-")[2]


def check_messages(orders: Iterable[str], sent: Sequence[Sent], left: Iterable[str] = ()) -> list[Violation]:
    """Judge what was *sent* for *orders*, which begin with their number; *left* is what is still in the outbox."""
    ids: defaultdict[str, set[str]] = defaultdict(set)
    firsts: defaultdict[str, list[str]] = defaultdict(list)
    for each in sent:
        if each.order not in ids:
            firsts[each.group].append(each.order)
        ids[each.order].add(each.message_id)
    wanted = set(orders)
    found = [Violation("lost", order, "its message never came to the broker") for order in sorted(wanted - ids.keys())]
    found += [
        Violation("doubled", order, "a message at the broker, and no such order")
        for order in sorted(ids.keys() - wanted)
    ]
    found += [
        Violation("doubled", order, f"sent under {len(known)} ids") for order, known in ids.items() if len(known) > 1
    ]
    for came in firsts.values():
        overtaken = [later for earlier, later in pairwise(came) if later < earlier]
        found += [Violation("disordered", order, "sent after a later one of its key") for order in overtaken]
    return found + [Violation("stuck", message, "still in the outbox") for message in left]


def sent_again(sent: Sequence[Sent]) -> int:
    """Count the entries that are not the first of their message."""
    return len(sent) - len({each.message_id for each in sent})

"""A walk through all keys of one kind, a stretch at a time: for whoever must find what is on no list."""

from __future__ import annotations

from semel.stores.redis.address import Node
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.replies import only
from semel.stores.redis.wire import Call, packed

#: How many keys the server goes through in one step: a millisecond of its time.
STEP = 1000


class Walk:
    """Where one walk has come to. It goes on where it stopped, and begins anew at the end."""

    def __init__(self, pattern: str, kind: str) -> None:
        """Look for keys like *pattern* that hold a *kind* of value."""
        self._words = ("MATCH", pattern, "COUNT", STEP, "TYPE", kind)
        #: The servers that are left, the first of which is gone through just now.
        self._nodes: list[Node] = []
        self._cursor = b"0"

    def stretch(self, courier: Courier, most_steps: int | None = None) -> Talk[set[bytes]]:
        """Go on for so many steps, or to the end, and return the keys that there were."""
        found: set[bytes] = set()
        if not self._nodes:
            self._nodes, self._cursor = (yield from courier.masters()), b"0"
        steps = 0
        while self._nodes and steps != most_steps:
            call = Call(b"", packed("SCAN", self._cursor, *self._words), node=self._nodes[0])
            try:
                self._cursor, keys = only((yield from courier.deliver([call]))[0])
            except Exception:
                # That server may be gone for good: the next walk asks which ones there are.
                self._nodes = []
                raise
            found.update(keys)
            steps += 1
            if self._cursor == b"0":
                del self._nodes[0]
        return found

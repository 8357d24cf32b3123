"""One finished answer that is kept: as much of its record as a replay needs, and until when. Who keeps it, and where,
is for others to say.
"""

from __future__ import annotations

from datetime import timedelta
from sys import getsizeof

from semel.core.message import Answer
from semel.core.record import Found
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.stores.tiered.expiry import deadline

#: What the objects themselves take, besides the texts and bytes they hold: the entry, its answer and deadline, and its
#: place in the table, which doubles as it grows.
ENTRY_BYTES = 640
#: A pair of one header, and its place among the others.
PAIR_BYTES = getsizeof((b"", b"")) + 8


@value
class Entry:
    """A record that has ended."""

    scope: str
    key: str
    state: State
    attempt: int
    token: bytes
    fingerprint: bytes
    answer: Answer
    steps: str | None
    is_accepted: bool
    #: By ``expiry.now``.
    deadline: float

    @classmethod
    def of(cls, scope: str, key: str, found: Found, asked_at: float) -> Entry | None:
        """Keep what the durable store has *found* when it was asked, if it has ended and will stay for a while."""
        if found.state not in TERMINAL or found.answer is None or found.is_expired or found.retention_left is None:
            return None
        return cls(
            scope,
            key,
            found.state,
            found.attempt,
            found.token,
            found.fingerprint,
            found.answer,
            found.steps,
            found.is_accepted,
            deadline(asked_at, found.retention_left.total_seconds()),
        )

    def found(self, now: float) -> Found:
        """Return what a claim comes upon."""
        return Found(
            self.state,
            self.attempt,
            self.token,
            self.fingerprint,
            self.answer,
            lease_is_over=True,
            is_expired=False,
            steps=self.steps,
            is_accepted=self.is_accepted,
            retention_left=timedelta(seconds=self.deadline - now),
        )

    @property
    def size(self) -> int:
        """How many bytes of memory it takes, at most."""
        headers = self.answer.headers
        return (
            ENTRY_BYTES
            + getsizeof(self.scope)
            + getsizeof(self.key)
            + getsizeof(self.token)
            + getsizeof(self.fingerprint)
            + getsizeof(self.steps)
            + getsizeof(self.answer.body)
            + sum(PAIR_BYTES + getsizeof(name) + getsizeof(value) for name, value in headers)
        )

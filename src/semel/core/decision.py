"""What to do about a key that is already there: one pure function, on one screen. It asks no store and no clock."""

from __future__ import annotations

import math
from datetime import timedelta

from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Found
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.errors import KeyExpired, KeyReused, OutcomeUnknown, Refusal

#: Most handlers end within a second, and a client that comes back too early is told again.
RETRY_AFTER_SECONDS = 1

#: A live worker renews at a third of its lease. One that has not been heard of for this part of it, a late renewal
#: allowed for, is most likely dead.
SILENT_PART_OF_LEASE = 0.45


def retry_after(lease_left: timedelta | None, lease: timedelta) -> int:
    """Return after how many seconds the client of a key in progress had best come back.

    While the worker is heard of, soon. When it is silent its key can be had at the end of its lease and not before:
    a client that asks once a second until then gives up too early.
    """
    if lease_left is None or lease - lease_left <= lease * SILENT_PART_OF_LEASE:
        return RETRY_AFTER_SECONDS
    return max(RETRY_AFTER_SECONDS, math.ceil(lease_left.total_seconds()))


@value
class Run:
    """Take the record over and run the handler."""


@value
class Replay:
    """Give the stored answer again."""

    answer: Answer


@value
class Busy:
    """The first still runs. Whether the other waits, or is told to come back, is for its policy to say."""


@value
class Accepted:
    """A worker has it, or will: say where its state can be asked for."""


@value
class Refuse:
    """Run nothing, and say why."""

    refusal: Refusal


Decision = Run | Replay | Busy | Accepted | Refuse


def decide(found: Found, policy: Policy, *, is_same_request: bool) -> Decision:  # noqa: PLR0911 - a list of cases, by rank
    """Decide what a request gets whose key is *found* in the store."""
    is_over = found.lease_is_over
    if found.is_expired and is_over and found.state is not State.UNKNOWN:
        # Past retention nothing is promised of the record, its fingerprint included.
        return Run() if policy.late == "rerun" else Refuse(KeyExpired())
    if not is_same_request:
        # To a client 409 is *wait* and 422 is *never*: a mismatch must not hide behind "in progress".
        return Refuse(KeyReused())
    if found.state in TERMINAL and found.answer is not None:
        return Replay(found.answer)
    if found.is_accepted and found.state is not State.UNKNOWN:
        # Whoever holds it, or nobody: its client was promised a worker, which runs it after a pause that is its own.
        return Accepted()
    if not is_over:
        return Busy()
    if found.state is State.UNKNOWN:
        return Refuse(OutcomeUnknown())
    # With a recovery point it is known what was done, and the rest can be done.
    return Run() if policy.on_crash == "rerun" or found.steps else Refuse(OutcomeUnknown())

"""What to do about a key that is already in the store: one pure function. It asks no store and no clock."""

from __future__ import annotations

import math
from datetime import timedelta

from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Found
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.errors import KeyExpired, KeyReused, OutcomeUnknown, Refusal

#: Seconds. Most handlers end within one, and a client that retries too early is told again.
RETRY_AFTER_SECONDS = 1

#: A live worker renews at a third of its lease. One that has not renewed for this part of it, a late renewal
#: allowed for, is most likely dead.
SILENT_PART_OF_LEASE = 0.45


def retry_after(lease_left: timedelta | None, lease: timedelta) -> int:
    """Return after how many seconds the client of a key in progress should retry.

    Soon, while the worker renews its lease. If it does not, the key can be taken over at the end of the lease and not
    before: a client that asks once a second until then gives up too early.
    """
    if lease_left is None or lease - lease_left <= lease * SILENT_PART_OF_LEASE:
        return RETRY_AFTER_SECONDS
    return max(RETRY_AFTER_SECONDS, math.ceil(lease_left.total_seconds()))


@value
class Run:
    """Take the record over and run the handler."""


@value
class Replay:
    """Answer with the stored answer."""

    answer: Answer


@value
class Busy:
    """The first request still runs. The policy says whether the other waits or is told to retry."""


@value
class Accepted:
    """A worker runs it, or will: answer with its status URL."""


@value
class Refuse:
    """Do not run the handler, and say why."""

    refusal: Refusal


Decision = Run | Replay | Busy | Accepted | Refuse


def decide(found: Found, policy: Policy, *, is_same_request: bool) -> Decision:  # noqa: PLR0911 - a list of cases, by rank
    """Decide what a request gets if its key is *found* in the store."""
    is_over = found.lease_is_over
    if found.is_expired and is_over and found.state is not State.UNKNOWN:
        # Past retention the record counts for nothing, its fingerprint included.
        return Run() if policy.late == "rerun" else Refuse(KeyExpired())
    if not is_same_request:
        # To a client 409 is *wait* and 422 is *never*: a mismatch must not hide behind "in progress".
        return Refuse(KeyReused())
    if found.state in TERMINAL and found.answer is not None:
        return Replay(found.answer)
    if found.is_accepted and found.state is not State.UNKNOWN:
        # With or without a holder: its client was promised a worker, and the completer decides when to run it.
        return Accepted()
    if not is_over:
        return Busy()
    if found.state is State.UNKNOWN:
        return Refuse(OutcomeUnknown())
    # With a recovery point it is known what was done, so the rest can be run.
    return Run() if policy.on_crash == "rerun" or found.steps else Refuse(OutcomeUnknown())

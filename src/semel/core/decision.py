"""What to do about a key that is already there: one pure function, on one screen. It asks no store and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Found
from semel.core.state import TERMINAL, State
from semel.errors import InProgress, KeyExpired, KeyReused, OutcomeUnknown, Refusal

#: Most handlers end within a second, and a client that comes back too early is told again.
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Take the record over and run the handler."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Give the stored answer again."""

    answer: Answer


@dataclass(frozen=True, slots=True)
class Refuse:
    """Run nothing, and say why."""

    refusal: Refusal


Decision = Run | Replay | Refuse


def decide(found: Found, policy: Policy, *, is_same_request: bool) -> Decision:
    """Decide what a request gets whose key is *found* in the store."""
    is_over = found.lease_is_over
    if found.is_expired and is_over:
        # Past retention nothing is promised of the record, its fingerprint included.
        return Run() if policy.late == "rerun" else Refuse(KeyExpired())
    if not is_same_request:
        # To a client 409 is *wait* and 422 is *never*: a mismatch must not hide behind "in progress".
        return Refuse(KeyReused())
    if found.state in TERMINAL and found.answer is not None:
        return Replay(found.answer)
    if not is_over:
        return Refuse(InProgress(retry_after=RETRY_AFTER_SECONDS))
    if found.state is State.UNKNOWN:
        return Refuse(OutcomeUnknown())
    # With a recovery point it is known what was done, and the rest can be done.
    return Run() if policy.on_crash == "rerun" or found.steps else Refuse(OutcomeUnknown())

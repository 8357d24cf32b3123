"""A duplicate that waits for the first to end. Nothing is held meanwhile, and nothing run: it looks, and looks again.

How many wait without as many questions to the store, the port behind ``Wait`` knows.
"""

from __future__ import annotations

from datetime import timedelta

from semel.core.commands import Again, Look
from semel.core.decision import RETRY_AFTER_SECONDS, retry_after
from semel.core.handler import TooManyWaiters, Wait
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.preference import Preferences
from semel.core.record import Found
from semel.errors import InProgress, Interrupted, StoreError
from semel.flows.ports import WaitingPorts


class LeftWaiting(Interrupted):
    """The waiter has gone. It held nothing, so there is nothing to free."""


def patience_of(policy: Policy, wishes: Preferences) -> timedelta | None:
    """Return how long a duplicate waits; None: not at all."""
    asked = wishes.wait if "wait" in policy.preferences else None
    if policy.in_progress == "wait":
        asked = policy.wait if asked is None else asked
    # What the client is not willing to wait is no use to it.
    return min(asked, policy.wait) if asked else None


async def wait(ports: WaitingPorts, scope: str, key: str, policy: Policy, wishes: Preferences) -> Found | Again:
    """Wait until more may be known of a key in progress; refuse where there is no waiting, or no longer."""
    patience = patience_of(policy, wishes)
    if patience is not None:
        try:
            got = await ports.wait(Wait(scope, key, patience, policy.max_waiters, policy.max_waiters_per_key))
        except Interrupted:
            raise LeftWaiting from None
        if not isinstance(got, TooManyWaiters):
            return got
    raise InProgress(retry_after=(await _when(ports, scope, key, policy)))


async def _when(ports: WaitingPorts, scope: str, key: str, policy: Policy) -> int:
    """Find out when to come back: the worker may be dead, and its lease is waited for. It is no more than a hint."""
    if policy.mode == "atomic":
        return RETRY_AFTER_SECONDS  # There is no lease: a worker that dies leaves nothing behind.
    try:
        record = await ports.ask(Look(scope, key))
    except StoreError:
        return RETRY_AFTER_SECONDS
    return retry_after(record.lease_left if record else None, policy.lease)


def applied(answer: Answer, policy: Policy, wishes: Preferences) -> Answer:
    """Return *answer*, to which a request has waited, with word of it where that was its client's wish."""
    patience = patience_of(policy, wishes)
    if wishes.wait is None or patience is None or "wait" not in policy.preferences:
        return answer
    told = (b"preference-applied", b"wait=%d" % patience.total_seconds())
    return Answer(answer.status, (*answer.headers, told), answer.body)

"""Commands to begin with, as the entry point would give them."""

from __future__ import annotations

import os
from datetime import timedelta

from semel.core.commands import Begin, Claim, Commit, Finish, Verdict
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.stores.transaction import Transaction

ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')

STEPS = Progress((Done("phase", "payment_made", {"id": 1}),))


def claim_on(key: str = "key", scope: str = "alice") -> Claim:
    """Return a claim with a token of its own."""
    return Claim(scope, key, os.urandom(16), b"fingerprint", timedelta(seconds=30), timedelta(hours=24))


def begun(transaction: Transaction, claim: Claim) -> Hold:
    """Begin *claim*, which nothing stands in the way of."""
    hold = transaction.perform(Begin(claim))
    assert isinstance(hold, Hold), hold
    return hold


def finish(claim: Claim, hold: Hold) -> Finish:
    """Return the end of an operation in atomic mode."""
    return Finish(claim, hold, None, Event.COMPLETE, ANSWER)


def finished(transaction: Transaction, claim: Claim, hold: Hold) -> None:
    """Commit it, which nothing stands in the way of."""
    assert transaction.perform(finish(claim, hold)) is Verdict.DONE


def step(hold: Hold) -> Commit:
    """Return the end of a phase."""
    return Commit(hold, STEPS)

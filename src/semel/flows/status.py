"""A request for the state of an operation, at its status URL. Only the operation's owner is told."""

from __future__ import annotations

from semel.core.commands import Look, Now
from semel.core.decision import RETRY_AFTER_SECONDS
from semel.core.handler import TooManyWaiters, Wait
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.preference import preferences_of
from semel.core.problem import refused
from semel.core.record import Found, Record
from semel.core.replay import retold
from semel.core.scope import principal_of
from semel.core.state import State
from semel.core.status import Name, for_owner_only, not_ended
from semel.errors import (
    InProgress,
    OperationExpired,
    OperationNotFound,
    OutcomeUnknown,
    Refusal,
    ScopeMissing,
    StoreError,
)
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.ports import StatusPorts
from semel.flows.reply import Send
from semel.flows.waiting import patience_of


async def status(ports: StatusPorts, head: Head, name: str, policy: Policy, path: str) -> Send:
    """Answer a request for the state of the operation *name*, below *path*: 202, or the answer itself.

    A client that says ``Prefer: wait=5`` is held back until the operation has ended, within bounds.
    """
    try:
        asked = Name.read(name)
        try:
            scope = asked.scope_of(principal_of(await ports.principal()))
        except ScopeMissing:
            # A request without a user is not the owner's either, and gets the same answer.
            raise OperationNotFound from None
        return Send(await _answer(ports, head, asked, scope, policy=policy, path=path))
    except StoreError as error:
        error.retry_after = STORE_RETRY_AFTER_SECONDS
        return Send(refused(error, policy))
    except Refusal as refusal:
        return Send(refused(refusal, policy))


async def _answer(ports: StatusPorts, head: Head, asked: Name, scope: str, *, policy: Policy, path: str) -> Answer:
    wishes = preferences_of(head.headers)
    patience = patience_of(policy, wishes) if wishes.wait is not None else None
    has_waited = False
    while True:
        record = await ports.ask(Look(scope, asked.key))
        if record is None or not asked.is_of(record):
            # Gone, or the key was used again since for another operation, which has an address of its own.
            raise OperationExpired if asked.is_past(await ports.ask(Now())) else OperationNotFound
        if record.is_expired and record.state is not State.PROCESSING:
            raise OperationExpired
        if record.state is State.UNKNOWN:
            raise OutcomeUnknown
        if record.answer is not None:
            if has_waited:
                ports.announce(scope, asked.key, _found(record))
            return for_owner_only(retold(record.answer, policy))
        if record.is_stuck and not record.is_accepted:
            # It began as an ordinary request, and its process died. No worker has it: a retry goes on with it.
            raise InProgress(retry_after=RETRY_AFTER_SECONDS)
        if patience is None:
            return not_ended(record, path)
        got = await ports.wait(Wait(scope, asked.key, patience, policy.max_waiters, policy.max_waiters_per_key))
        has_waited = True
        if isinstance(got, TooManyWaiters):
            patience = None


def _found(record: Record) -> Found:
    """Return *record* as a claim would have found it, for those who wait with one."""
    return Found(
        record.state,
        record.attempt,
        record.token,
        record.fingerprint,
        record.answer,
        lease_is_over=True,
        is_expired=record.is_expired,
        steps=record.steps,
        is_accepted=record.is_accepted,
        retention_left=record.retention_left,
    )

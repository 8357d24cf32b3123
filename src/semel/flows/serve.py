"""One request, from its headers to its answer: which key it bears, whose it is, what it asks.

Read ``yield from X`` as: ask the world to do X, and here is its answer. Between any two of them the process may die.
What comes after, with a key in hand, is in ``guard.py``: a request, a job and a plain function have that in common.
"""

from __future__ import annotations

from semel.core.commands import Flow, NameScope, ReadBody, Tell
from semel.core.events import PersonalKey
from semel.core.fingerprint import Subject
from semel.core.key import find
from semel.core.message import Head
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.scope import scoped
from semel.errors import BodyTooLarge, KeyMissing, Refusal, StoreError
from semel.flows.guard import guard
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.reply import PassOn, Reply, Send


def serve(head: Head, policy: Policy, token: bytes, *, notes_replays: bool = False) -> Flow[Reply]:
    """Guard one request. *token* is random and names this attempt alone."""
    try:
        key = find(head.headers, policy.header_names, strict=policy.strict, max_length=policy.max_key_length)
        if key is None:
            if policy.required:
                raise KeyMissing
            return PassOn()
        if key.personal:
            yield from Tell(PersonalKey(key.short()))
        principal = yield from NameScope()
        scope = scoped(principal, head, policy)
        body = yield from ReadBody(policy.max_request_body)
        if body is None:
            raise BodyTooLarge(f"The request body is larger than {policy.max_request_body} bytes.")
        subject = Subject(head.method, head.path, head.query, head.headers, body)
        return (
            yield from guard(
                key, scope, subject, policy, token=token, principal=str(principal), notes_replays=notes_replays
            )
        )
    except StoreError as error:
        error.retry_after = STORE_RETRY_AFTER_SECONDS
        return Send(refused(error, policy))
    except Refusal as refusal:
        return Send(refused(refusal, policy))

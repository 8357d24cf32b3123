"""One request, from its headers to its answer, for whatever door it comes in by.

Read ``yield from X`` as: ask the world to do X, and here is its answer. Between any two of them the process may die.
Which key a request bears is found in ``identify.py``. What comes after, with a key in hand, is in ``guard.py``: a
request, a job and a plain function have that in common. A policy that only reports has a flow of its own.
"""

from __future__ import annotations

from semel.core.commands import Flow
from semel.core.message import Head
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.errors import Refusal, StoreError
from semel.flows.guard import guard
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.identify import identify
from semel.flows.reply import PassOn, Reply, Send
from semel.flows.report import report


def serve(
    head: Head, policy: Policy, token: bytes, *, notes_replays: bool = False, status_path: str | None = None
) -> Flow[Reply]:
    """Guard one request. *token* is random and names this attempt alone; *status_path* is as for ``guard``."""
    if policy.enforcement == "report":
        return (yield from report(head, policy, token))
    try:
        asked = yield from identify(head, policy)
        if asked is None:
            return PassOn()
        return (
            yield from guard(
                asked.key,
                asked.scope,
                asked.subject,
                asked.policy,
                token=token,
                principal=asked.principal,
                notes_replays=notes_replays,
                status_path=status_path,
            )
        )
    except StoreError as error:
        error.retry_after = STORE_RETRY_AFTER_SECONDS
        return Send(refused(error, policy))
    except Refusal as refusal:
        return Send(refused(refusal, policy))

"""One request, from its headers to its answer, through any entry point. Between any two awaits the process may die.

Which key a request bears is found in ``identify.py``. What comes after, with a key in hand, is in ``guard.py``: a
request, a job and a plain function have that in common. A policy that only reports has a flow of its own.
"""

from __future__ import annotations

from semel.core.commands import Look
from semel.core.message import Head, request_of
from semel.core.outcome import ended_by
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.core.value import value
from semel.errors import ConfigurationError, Refusal, ShuttingDown, StoreError
from semel.flows.guard import guard
from semel.flows.handle import STORE_RETRY_AFTER_SECONDS
from semel.flows.identify import Asked, identify, unrecorded
from semel.flows.ports import GuardPorts
from semel.flows.reply import PassOn, Reply, Send
from semel.flows.report import report

ATOMIC_INSIDE = (
    'A guard with mode="atomic" is inside of another guard, which has claimed the same key and has no transaction to '
    "share. Guard the request once: take one of the two away."
)


@value
class Around:
    """An operation that this code is part of already."""

    scope: str
    key: str
    #: Of its claim.
    token: bytes
    #: As ``request_of`` writes it; empty where that is not known.
    request: str
    is_atomic: bool

    def holds(self, asked: Asked) -> bool:
        """Whether it is the very one that is *asked* for: another guard, further outside, has claimed the key."""
        same_key = (self.scope, self.key) == (asked.scope, asked.key.value)
        return same_key and self.request in {"", request_of(asked.subject.method, asked.subject.path)}

    async def is_here(self, ports: GuardPorts) -> bool:
        """Look whether its record is in the store of this guard. In another, this guard has a record of its own."""
        if self.is_atomic:
            return True  # It has no record yet, and a look would not find out.
        record = await ports.ask(Look(self.scope, self.key))
        return record is not None and record.token == self.token


async def serve(
    ports: GuardPorts,
    head: Head,
    policy: Policy,
    token: bytes,
    *,
    notes_replays: bool = False,
    status_path: str | None = None,
    around: Around | None = None,
) -> Reply:
    """Guard one request. *token* is random and names this attempt alone; *status_path* is as for ``guard``.

    Inside of another guard's operation (*around*) that has this very key, the handler is part of that operation: this
    guard stands aside, since its own claim would find the key busy for ever. A guard with another store does not: what
    it guards was called by the handler, which may call it again.
    """
    if policy.enforcement != "enforce":
        return await _not_enforced(ports, head, policy, token)
    try:
        asked = await identify(ports, head, policy)
        if asked is None:
            return PassOn()
        if around is not None and around.holds(asked) and (await around.is_here(ports)):
            if policy.mode == "atomic" and not around.is_atomic:
                raise ConfigurationError(ATOMIC_INSIDE)
            return PassOn()
        return await guard(ports, asked, token, notes_replays=notes_replays, status_path=status_path)
    except StoreError as error:
        error.retry_after = STORE_RETRY_AFTER_SECONDS
        return Send(refused(error, policy), ended_by(error))
    except Refusal as refusal:
        return Send(refused(refusal, policy), ended_by(refusal))


async def _not_enforced(ports: GuardPorts, head: Head, policy: Policy, token: bytes) -> Reply:
    if policy.enforcement == "report":
        return await report(ports, head, policy, token)
    try:
        return PassOn(await unrecorded(ports, head, policy, token))
    except ShuttingDown as refusal:
        return Send(refused(refusal, policy), "shutting_down")

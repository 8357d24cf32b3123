"""Who sends a request, what it asks, and under which key. What becomes of the key is not decided here."""

from __future__ import annotations

from semel.core.body_hash import PREFIX, is_made
from semel.core.events import PersonalKey
from semel.core.fingerprint import Subject
from semel.core.key import Key, find
from semel.core.message import Head
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.core.scope import principal_of, scoped
from semel.core.value import value
from semel.errors import BodyTooLarge, Interrupted, KeyInvalid, KeyMissing, ShuttingDown
from semel.flows.ports import GuardPorts


@value
class Asked:
    """A request that bears a key, or was given one."""

    key: Key
    scope: str
    #: As the application named it, in one string.
    principal: str
    subject: Subject
    #: As it is for this key: one that was made of the body has a window of its own, and is its own fingerprint.
    policy: Policy


async def unrecorded(ports: GuardPorts, head: Head, policy: Policy, token: bytes) -> Hold | None:
    """Return as which operation a request runs while its guard is switched off; None: as none.

    It has the key and the owner that it would have, so that what is derived of them is the same.
    """
    try:
        sent = find(head.headers, policy.header_names, strict=policy.strict, max_length=policy.max_key_length)
        if sent is None:
            return None
        return Hold(scoped(principal_of(await ports.principal()), head, policy), sent.value, 1, token)
    except (Interrupted, ShuttingDown):
        raise
    except Exception:  # noqa: BLE001 - whatever it is, the application's included, the request runs
        return None


async def identify(ports: GuardPorts, head: Head, policy: Policy) -> Asked | None:
    """Find out what is asked; None: it bears no key, and need not. What can't be guarded is refused."""
    sent = find(head.headers, policy.header_names, strict=policy.strict, max_length=policy.max_key_length)
    source = sent or policy.key_from
    if source is None:
        if policy.required:
            raise KeyMissing
        return None
    if sent is not None:
        if policy.key_from is not None and is_made(sent):
            # It would be taken for a key of ours, which is compared with no fingerprint.
            raise KeyInvalid(f'An idempotency key must not start with "{PREFIX}" here. Send another, such as a UUID.')
        if sent.personal:
            ports.tell(PersonalKey(sent.short()))
    principal = principal_of(await ports.principal())
    scope = scoped(principal, head, policy)
    body = await ports.read_body(policy.max_request_body)
    if body is None:
        raise BodyTooLarge(
            f"The request body is larger than {policy.max_request_body} bytes, the max_request_body that this API "
            "has set for requests with a key."
        )
    subject = Subject(head.method, head.path, head.query, head.headers, body, head.mount)
    if isinstance(source, Key):
        return Asked(source, scope, principal, subject, policy)
    return Asked(source.key(scope, subject), scope, principal, subject, policy.by_body)

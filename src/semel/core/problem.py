"""The bodies of refusals, in two formats: RFC 9457 problems and Stripe's errors. It decides on no refusal."""

from __future__ import annotations

import json

from semel.core.message import Answer
from semel.core.policy import Policy
from semel.errors import Refusal, Unauthenticated

SHOULD_RETRY = b"stripe-should-retry"


def refused(refusal: Refusal, policy: Policy) -> Answer:
    """Return the answer that tells a client of *refusal*. The key it sent is never repeated."""
    uri = policy.problem_base + refusal.slug
    page = uri if uri.startswith("http") else None
    if policy.dialect == "stripe":
        status = refusal.stripe_status or refusal.status
        media_type, body = b"application/json", _stripe(refusal, page)
    else:
        status = refusal.status
        media_type, body = b"application/problem+json", _problem(refusal, uri)
    headers = [
        (b"content-type", media_type),
        # A refusal is about this moment: no cache may store it.
        (b"cache-control", b"no-store"),
    ]
    if page is not None:
        headers.append((b"link", f'<{page}>; rel="describedby"; type="text/html"'.encode()))
    if policy.dialect == "stripe":
        # Stripe's clients read this before the status; without it they retry every 409 and 5xx.
        headers.append((SHOULD_RETRY, b"true" if refusal.retryable else b"false"))
    if isinstance(refusal, Unauthenticated):
        headers.append((b"www-authenticate", refusal.challenge.encode()))
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % refusal.retry_after))
    return Answer(status, tuple(headers), json.dumps(body).encode())


def _problem(refusal: Refusal, uri: str) -> dict[str, object]:
    return {
        "type": uri,
        "title": refusal.title,
        "status": refusal.status,
        "detail": refusal.detail,
        "code": refusal.slug,
        "retryable": refusal.retryable,
    }


def _stripe(refusal: Refusal, page: str | None) -> dict[str, object]:
    error = {"type": refusal.stripe_type, "message": refusal.detail}
    if page is not None:
        error["doc_url"] = page
    if refusal.stripe_code:
        error["code"] = refusal.stripe_code
    return {"error": error}

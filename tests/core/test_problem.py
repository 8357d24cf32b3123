"""The bodies of refusals, byte for byte: clients and dashboards read them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from semel import errors
from semel.core.policy import Policy
from semel.core.problem import refused
from semel.errors import InProgress, KeyMissing, KeyReused, Refusal, StoreUnavailable

IETF = Policy.ietf(problem_base="https://api.example/problems/")
STRIPE = Policy.stripe(problem_base="https://api.example/problems/")

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Refusal)]


def golden(body: bytes | None) -> Any:
    assert body is not None
    return json.loads(body)


def test_golden_problem() -> None:
    """A problem of RFC 9457, with a code and whether to retry."""
    answer = refused(KeyReused(), IETF)
    assert answer.status == 422
    assert answer.headers == (
        (b"content-type", b"application/problem+json"),
        (b"cache-control", b"no-store"),
        (b"link", b'<https://api.example/problems/idempotency-key-reused>; rel="describedby"; type="text/html"'),
    )
    assert answer.body == (
        b'{"type": "https://api.example/problems/idempotency-key-reused", "title": "Idempotency key reused", '
        b'"status": 422, "detail": "This key was used for a different request. Use a new key for a new operation.", '
        b'"code": "idempotency-key-reused", "retryable": false}'
    )


def test_golden_stripe_error() -> None:
    """Stripe answers a mismatch with 400 and an error of its own shape."""
    answer = refused(KeyReused(), STRIPE)
    assert answer.status == 400
    assert answer.headers[0] == (b"content-type", b"application/json")
    assert answer.body == (
        b'{"error": {"type": "idempotency_error", "message": "This key was used for a different request. Use a new key '
        b'for a new operation.", "doc_url": "https://api.example/problems/idempotency-key-reused"}}'
    )


def test_golden_stripe_error_with_a_code() -> None:
    """A code is there where Stripe has one, and its status where it is the same as ours."""
    answer = refused(InProgress(), STRIPE)
    assert answer.status == 409
    assert golden(answer.body) == {
        "error": {
            "type": "invalid_request_error",
            "message": "The first request with this key is still running. Wait, then send the same request again.",
            "doc_url": "https://api.example/problems/idempotency-key-in-progress",
            "code": "idempotency_key_in_use",
        }
    }


@pytest.mark.parametrize("policy", [IETF, STRIPE], ids=["ietf", "stripe"])
def test_retry_after(policy: Policy) -> None:
    """Whoever may come back is told when, in whole seconds; whoever was told nothing gets no header."""
    assert (b"retry-after", b"7") in refused(InProgress(retry_after=7), policy).headers
    assert (b"retry-after", b"0") in refused(InProgress(retry_after=0), policy).headers
    assert b"retry-after" not in dict(refused(KeyMissing(), policy).headers)


@pytest.mark.parametrize("policy", [IETF, STRIPE], ids=["ietf", "stripe"])
def test_store_faults_give_nothing_away(policy: Policy) -> None:
    """What is wrong with the store is for the log: a client learns that nothing ran, and no address or table."""
    answer = refused(StoreUnavailable("postgresql://db.internal refused the connection"), policy)
    assert answer.status == 503
    assert b"db.internal" not in (answer.body or b"")
    assert b"it was not run" in (answer.body or b"")


@pytest.mark.parametrize("kind", KINDS)
def test_every_refusal_has_both_bodies(kind: type[Refusal]) -> None:
    """Every refusal can be said in both dialects, its type a URI under the policy's own base."""
    problem = golden(refused(kind(), IETF).body)
    assert problem["type"] == f"https://api.example/problems/{kind.slug}"
    assert (problem["status"], problem["code"], problem["retryable"]) == (kind.status, kind.slug, kind.retryable)
    assert refused(kind(), IETF).status == kind.status
    error = golden(refused(kind(), STRIPE).body)["error"]
    assert error["message"] == problem["detail"]
    assert error["doc_url"] == problem["type"]


@pytest.mark.parametrize("kind", KINDS)
def test_stripes_clients_are_told_whether_to_retry(kind: type[Refusal]) -> None:
    """Stripe's clients would send any 409 or 5xx again, so they are told, in their own header; others are not."""
    said = dict(refused(kind(), STRIPE).headers)[b"stripe-should-retry"]
    assert said == (b"true" if kind.retryable else b"false")
    assert b"stripe-should-retry" not in dict(refused(kind(), IETF).headers)


@pytest.mark.parametrize("preset", [Policy.ietf, Policy.stripe])
def test_nothing_is_linked_that_is_not_there(preset: Callable[..., Policy]) -> None:
    """Unless the application says where its pages are, a problem has a name, and no address that anybody could own."""
    answer = refused(KeyReused(), preset())
    assert b"http" not in (answer.body or b"")
    assert b"link" not in dict(answer.headers)
    if preset == Policy.ietf:
        assert json.loads(answer.body or b"")["type"] == "urn:semel:problem:idempotency-key-reused"

"""Which headers look like credentials, by their names alone."""

from __future__ import annotations

import pytest

from semel import Policy
from semel.core.credentials import looks_secret
from semel.errors import ConfigurationError

SECRET = """
    authorization proxy-authorization authentication-info cookie x-session-id x-api-key x_api_key api-key apikey key
    x-api-key-id x-masterkey x-auth-token x-auth x-access-token x-amz-security-token x-csrftoken x-xsrf-token x-hmac
    x-client-secret x-password x-passwd x-pwd stripe-signature x-hub-signature-256 signature signature-input x-sig
    x-jwt x-goog-iap-jwt-assertion x-amzn-oidc-data x-saml-response x-wsse dpop x-otp x-pin x-mfa x-credentials
    x-api-key1 api_key_2 apikey2 x-passcode x-macaroon
""".split()  # noqa: SIM905 - to be read as words
PLAIN = """
    accept accept-language content-type content-encoding content-digest host user-agent prefer if-match origin referer
    keep-alive forwarded x-forwarded-for x-request-id traceparent x-tenant x-currency x-api-version x-author x-authors
    x-mapping x-design x-titan idempotency-key x-idempotency-key paypal-idempotency-key idempotencykey
""".split()  # noqa: SIM905 - as above


@pytest.mark.parametrize("name", SECRET)
def test_secret(name: str) -> None:
    """What a client proves itself with, or signs with, is told by its name."""
    assert looks_secret(name)
    assert not Policy().stores_header(name.encode())


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    """What a handler may need is none, and the key of the operation least of all."""
    assert not looks_secret(name)
    assert Policy().stores_header(name.encode())


def test_policy_says_otherwise() -> None:
    """A policy has further headers stored or left out; its own key's header is stored under whatever name."""
    policy = Policy(header="X-Intent-Key", store_headers=["X-Partition-Key"], omit_headers={"X-Weather"})
    stored = {
        name: policy.stores_header(name) for name in (b"x-intent-key", b"x-partition-key", b"x-weather", b"x-key")
    }
    assert stored == {b"x-intent-key": True, b"x-partition-key": True, b"x-weather": False, b"x-key": False}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"store_headers": ["Authorization"]}, "store_headers can't be"),
        ({"store_headers": ["cookie"]}, "hold no credentials"),
        ({"store_headers": ["a b"]}, "names of headers"),
        ({"omit_headers": ["X-Ride:"]}, "names of headers"),
        ({"store_headers": ["X-Ride"], "omit_headers": ["x-ride"]}, "other headers than those of omit_headers"),
        ({"omit_headers": ["Idempotency-Key"]}, "which a worker needs"),
    ],
)
def test_mistakes(fields: dict[str, list[str]], message: str) -> None:
    """What can't be meant is refused at start-up."""
    with pytest.raises(ConfigurationError, match=message):
        Policy(**fields)  # type: ignore[arg-type]  # of strings, all of them

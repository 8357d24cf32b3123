"""What a journal keeps of a request, and when two requests are the same."""

from dataclasses import replace

import pytest

from semel.core.intent import Outgoing, checked, fingerprint, is_same, kept_headers, without_login
from semel.errors import ConfigurationError

JSON = ((b"content-type", b"application/json"),)
PAID = Outgoing("POST", "https://api.example/pay?a=1&b=2", JSON, b'{"to": "bob", "amount": 5}')


@pytest.mark.parametrize("intent", [None, "", "  ", 17, b"invoice", "two\nlines", "x" * 501])
def test_no_intent(intent: object) -> None:
    """An intent is one line of text."""
    with pytest.raises(ConfigurationError, match="invoice 17"):
        checked(intent)


def test_intent() -> None:
    """Any line of text is an intent, in any script."""
    assert checked("Rechnung 17 für Änne") == "Rechnung 17 für Änne"


def test_credentials_are_not_kept() -> None:
    """Headers with credentials, and those of a single try, are not kept."""
    sent = [
        (b"Authorization", b"Bearer x"),
        (b"Cookie", b"a=b"),
        (b"X-Api-Key", b"x"),
        (b"Stripe-Signature", b"x"),
        (b"Set-Cookie", b"x"),
        (b"Host", b"api.example"),
        (b"Content-Length", b"2"),
        (b"Content-Type", b"application/json"),
        (b"Idempotency-Key", b"k"),
        (b"Accept", b"*/*"),
    ]
    names = [name for name, _ in kept_headers(sent, "accept")]
    assert names == [b"content-type", b"idempotency-key"]
    assert without_login("https://bob:secret@api.example:8443/pay?a=1#x") == "https://api.example:8443/pay?a=1"


@pytest.mark.parametrize(
    "other, same",
    [
        (replace(PAID, body=b'{"amount":5.0,"to":"bob"}'), True),
        (replace(PAID, headers=(*JSON, (b"authorization", b"Bearer new"))), True),
        (replace(PAID, url="https://API.example/pay?b=2&a=1"), True),
        (replace(PAID, body=b'{"to": "bob", "amount": 6}'), False),
        (replace(PAID, url="https://other.example/pay?a=1&b=2"), False),
        (replace(PAID, url="http://api.example/pay?a=1&b=2"), False),
        (replace(PAID, url="https://api.example/pay"), False),
        (replace(PAID, method="PUT"), False),
    ],
)
def test_same(other: Outgoing, same: bool) -> None:
    """The same operation has the same method, host, path, query and content; its credentials may be new ones."""
    assert is_same(fingerprint(PAID), other) is same

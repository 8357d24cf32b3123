"""Signatures of webhooks, and the forms of their senders. Other libraries verify them in tests/webhooks."""

import base64
import hashlib
import hmac
import json
from datetime import timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from semel.core.webhook import (
    PRESETS,
    PrivateKey,
    PublicKey,
    Symmetric,
    WebhookEvent,
    check_signing,
    new_keys,
    new_secret,
    preset_named,
    read_plain,
    read_secret,
    signatures,
    verified,
)
from semel.errors import ConfigurationError, SignatureInvalid, WebhookMalformed, WebhookTooOld

NOW = 1_700_000_000
OLD, NEW = new_secret(b"o" * 32), new_secret(b"n" * 32)
BODY = b'{"type":"order.paid","data":{"order":17}}'
STANDARD, STRIPE, GITHUB = PRESETS["standard"], PRESETS["stripe"], PRESETS["github"]


def sent(*secrets: str, message_id: str = "msg_1", at: int = NOW, body: bytes = BODY) -> dict[str, str]:
    signature = signatures([read_secret(each) for each in secrets], message_id, at, body)
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signature}


def received(
    headers: dict[str, str], *secrets: str, body: bytes = BODY, now: float = NOW, **settings: Any
) -> WebhookEvent:
    return verified(STANDARD, [read_secret(each) for each in secrets], headers, body, now=now, **settings)


def test_known_signature() -> None:
    """The signature of a known webhook, as senders and receivers of the specification publish it."""
    secret = read_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = signatures([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_received() -> None:
    """What is verified says its id, its type, when it was sent, and its payload byte for byte."""
    event = received(sent(NEW), NEW)
    assert (event.id, event.type, event.timestamp, event.payload) == ("msg_1", "order.paid", NOW, BODY)
    assert event.json() == {"type": "order.paid", "data": {"order": 17}}
    assert dict(event.headers)["webhook-id"] == "msg_1"


@given(st.binary(max_size=64), st.binary(min_size=24, max_size=64))
def test_any_bytes_can_be_signed(body: bytes, key: bytes) -> None:
    """A payload need not be text, and is signed as it is; any other is refused."""
    secret = new_secret(key)
    assert received(sent(secret, body=body), secret, body=body).payload == body
    with pytest.raises(SignatureInvalid):
        received(sent(secret, body=body), secret, body=body + b"x")


def test_a_body_that_is_not_json() -> None:
    """A payload that is not JSON has no type, and says so when it is read as JSON."""
    for body in (b"\xff\xfe", b"[1]", b'{"type": 5}', b"[" * 100_000):
        assert received(sent(NEW, body=body), NEW, body=body).type is None
    with pytest.raises(WebhookMalformed, match="not JSON"):
        received(sent(NEW, body=b"\xff"), NEW, body=b"\xff").json()


def test_rotation() -> None:
    """While secrets change, both sign, and a receiver with either accepts; so does one that knows both."""
    headers = sent(NEW, OLD)
    assert headers["webhook-signature"].count("v1,") == 2
    assert received(headers, OLD) == received(headers, NEW) == received(headers, NEW, OLD)
    assert received(sent(OLD), NEW, OLD).id == "msg_1"
    with pytest.raises(SignatureInvalid):
        received(sent(OLD), NEW)


def test_both_versions_at_once() -> None:
    """A sender may sign with a shared secret and with a key at once; each receiver looks for its own kind."""
    private, public = new_keys(b"s" * 32)
    headers = sent(NEW, private)
    assert [each.partition(",")[0] for each in headers["webhook-signature"].split()] == ["v1", "v1a"]
    assert received(headers, NEW) == received(headers, public) == received(headers, private)


def test_versions_to_come() -> None:
    """A signature of a version that is not known is passed over, whatever it is written in: another may fit."""
    headers = sent(NEW)
    later = headers | {"webhook-signature": f"v2,not*base64 {headers['webhook-signature']}"}
    assert received(later, NEW).id == "msg_1"
    with pytest.raises(SignatureInvalid):
        received(headers | {"webhook-signature": "v2,not*base64"}, NEW)


def test_ed25519() -> None:
    """A signature of version v1a is one of ed25519, over the same content."""
    private, public = new_keys(b"s" * 32)
    headers = sent(private)
    made = base64.b64decode(headers["webhook-signature"].removeprefix("v1a,"))
    content = b"msg_1.%d." % NOW + BODY
    theirs = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix("whpk_")))
    theirs.verify(made, content)
    assert made == Ed25519PrivateKey.from_private_bytes(b"s" * 32).sign(content)
    with pytest.raises(SignatureInvalid):
        received(headers, new_keys(b"t" * 32)[1])
    with pytest.raises(SignatureInvalid):
        received(headers | {"webhook-signature": "v1a,AAAA"}, public)


def test_a_private_key_in_both_spellings() -> None:
    """A private key may be spelled with its public half, or without."""
    long, _ = new_keys(b"s" * 32)
    short = "whsk_" + base64.b64encode(b"s" * 32).decode()
    assert read_secret(long) == read_secret(short) == PrivateKey(b"s" * 32)


def test_padding_may_be_missing() -> None:
    """Some senders leave the padding of base64 out."""
    assert read_secret(NEW.rstrip("=")) == read_secret(NEW)


@pytest.mark.parametrize("seconds", [-301, 301, 10**9])
def test_too_old(seconds: int) -> None:
    """What was sent more than five minutes ago is refused, and so is what comes from the future."""
    with pytest.raises(WebhookTooOld):
        received(sent(NEW), NEW, now=NOW + seconds)


def test_tolerance() -> None:
    """Five minutes to either side are accepted; an application may say another time."""
    for seconds in (-300, 300):
        assert received(sent(NEW), NEW, now=NOW + seconds).timestamp == NOW
    assert received(sent(NEW), NEW, now=NOW + 3000, tolerance=timedelta(hours=1)).timestamp == NOW


def test_strangers_are_not_told_of_clocks() -> None:
    """A signature that is wrong is told first, whenever it was made."""
    with pytest.raises(SignatureInvalid):
        received(sent(OLD), NEW, now=NOW + 9999)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"webhook-id": ""},
        {"webhook-id": "a.1700000000"},
        {"webhook-timestamp": "yesterday"},
        {"webhook-timestamp": "1e9"},
        {"webhook-timestamp": "-5"},
        {"webhook-timestamp": "9" * 400},
        {"webhook-signature": ""},
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,***"},
        {"webhook-signature": "v1,é"},
        {"webhook-signature": "v1,abc"},
    ],
)
def test_malformed(headers: dict[str, str]) -> None:
    """Headers that are missing or can't be read are one error."""
    with pytest.raises(WebhookMalformed):
        received(sent(NEW) | headers if headers else {}, NEW)


@pytest.mark.parametrize("message_id", ["x" * 256, "with blank", "ümlaut"])
def test_ids_that_no_inbox_takes(message_id: str) -> None:
    """An id that could not be kept is refused, though it is signed."""
    with pytest.raises(WebhookMalformed):
        received(sent(NEW, message_id=message_id), NEW)


def test_unknown_versions_are_passed_over() -> None:
    """A signature of a version that is not known says nothing, and hinders none that is."""
    headers = sent(NEW)
    headers["webhook-signature"] = f"v9,AAAA {headers['webhook-signature']}"
    assert received(headers, NEW).id == "msg_1"
    with pytest.raises(SignatureInvalid):
        received(headers | {"webhook-signature": "v9,AAAA"}, NEW)


def test_a_flood_of_signatures() -> None:
    """Only the first signatures of a header are looked at."""
    headers = sent(NEW)
    headers["webhook-signature"] = "v1,AAAA " * 100 + headers["webhook-signature"]
    with pytest.raises(SignatureInvalid):
        received(headers, NEW)


@pytest.mark.parametrize(
    "text, words",
    [
        ("hunter2", "begins with whsec_"),
        ("whsec_***", "not base64"),
        ("whsec_", "empty"),
        ("whsk_AAAA", "32 or 64 bytes"),
        ("whpk_AAAA", "32 bytes"),
        ("whsk_" + base64.b64encode(b"s" * 64).decode(), "another one's"),
    ],
)
def test_secrets_that_are_none(text: str, words: str) -> None:
    """A secret that can't be used says why, and is not repeated."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_secret(text)
    assert text.partition("_")[2] == "" or text not in str(caught.value)


@pytest.mark.parametrize(
    "secrets, words",
    [
        ([], "at least one"),
        ([Symmetric(b"short")], "24 to 64 bytes; this one has 5"),
        ([Symmetric(b"x" * 65)], "24 to 64"),
        ([PublicKey(b"p" * 32)], "can't sign"),
    ],
)
def test_secrets_that_must_not_sign(secrets: list[Any], words: str) -> None:
    """A sender needs a secret, of the length that the specification asks for, and no public key."""
    with pytest.raises(ConfigurationError, match=words):
        check_signing(secrets)


def test_secrets_are_not_shown() -> None:
    """A secret is not in what a debugger or a log shows of it."""
    check_signing([read_secret(NEW), PrivateKey(b"s" * 32)])
    assert repr(read_secret(NEW)) == "Symmetric(version='v1')"
    assert repr(PrivateKey(b"s" * 32)) == "PrivateKey(version='v1a')"


def stripe_headers(secret: str, body: bytes, at: int = NOW) -> dict[str, str]:
    made = hmac.new(secret.encode(), b"%d." % at + body, hashlib.sha256).hexdigest()
    return {"stripe-signature": f"t={at},v1={made},v0=6ffbb59b2300aae63f272406069a9788598b792a944a07aba816edb039989a39"}


def test_stripe() -> None:
    """Stripe's form: the secret is used as it is written, and the id is the event's."""
    body = json.dumps({"id": "evt_1", "object": "event", "type": "charge.succeeded"}).encode()
    secrets = [read_plain("whsec_other"), read_plain("whsec_test")]
    event = verified(STRIPE, secrets, stripe_headers("whsec_test", body), body, now=NOW)
    assert (event.id, event.type, event.timestamp) == ("evt_1", "charge.succeeded", NOW)
    with pytest.raises(WebhookTooOld):
        verified(STRIPE, secrets, stripe_headers("whsec_test", body), body, now=NOW + 301)
    with pytest.raises(SignatureInvalid):
        verified(STRIPE, secrets, stripe_headers("whsec_wrong", body), body, now=NOW)


@pytest.mark.parametrize("value", ["", "t=1700000000", "v1=00", "t=x,v1=00", "t=1700000000,v1=zz", "nonsense"])
def test_stripe_malformed(value: str) -> None:
    """A header of Stripe's that can't be read is the same error; one without a signature proves nothing."""
    with pytest.raises((WebhookMalformed, SignatureInvalid)):
        verified(STRIPE, [read_plain("s")], {"stripe-signature": value}, b"{}", now=NOW)


def test_stripe_without_an_id() -> None:
    """An event without an id can't be told from its duplicate."""
    with pytest.raises(WebhookMalformed, match="no id"):
        verified(STRIPE, [read_plain("s")], stripe_headers("s", b"{}"), b"{}", now=NOW)


def test_github() -> None:
    """GitHub's form, by the example in its documentation. It says no time, so none is checked."""
    headers = {
        "x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        "x-github-delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "x-github-event": "push",
    }
    secrets = [read_plain("It's a Secret to Everybody")]
    event = verified(GITHUB, secrets, headers, b"Hello, World!", now=0)
    assert (event.id, event.type, event.timestamp) == (headers["x-github-delivery"], "push", None)
    with pytest.raises(SignatureInvalid):
        verified(GITHUB, secrets, headers, b"Hello, World?", now=0)
    for name in ("x-hub-signature-256", "x-github-delivery"):
        with pytest.raises(WebhookMalformed):
            verified(GITHUB, secrets, {**headers, name: ""}, b"Hello, World!", now=0)
    with pytest.raises(WebhookMalformed):
        verified(GITHUB, secrets, {**headers, "x-hub-signature-256": "sha1=00"}, b"Hello, World!", now=0)


def test_presets() -> None:
    """A preset is asked for by its name, and an empty secret is none."""
    assert preset_named("github") is GITHUB
    with pytest.raises(ConfigurationError, match="There are standard, stripe, github"):
        preset_named("gitlab")
    with pytest.raises(ConfigurationError, match="empty"):
        read_plain("")

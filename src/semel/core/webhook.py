"""Signatures of webhooks, made and verified, by Standard Webhooks 1.0. Nothing here sends, receives or tells the time.

A sender signs ``id.timestamp.payload``, with every secret that it has: a new one can be introduced while receivers
still know the old one. A receiver accepts what one of its secrets has signed. ``PRESETS`` has the forms of other
senders, which differ in what is signed and in which header the signature is.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any

from semel.core.value import value
from semel.errors import ConfigurationError, SignatureInvalid, WebhookMalformed, WebhookTooOld

SECRET = "whsec_"  # noqa: S105 - the beginning of one
PRIVATE_KEY = "whsk_"
PUBLIC_KEY = "whpk_"

#: What the specification asks of a secret that signs.
MIN_SECRET, MAX_SECRET = 24, 64
#: Of ed25519: a private key is a seed, alone or with the public key after it; both are in use.
KEY_BYTES = 32

#: How far the time of sending may be from the receiver's clock, before it or after it.
TOLERANCE = timedelta(minutes=5)

#: A header of more signatures than this is no rotation of secrets; each one costs a comparison.
MAX_SIGNATURES = 16

#: As long as an id may be in the inbox.
MAX_ID = 255

_VERSIONS = frozenset({"v1", "v1a"})
_ID = re.compile(rf"[!-~]{{1,{MAX_ID}}}")
_SECONDS = re.compile(r"[0-9]{1,12}")
_MALFORMED = "{} is missing, or can't be read."


@dataclass(frozen=True, slots=True)
class Symmetric:
    """A secret that sender and receiver share (HMAC-SHA256)."""

    key: bytes = field(repr=False)
    version: str = "v1"

    def sign(self, content: bytes) -> bytes:
        """Return the signature of *content*."""
        return hmac.digest(self.key, content, "sha256")

    def has_signed(self, content: bytes, signature: bytes) -> bool:
        """Whether *signature* is that of *content*, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(self.sign(content), signature)


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """The sender's half of a pair of keys (ed25519). It can verify, too."""

    seed: bytes = field(repr=False)
    version: str = "v1a"

    def sign(self, content: bytes) -> bytes:
        """Return the signature of *content*."""
        signature: bytes = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed).sign(content)
        return signature

    def has_signed(self, content: bytes, signature: bytes) -> bool:
        """Whether *signature* is that of *content*."""
        return self.public.has_signed(content, signature)

    @property
    def public(self) -> PublicKey:
        """The receiver's half."""
        private = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed)
        return PublicKey(private.public_key().public_bytes_raw())


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The receiver's half of a pair of keys: it verifies, and can't sign."""

    key: bytes
    version: str = "v1a"

    def sign(self, _content: bytes) -> bytes:
        """Refuse."""
        raise ConfigurationError(f"A public key ({PUBLIC_KEY}…) can't sign. Give the private key ({PRIVATE_KEY}…).")

    def has_signed(self, content: bytes, signature: bytes) -> bool:
        """Whether *signature* is that of *content*."""
        key = _ed25519().Ed25519PublicKey.from_public_bytes(self.key)
        try:
            key.verify(signature, content)
        except import_module("cryptography.exceptions").InvalidSignature:
            return False
        return True

    @property
    def text(self) -> str:
        """The key as it is given to receivers."""
        return PUBLIC_KEY + base64.b64encode(self.key).decode()


Secret = Symmetric | PrivateKey | PublicKey


def read_secret(text: str) -> Secret:
    """Return the secret that *text* spells: ``whsec_…``, ``whsk_…`` or ``whpk_…``. No message repeats it."""
    for prefix, made in ((SECRET, _symmetric), (PRIVATE_KEY, _private), (PUBLIC_KEY, _public)):
        if text.startswith(prefix):
            encoded = text.removeprefix(prefix).rstrip("=")
            try:
                data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
            except (binascii.Error, ValueError):
                raise ConfigurationError(f"What follows {prefix} in a secret is not base64.") from None
            return made(data)
    raise ConfigurationError(
        f"A secret of webhooks begins with {SECRET}, {PRIVATE_KEY} or {PUBLIC_KEY}. Make one: semel webhooks secret."
    )


def read_plain(text: str) -> Secret:
    """Return a secret that is used as it is written, as Stripe's and GitHub's are."""
    if not text.strip():
        raise ConfigurationError("The secret is empty, and would let every sender in.")
    return Symmetric(text.encode())


def _symmetric(data: bytes) -> Secret:
    if not data:
        raise ConfigurationError("The secret is empty, and would let every sender in.")
    return Symmetric(data)


def _private(data: bytes) -> Secret:
    if len(data) not in {KEY_BYTES, 2 * KEY_BYTES}:
        raise ConfigurationError(f"A private key has {KEY_BYTES} or {2 * KEY_BYTES} bytes; this one has {len(data)}.")
    key = PrivateKey(data[:KEY_BYTES])
    if data[KEY_BYTES:] and data[KEY_BYTES:] != key.public.key:
        raise ConfigurationError("The public half in this private key is another one's.")
    return key


def _public(data: bytes) -> Secret:
    if len(data) != KEY_BYTES:
        raise ConfigurationError(f"A public key has {KEY_BYTES} bytes; this one has {len(data)}.")
    return PublicKey(data)


def check_signing(secrets: Sequence[Secret]) -> None:
    """Refuse secrets that a sender must not use."""
    if not secrets:
        raise ConfigurationError("A webhook is signed: give at least one secret. Make one: semel webhooks secret.")
    for secret in secrets:
        if isinstance(secret, PublicKey):
            secret.sign(b"")
        if isinstance(secret, Symmetric) and not MIN_SECRET <= len(secret.key) <= MAX_SECRET:
            raise ConfigurationError(
                f"A secret that signs webhooks has {MIN_SECRET} to {MAX_SECRET} bytes; this one has {len(secret.key)}. "
                "Make one: semel webhooks secret."
            )


def new_secret(random: bytes) -> str:
    """Spell *random* bytes as a secret to share."""
    return SECRET + base64.b64encode(random).decode()


def new_keys(seed: bytes) -> tuple[str, str]:
    """Return the private and the public key that grow from a random *seed* of 32 bytes, as they are spelled."""
    public = PrivateKey(seed).public
    return PRIVATE_KEY + base64.b64encode(seed + public.key).decode(), public.text


def signed_content(message_id: str, timestamp: str, payload: bytes) -> bytes:
    """Return what is signed. The payload counts byte for byte."""
    return f"{message_id}.{timestamp}.".encode("utf-8", "surrogateescape") + payload


def signatures(secrets: Sequence[Secret], message_id: str, timestamp: int, payload: bytes) -> str:
    """Return the value of ``webhook-signature``: one signature for each secret."""
    content = signed_content(message_id, str(timestamp), payload)
    return " ".join(f"{each.version},{base64.b64encode(each.sign(content)).decode()}" for each in secrets)


@value
class WebhookEvent:
    """One webhook that was received, after its signature was verified."""

    #: The same on every try of the sender's.
    id: str
    payload: bytes
    #: When it was sent, in seconds since 1970; None: the sender does not say.
    timestamp: int | None
    #: What happened, as far as the sender says it in the usual place.
    type: str | None
    #: Lower-case names. Only those that the preset says are signed can be trusted.
    headers: tuple[tuple[str, str], ...] = ()

    def json(self) -> Any:
        """Return the payload, read as JSON."""
        return read_json(self.payload)


@value
class Signed:
    """What the headers of a webhook say, before anything is verified."""

    content: bytes
    #: With the version that each is marked with.
    signatures: tuple[tuple[str, bytes], ...]
    timestamp: int | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """The form of one sender's webhooks."""

    read_secret: Callable[[str], Secret]
    #: Reads lower-case headers and the body; raises ``WebhookMalformed``.
    read: Callable[[Mapping[str, str], bytes], Signed]
    #: Says the id and the type of one that is verified.
    identify: Callable[[Mapping[str, str], bytes], tuple[str, str | None]]
    #: Whether every delivery of an event has the same payload, so that another one under its id is a mistake.
    repeats_payload: bool = True


def verified(
    preset: Preset,
    secrets: Sequence[Secret],
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: float,
    tolerance: timedelta = TOLERANCE,
) -> WebhookEvent:
    """Return the webhook, if one of *secrets* has signed it and it was sent about *now*. *headers* have lower-case
    names.
    """
    signed = preset.read(headers, body)
    # All are compared, whichever fits: how long it takes says nothing of the secrets.
    fits = [
        secret.has_signed(signed.content, signature)
        for secret in secrets
        for version, signature in signed.signatures
        if version == secret.version
    ]
    if not any(fits):
        raise SignatureInvalid
    # After the signature, so that a stranger learns nothing of the receiver's clock.
    if signed.timestamp is not None and abs(now - signed.timestamp) > tolerance.total_seconds():
        raise WebhookTooOld
    message_id, kind = preset.identify(headers, body)
    if not _ID.fullmatch(message_id):
        raise WebhookMalformed(f"The id of a webhook has 1 to {MAX_ID} printable characters of ASCII, and no blanks.")
    return WebhookEvent(message_id, body, signed.timestamp, kind, tuple(headers.items()))


def read_json(body: bytes) -> Any:
    """Read the body of a webhook as JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise WebhookMalformed("The body is not JSON.") from None


def _standard(headers: Mapping[str, str], body: bytes) -> Signed:
    message_id, sent = _header(headers, "webhook-id"), _header(headers, "webhook-timestamp")
    if "." in message_id:
        # What is signed has no other marks: with one in the id, a part of another webhook's payload could be its time.
        raise WebhookMalformed("webhook-id has a full stop in it, which Standard Webhooks does not allow.")
    found = []
    for each in _header(headers, "webhook-signature").split()[:MAX_SIGNATURES]:
        version, comma, encoded = each.partition(",")
        if not comma:
            raise WebhookMalformed(_MALFORMED.format("webhook-signature"))
        if version in _VERSIONS:  # A sender may be ahead of us, and sign in a newer way beside these.
            found.append((version, _decoded(encoded, "webhook-signature")))
    return Signed(signed_content(message_id, sent, body), tuple(found), _seconds(sent, "webhook-timestamp"))


def _standard_id(headers: Mapping[str, str], body: bytes) -> tuple[str, str | None]:
    return headers["webhook-id"].strip(), _member(body, "type")


def _stripe(headers: Mapping[str, str], body: bytes) -> Signed:
    name = "stripe-signature"
    pairs = [each.strip().partition("=")[::2] for each in _header(headers, name).split(",")[: MAX_SIGNATURES + 1]]
    sent = next((said for key, said in pairs if key == "t"), "")
    found = tuple(("v1", _unhexed(said, name)) for key, said in pairs if key == "v1")
    return Signed(f"{sent}.".encode() + body, found, _seconds(sent, name))


def _stripe_id(_headers: Mapping[str, str], body: bytes) -> tuple[str, str | None]:
    message_id = _member(body, "id")
    if not message_id:
        raise WebhookMalformed("The event has no id.")
    return message_id, _member(body, "type")


def _github(headers: Mapping[str, str], body: bytes) -> Signed:
    name = "x-hub-signature-256"
    kind, _, said = _header(headers, name).partition("=")
    if kind != "sha256":
        raise WebhookMalformed(_MALFORMED.format(name))
    _header(headers, "x-github-delivery")
    return Signed(body, (("v1", _unhexed(said, name)),))


def _github_id(headers: Mapping[str, str], _body: bytes) -> tuple[str, str | None]:
    return headers["x-github-delivery"].strip(), headers.get("x-github-event")


PRESETS: dict[str, Preset] = {
    "standard": Preset(read_secret, _standard, _standard_id),
    # An event says how many endpoints still wait for it (pending_webhooks), which changes from try to try.
    "stripe": Preset(read_plain, _stripe, _stripe_id, repeats_payload=False),
    # Signs the body alone: neither the id nor the time of sending.
    "github": Preset(read_plain, _github, _github_id),
}


def preset_named(name: str) -> Preset:
    """Return the preset of this *name*."""
    if name not in PRESETS:
        raise ConfigurationError(f"There is no preset {name!r} of webhooks. There are {', '.join(PRESETS)}.")
    return PRESETS[name]


def _header(headers: Mapping[str, str], name: str) -> str:
    found = headers.get(name, "").strip()
    if not found:
        raise WebhookMalformed(_MALFORMED.format(name))
    return found


def _seconds(text: str, name: str) -> int:
    if not _SECONDS.fullmatch(text):
        raise WebhookMalformed(_MALFORMED.format(name))
    return int(text)


def _decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WebhookMalformed(_MALFORMED.format(name)) from None


def _unhexed(text: str, name: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise WebhookMalformed(_MALFORMED.format(name)) from None


def _member(body: bytes, name: str) -> str | None:
    """Return a text of the payload's top level, if it is there."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    said = found.get(name) if isinstance(found, dict) else None
    return said if isinstance(said, str) else None


def _ed25519() -> Any:
    # Here, because it is an extra, and most secrets are symmetric.
    try:
        return import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:  # pragma: no cover - seen only where the extra is missing
        raise ConfigurationError("Keys of ed25519 need a library. Run: pip install 'semel[webhooks]'") from error

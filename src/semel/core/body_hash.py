"""Keys for clients that can't send one, made from fields of the body. It stores no key and looks none up.

The key is also the fingerprint: fields that are not in it, such as the time of sending, may differ on a retry.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import NoReturn

from semel.core.canonical import UNREADABLE, form_fields, json_value, media_type, pack
from semel.core.fingerprint import CANONICAL_LIMIT, MIN_SECRET, Subject, canonical_query, header_fault
from semel.core.key import Key
from semel.errors import BodyTooLarge, ConfigurationError, KeyInvalid, KeyMissing

#: What such a key starts with, so that operators can tell it from one that a client chose.
PREFIX = "body:"
#: Raise it when any byte that is hashed changes.
VERSION = b"semel body key 1"

_OR_SEND_A_KEY = "or an idempotency key in a header"


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyHash:
    """How to make keys for requests without one: the same fields, within a time window, are the same operation."""

    #: What makes two requests the same operation: JSON members as dotted paths (``amount``, ``card.number``), or the
    #: names of form fields. A path goes on through arrays: ``lines.sku`` is the sku of every line.
    fields: Collection[str]
    #: How long, from the first request: it replaces ``retention``. The same body afterwards is a new
    #: operation. So choose it longer than clients retry, and shorter than the time after which a user may order again.
    window: timedelta
    #: A header by which a client asks for another operation with the same fields. Its value is
    #: part of the key: a retry repeats it.
    unless_header: str | None = None
    #: Keys are HMAC-SHA-256 under this secret: a plain digest of a few fields can be guessed after a leak.
    secret: bytes | None = field(default=None, repr=False)
    #: Bytes. A longer body is refused (413) unless the request has a key: parsing JSON blocks the event loop.
    max_body: int = CANONICAL_LIMIT

    def __post_init__(self) -> None:
        """Check every field."""
        given: object = self.fields
        if isinstance(given, str | bytes) or not isinstance(given, Collection) or not given:
            _wrong("fields", "a list of JSON members or form fields, such as ['amount', 'card.number']")
        if not all(isinstance(each, str) and all(each.split(".")) for each in given):
            _wrong("fields", "dotted paths such as 'amount' or 'card.number'")
        object.__setattr__(self, "fields", tuple(sorted(set(given))))
        window: object = self.window
        if not isinstance(window, timedelta) or window <= timedelta(0):
            _wrong("window", "a timedelta greater than zero, such as timedelta(minutes=10)")
        header: object = self.unless_header
        if header is not None:
            fault = header_fault(header.lower()) if isinstance(header, str) else f"{header!r} is not a header name"
            if fault:
                _wrong("unless_header", f"a header that a retry repeats, and {fault}")
        secret: object = self.secret
        if secret is not None and (not isinstance(secret, bytes) or len(secret) < MIN_SECRET):
            _wrong("secret", f"bytes, {MIN_SECRET} or more of them: os.urandom(32) makes a good secret")
        limit: object = self.max_body
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            _wrong("max_body", "a number of bytes, 1 or more")

    def key(self, scope: str, subject: Subject) -> Key:
        """Make the key of *subject*, a request of *scope*; refuse a request that has none of the fields."""
        if len(subject.body) > self.max_body:
            raise BodyTooLarge(
                f"Without an idempotency key, a body is at most {self.max_body} bytes here. Send one in a header."
            )
        parts = (
            VERSION,
            # A store keeps scopes apart by itself. In a log, which has digests only, the scope in the digest does.
            scope.encode("utf-8", "surrogatepass"),
            subject.method.encode(),
            subject.path.encode("utf-8", "surrogatepass"),
            canonical_query(subject.query),
            self._intent(subject),
            *self._picked(subject),
        )
        packed = pack(parts)
        digest = hashlib.sha256(packed) if self.secret is None else hmac.new(self.secret, packed, "sha256")
        return Key(PREFIX + digest.hexdigest())

    def _intent(self, subject: Subject) -> bytes:
        if self.unless_header is None:
            return b""
        name = self.unless_header.lower().encode()
        values = [value.strip() for each, value in subject.headers if each == name]
        if not all(values):
            raise KeyInvalid(f"The header {self.unless_header} is empty. Give each new operation a value of its own.")
        return pack(values)

    def _picked(self, subject: Subject) -> list[bytes]:
        """Return each field's name and value. A missing field differs from a null."""
        content_type = b", ".join(value for name, value in subject.headers if name == b"content-type")
        media = media_type(content_type.decode("latin-1"))
        wanted = ", ".join(self.fields)
        try:
            if media.is_json:
                body = json_value(subject.body)
                found = [_at(body, path.split(".")) for path in self.fields]
            elif media.is_form:
                pairs = form_fields(subject.body)
                found = [_named(pairs, name.encode()) for name in self.fields]
            else:
                raise KeyMissing(f"Send a JSON body or a form with some of: {wanted}; {_OR_SEND_A_KEY}.")
        except UNREADABLE:
            raise KeyMissing(
                f"The body does not match its content type, or has a field twice. Send some of: {wanted}; "
                f"{_OR_SEND_A_KEY}."
            ) from None
        if all(each is None for each in found):
            raise KeyMissing(f"The body has none of: {wanted}. Send some of them; {_OR_SEND_A_KEY}.")
        return [
            part for name, value in zip(self.fields, found, strict=True) for part in (name.encode(), _marked(value))
        ]


def is_made(key: Key) -> bool:
    """Whether *key* has the form of a key made from a body."""
    return key.value.startswith(PREFIX)


def _at(value: object, path: list[str]) -> bytes | None:
    """Return the value at *path* in *value*, in its one spelling; None if there is none."""
    if not path:
        return _spelled(value)
    if isinstance(value, list):
        found = [_at(element, path) for element in value]
        return None if all(each is None for each in found) else b"*" + pack(map(_marked, found))
    if isinstance(value, dict) and path[0] in value:
        return _at(value[path[0]], path[1:])
    return None


def _named(pairs: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    values = [value for each, value in pairs if each == name]
    return b"&" + pack(values) if values else None


def _marked(found: bytes | None) -> bytes:
    return b"-" if found is None else b"=" + found


def _spelled(value: object) -> bytes:
    """Spell a JSON value in one way. The first byte is its type, so that no two values have the same spelling."""
    match value:
        case dict():
            members = ((name.encode("utf-8", "surrogatepass"), _spelled(value[name])) for name in sorted(value))
            return b"{" + pack(part for member in members for part in member)
        case list():
            return b"[" + pack(map(_spelled, value))
        case str():
            return b'"' + value.encode("utf-8", "surrogatepass")
        case Decimal():
            sign, digits, exponent = value.as_tuple()
            text = "".join(map(str, digits))
            kept = text.rstrip("0")
            # 5, 5.0 and 50e-1 are one number, and so are 0 and -0.
            return f"#{sign}{kept}e{int(exponent) + len(text) - len(kept)}".encode() if kept else b"#0"
        case _:
            return repr(value).encode()


def _wrong(name: str, wanted: str) -> NoReturn:
    raise ConfigurationError(f"BodyHash.{name} must be {wanted}.")

"""The status URL of an operation, and the answer while it has not ended. It asks no store.

The URL is made from the key itself, so that it is the same for every duplicate and one look-up by primary key finds
the record. It is not a secret: a request for it is authenticated, too, and finds only operations of its own user.
"""

from __future__ import annotations

import binascii
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from semel.core.message import Answer, Headers
from semel.core.record import Record
from semel.core.scope import SEPARATOR
from semel.core.value import value
from semel.errors import ConfigurationError, OperationNotFound

#: The path of the status URLs, unless the application sets another.
STATUS_PATH = "/semel/operations"

#: Seconds. Often enough for a user who watches, and little load: one read by primary key.
RETRY_AFTER_SECONDS = 1

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

#: Longer than the name of any key and any path.
_MAX_NAME = 8192

# No key and no scope has a control character, or half of a surrogate pair: a database would refuse such a parameter.
_STORABLE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")

# Plain segments: no pattern, no escapes (they have two spellings), and no slash at the end.
_PATH = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")

#: It is for its owner alone, and the next answer will differ.
_NO_STORE = (b"cache-control", b"no-store")


@value
class Name:
    """An operation as its status URL names it."""

    key: str
    #: The part of the scope after the principal, if one key on two endpoints is two operations.
    operation: str
    #: When its record was made, in milliseconds of the database's clock: the key may have another record later.
    created_at: int
    #: When its record expires, in whole seconds: known even after the record is deleted.
    expires_at: int

    @classmethod
    def of(cls, record: Record) -> Name:
        """Name the operation of *record*."""
        operation = record.scope.partition(SEPARATOR)[2]
        created_at = (record.created_at - _EPOCH) // _MILLISECOND
        return cls(record.key, operation, created_at, int(record.expires_at.timestamp()))

    @classmethod
    def read(cls, text: str) -> Name:
        """Parse what ``str`` returned; any other text is an operation that does not exist."""
        try:
            raw = urlsafe_b64decode(text[:_MAX_NAME].encode("ascii") + b"==")
            key, operation, created_at, expires_at = json.loads(raw)
        except (UnicodeError, binascii.Error, ValueError, TypeError, RecursionError):
            raise OperationNotFound from None
        name = cls(key, operation, created_at, expires_at)
        kinds = [type(part) for part in (key, operation, created_at, expires_at)]
        if kinds != [str, str, int, int] or str(name) != text:
            raise OperationNotFound
        if not _STORABLE.fullmatch(key + operation):
            raise OperationNotFound
        return name

    def __str__(self) -> str:
        """Spell it as the last part of a path."""
        plain = json.dumps([self.key, self.operation, self.created_at, self.expires_at], separators=(",", ":"))
        return urlsafe_b64encode(plain.encode()).rstrip(b"=").decode()

    def scope_of(self, principal: str) -> str:
        """Return the scope that it has if it is *principal*'s."""
        return f"{principal}{SEPARATOR}{self.operation}" if self.operation else principal

    def is_of(self, record: Record) -> bool:
        """Whether it names the operation of *record*, which may expire later by now: an operator has resolved it."""
        own = Name.of(record)
        return (own.key, own.operation, own.created_at) == (self.key, self.operation, self.created_at)

    def is_past(self, now: datetime) -> bool:
        """Whether its record may have been reaped."""
        return self.expires_at <= now.timestamp()


def checked_path(path: object) -> str | None:
    """Return *path* if status URLs can be below it; None if there are none."""
    if path is None or (isinstance(path, str) and _PATH.fullmatch(path)):
        return path
    raise ConfigurationError(
        f"status_path must be a plain path such as {STATUS_PATH!r}, with a slash in front and none at the end, "
        f"or None to have no status URLs; not {path!r}."
    )


def mounted_path(mount: str, path: str | None) -> str | None:
    """Return *path* as a client has to send it if the app is at *mount*."""
    # With two slashes in front it would name a host, and the mount point may come from a proxy's header.
    return None if path is None else quote(f"/{mount.strip('/')}".rstrip("/")) + path


def name_below(path: str | None, asked: str) -> str | None:
    """Return the name of the operation at the path *asked*, if that is below *path*."""
    if path is None or not asked.startswith(f"{path}/"):
        return None
    return asked[len(path) + 1 :]


def location_of(record: Record, path: str) -> str:
    """Return the status URL of an operation, below *path*."""
    return f"{path}/{Name.of(record)}"


def for_owner_only(answer: Answer) -> Answer:
    """Return an operation's own *answer* to a GET: no shared cache may store it, unless the handler allowed it."""
    is_said = any(name == _NO_STORE[0] for name, _ in answer.headers)
    return answer if is_said else Answer(answer.status, (*answer.headers, _NO_STORE), answer.body)


def not_ended(record: Record, path: str, *further: tuple[bytes, bytes]) -> Answer:
    """Return the 202 for an operation that has not ended, with its progress."""
    where = location_of(record, path)
    shown = record.milestone
    body = {
        "state": str(record.state),
        "progress": shown.fraction if shown else None,
        "note": shown.note if shown else None,
        "status_url": where,
    }
    headers: Headers = (
        (b"content-type", b"application/json"),
        (b"location", where.encode("latin-1")),
        (b"retry-after", b"%d" % RETRY_AFTER_SECONDS),
        _NO_STORE,
        *further,
    )
    return Answer(202, headers, json.dumps(body).encode())

"""Replies of the scripts as values, and values as arguments of the scripts. It knows no connection."""

from __future__ import annotations

import json
from binascii import unhexlify
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Any

from semel.core.canonical import pack
from semel.core.message import Answer
from semel.core.record import Entry, Found, Hold, Record
from semel.core.state import State
from semel.stores.headers import read_back
from semel.stores.milestones import read_back as read_milestone

_STATES = {str(state).encode(): state for state in State}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

#: The SCAN pattern of a digest. With a star instead, shop:* would match the records of shop:eu, too.
ANY_DIGEST = "?" * 64

_write = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def spelled(text: str) -> bytes:
    """Return text as it is stored. Half of a surrogate pair, which a scope may hold, is kept."""
    return text.encode("utf-8", "surrogatepass")


def read(stored: bytes) -> str:
    """Return stored text."""
    return stored.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=4096)  # A key that was claimed is completed soon after.
def digest_of(scope: str, key: str) -> bytes:
    """Return the name of a record. It is a digest: a client's key with braces could choose its slot in a Cluster."""
    return sha256(pack((spelled(scope), spelled(key)))).hexdigest().encode()


@lru_cache(maxsize=64)  # There are as many as policies.
def microseconds(duration: timedelta) -> int:
    """Return a duration in microseconds, for the scripts."""
    return duration // _MICROSECOND


def found(reply: Sequence[Any]) -> Found:
    """Read what a claim found."""
    state, attempt, token, fingerprint, status, headers, body, lease_is_over, left, steps, accepted, trace = reply
    return Found(
        _STATES[state],
        int(attempt),
        unhexlify(token),
        unhexlify(fingerprint),
        None if status is None else Answer(int(status), read_back(headers.decode()), body),
        lease_is_over == 1,
        left <= 0 and state != b"unknown",
        None if steps is None else read(steps),
        accepted is not None,
        timedelta(microseconds=left),
        None if trace is None else trace.decode("ascii", "replace"),
    )


def record(reply: Sequence[Any]) -> Record:
    """Read a whole record."""
    state, scope, key, attempt, token, fingerprint, point, steps, status, headers, *rest = reply
    created_at, lease_expires_at, completed_at, expires_at, accepted, milestone, line, trace, body, now = rest
    lease = None if lease_expires_at is None else int(lease_expires_at)
    return Record(
        scope=read(scope),
        key=read(key),
        state=_STATES[state],
        attempt=int(attempt),
        token=unhexlify(token),
        fingerprint=unhexlify(fingerprint),
        recovery_point=None if point is None else read(point),
        steps=None if steps is None else read(steps),
        answer=None if status is None else Answer(int(status), read_back(headers.decode()), body),
        created_at=moment(int(created_at)),
        lease_expires_at=None if lease is None else moment(lease),
        completed_at=None if completed_at is None else moment(int(completed_at)),
        expires_at=moment(int(expires_at)),
        lease_left=None if lease is None else timedelta(microseconds=lease - now),
        retention_left=timedelta(microseconds=int(expires_at) - now),
        is_accepted=accepted is not None,
        milestone=read_milestone(None if milestone is None else read(milestone)),
        request_line="" if line is None else read(line),
        traceparent=None if trace is None else trace.decode("ascii", "replace"),
    )


def moment(at: int) -> datetime:
    """Return a time of the server as a datetime."""
    return _EPOCH + timedelta(microseconds=at)


def count(time: datetime) -> int:
    """Return a time in microseconds, for the scripts."""
    return (time - _EPOCH) // _MICROSECOND


def written_line(hold: Hold, event: str, actor: str, detail: str | None) -> bytes:
    """Return a line of the audit trail without its time, which the server adds in front."""
    line: dict[str, Any] = {"scope": hold.scope, "key": hold.key, "attempt": hold.attempt, "event": event}
    return spelled(_write(line | {"actor": actor, "detail": detail}))


def entry(line: bytes) -> Entry:
    """Read a line of the audit trail."""
    at, _, rest = line.partition(b" ")
    return Entry(at=moment(int(at)), **json.loads(read(rest)))

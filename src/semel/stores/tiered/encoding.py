"""A finished answer as the bytes that are kept in Redis, and back. What can't be read with certainty is nothing: a
value that is cut off, or another's, or of a version to come, is never an answer and never an error.

    version   1 byte
    checksum  CRC-32 of all that follows: against accidents. Who can write to this Redis can write any answer.
    head      state, flags, attempt, status
    fields    each behind its length: namespace, scope, key, token, fingerprint, steps, headers, body
"""

from __future__ import annotations

import hashlib
import struct
import zlib

from semel.core.canonical import pack
from semel.core.message import Answer
from semel.core.state import State
from semel.stores.headers import read_back, written
from semel.stores.tiered.entry import Entry

VERSION = 1

#: An entry that takes more bytes would hold up those that are sent to everybody else with it.
LARGEST = 64 * 1024

#: Hexadecimal digits of a name: enough that two keys never meet; and if they did, each answer says whose it is.
_DIGITS = 40

_SEAL = struct.Struct(">BI")
_HEAD = struct.Struct(">BBIH")
_LENGTH = struct.Struct(">I")

_STATES = (State.COMPLETE, State.FAILED)
_HAS_BODY, _HAS_STEPS, _IS_ACCEPTED = 1, 2, 4


def name_of(prefix: str, namespace: str, scope: str, key: str) -> bytes:
    """Return what the answer to a key is called in Redis. It is a digest: a key in braces could choose its own slot."""
    digest = hashlib.sha256(pack(map(_bytes, (namespace, scope, key)))).hexdigest()
    return f"{prefix}:answer:{digest[:_DIGITS]}".encode()


def encoded(namespace: str, entry: Entry) -> bytes:
    """Return *entry* as it is kept. Until when, Redis is told beside it."""
    answer = entry.answer
    has_body, has_steps = answer.body is not None, entry.steps is not None
    flags = has_body * _HAS_BODY | has_steps * _HAS_STEPS | entry.is_accepted * _IS_ACCEPTED
    head = _HEAD.pack(_STATES.index(entry.state), flags, entry.attempt, answer.status)
    fields = (
        _bytes(namespace),
        _bytes(entry.scope),
        _bytes(entry.key),
        entry.token,
        entry.fingerprint,
        _bytes(entry.steps or ""),
        _bytes(written(answer.headers)),
        answer.body or b"",
    )
    rest = head + b"".join([_LENGTH.pack(len(field)) + field for field in fields])
    return _SEAL.pack(VERSION, zlib.crc32(rest)) + rest


def decoded(namespace: str, scope: str, key: str, value: object, deadline: float) -> Entry | None:
    """Return the answer in *value*, if it is one to this very key, to be kept until *deadline*."""
    try:
        return _decoded(namespace, scope, key, value, deadline) if isinstance(value, bytes) else None
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the durable store has the answer
        return None


def _decoded(namespace: str, scope: str, key: str, value: bytes, deadline: float) -> Entry | None:
    version, checksum = _SEAL.unpack_from(value)
    rest = memoryview(value)[_SEAL.size :]
    if version != VERSION or zlib.crc32(rest) != checksum:
        return None
    state, flags, attempt, status = _HEAD.unpack_from(rest)
    whose_space, whose, which, token, fingerprint, steps, headers, body = _fields(rest[_HEAD.size :])
    if (whose_space, whose, which) != (_bytes(namespace), _bytes(scope), _bytes(key)):
        return None
    answer = Answer(status, read_back(_text(headers)), body if flags & _HAS_BODY else None)
    return Entry(
        scope,
        key,
        _STATES[state],
        attempt,
        token,
        fingerprint,
        answer,
        _text(steps) if flags & _HAS_STEPS else None,
        bool(flags & _IS_ACCEPTED),
        deadline,
    )


def _fields(rest: memoryview) -> list[bytes]:
    fields = []
    while rest:
        (length,) = _LENGTH.unpack_from(rest)
        end = _LENGTH.size + length
        fields.append(bytes(rest[_LENGTH.size : end]))
        rest = rest[end:]
    return fields


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")

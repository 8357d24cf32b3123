"""What a store keeps of a request and its answer, encrypted and back. It looks for no secret, and asks no store.

AES-SIV (RFC 5297): what is equal stays equal in one place and nowhere else, so that a step can be compared with the
one that was stored before, and no counter of nonces has to be kept. The place is part of it: the kind of value, the
scope and the key. What was moved to another record can't be opened there.

    version (1 byte) | which secret (4 bytes) | AES-SIV of the value (17 bytes longer than it)
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from semel.core import recovery
from semel.core.commands import Claim, Command, Commit, Complete, Finish, Page, Resolution, Save, TakeOver, Unpark
from semel.core.encrypted import HEADER, MARK, is_marked, is_marked_result
from semel.core.message import Answer, Head, Headers, Request
from semel.core.record import Found, Hold, Record, Stuck
from semel.core.recovery import Done, Progress
from semel.errors import ConfigurationError, SecretMissing
from semel.stores import headers as header_text
from semel.stores import requests as request_text

T = TypeVar("T")

VERSION = 1
#: Of a secret, decoded: as many as `head -c 32 /dev/urandom` gives.
MIN_SECRET = 32
_NAME_BYTES = 4
_PREFIX = 1 + _NAME_BYTES

#: Scope and key: where a value belongs.
Place = tuple[str, str]


class Sealer:
    """Encrypts with the first of some secrets, and decrypts with any of them."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """Derive what is needed from *secrets*; the first one writes."""
        self._ciphers = {
            _name_of(secret): AESSIV(hmac.digest(secret, b"semel encrypt 1", "sha512")) for secret in secrets
        }
        self._name = _name_of(secrets[0])
        self._writes = self._ciphers[self._name]

    @classmethod
    def of(cls, text: str) -> Sealer:
        """Read secrets in base64, apart by white space or commas."""
        secrets = [_decoded(each) for each in text.replace(",", " ").split()]
        if not secrets:
            raise ConfigurationError(f"There is no secret to encrypt with. {_MAKE}")
        return cls(secrets)

    def seal(self, kind: str, place: Place, value: bytes) -> bytes:
        """Encrypt *value*, for this place alone."""
        # A byte in front, since an empty value can't be encrypted by every version of OpenSSL.
        sealed = self._writes.encrypt(b"\0" + value, _bound(kind, place))
        return bytes([VERSION]) + self._name + sealed

    def open(self, kind: str, place: Place, sealed: bytes) -> bytes:
        """Decrypt what was sealed at this place."""
        cipher = self._ciphers.get(sealed[1:_PREFIX])
        if sealed[:1] != bytes([VERSION]) or cipher is None:
            raise SecretMissing
        try:
            return cipher.decrypt(sealed[_PREFIX:], _bound(kind, place))[1:]
        except InvalidTag:
            raise SecretMissing(_MOVED) from None

    def sealed(self, command: Command[T]) -> Command[T]:
        """Return *command* with all that is to be stored encrypted."""
        seal = _SEALED.get(type(command))
        return command if seal is None else seal(self, command)

    def opened(self, place: Place, outcome: Any) -> Any:
        """Return what a store answered, readable; *place* is that of the command, where the answer has none."""
        open_ = _OPENED.get(type(outcome))
        return outcome if open_ is None else open_(self, place, outcome)

    def sealed_answer(self, place: Place, answer: Answer) -> Answer:
        """Encrypt headers and body. The status stays: lists are filtered by it."""
        headers = self._marked("headers", place, header_text.written(answer.headers).encode())
        body = None if answer.body is None else self.seal("body", place, answer.body)
        return Answer(answer.status, headers, body)

    def opened_answer(self, place: Place, answer: Answer | None, *, is_listed: bool = False) -> Answer | None:
        """Decrypt headers and body; what was stored before there was a secret is as it is. Lists have no bodies."""
        if answer is None or not is_marked(answer.headers):
            return answer
        headers = header_text.read_back(self._unmarked("headers", place, answer.headers).decode())
        body = answer.body
        if body is not None and not is_listed:
            body = self.open("body", place, body)
        return Answer(answer.status, headers, body)

    def sealed_progress(self, place: Place, progress: Progress) -> Progress:
        """Encrypt the result of each step, but those that are stored in another form: a write compares the steps of
        the record, so they stay as they are. Names stay, too: they are recovery points, and people read them.
        """
        return Progress(
            tuple(self._sealed_step(place, step) if isinstance(step, Done) else step for step in progress.steps)
        )

    def opened_steps(self, place: Place, text: str | None) -> str | None:
        """Decrypt the results in stored steps, with how each is stored where that is not how it would be now."""
        if text is None:
            return None
        steps = recovery.read_back(text).steps
        return recovery.written(
            Progress(tuple(self._opened_step(place, step) if isinstance(step, Done) else step for step in steps))
        )

    def sealed_request(self, place: Place, request: Request) -> Request:
        """Encrypt all that is stored of a request; its method and its principal stay readable, too."""
        marked = self._marked("request", place, request_text.written(request).encode())
        head = Head(request.head.method, "/", b"", marked)
        return Request(head, self.seal("request body", place, request.body), request.principal)

    def opened_request(self, place: Place, request: Request) -> Request:
        """Decrypt a stored request."""
        if not is_marked(request.head.headers):
            return request
        known = self._unmarked("request", place, request.head.headers).decode()
        return request_text.read_back(known, self.open("request body", place, request.body))

    def _marked(self, kind: str, place: Place, value: bytes) -> Headers:
        return ((HEADER, base64.b64encode(self.seal(kind, place, value))),)

    def _unmarked(self, kind: str, place: Place, headers: Headers) -> bytes:
        return self.open(kind, place, _unpacked(headers[0][1]))

    def _sealed_step(self, place: Place, step: Done) -> Done:
        if step.kept is not None:
            return Done(step.kind, step.name, step.kept[0])
        sealed = self.seal(f"step {step.name}", place, recovery.as_text(step.result).encode())
        return Done(step.kind, step.name, {MARK: base64.b64encode(sealed).decode()})

    def _opened_step(self, place: Place, step: Done) -> Done:
        if not is_marked_result(step.result):
            return replace(step, kept=(step.result,))
        sealed = _unpacked(step.result[MARK])
        result = json.loads(self.open(f"step {step.name}", place, sealed))
        return Done(step.kind, step.name, result, None if sealed[1:_PREFIX] == self._name else (step.result,))


_MAKE = "Make one by: head -c 32 /dev/urandom | base64"
_MOVED = "What is stored does not belong to this record, or was changed: its encryption does not fit."


def _name_of(secret: bytes) -> bytes:
    return hmac.digest(secret, b"semel encrypt name", "sha256")[:_NAME_BYTES]


def _decoded(text: str) -> bytes:
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(f"A secret to encrypt with is not base64. {_MAKE}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigurationError(f"A secret to encrypt with has {len(secret)} bytes, not {MIN_SECRET}. {_MAKE}")
    return secret


def _unpacked(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise SecretMissing(_MOVED) from None


def _bound(kind: str, place: Place) -> list[bytes]:
    scope, key = place
    return [kind.encode(), scope.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass")]


def _of(hold: Hold | Claim | Record) -> Place:
    return hold.scope, hold.key


def _claim(sealer: Sealer, claim: Claim) -> Claim:
    return claim if claim.request is None else replace(claim, request=sealer.sealed_request(_of(claim), claim.request))


def _take_over(sealer: Sealer, command: TakeOver) -> TakeOver:
    return command if command.claim.request is None else replace(command, claim=_claim(sealer, command.claim))


def _answered(sealer: Sealer, command: Any) -> Any:
    return replace(command, answer=sealer.sealed_answer(_of(command.hold), command.answer))


def _saved(sealer: Sealer, command: Any) -> Any:
    place = _of(command.hold)
    before = sealer.sealed_progress(place, command.before)
    return replace(command, progress=sealer.sealed_progress(place, command.progress), before=before)


def _unparked(sealer: Sealer, command: Unpark) -> Unpark:
    return replace(command, progress=sealer.sealed_progress(_of(command.hold), command.progress))


_SEALED: dict[type[Command[Any]], Callable[[Sealer, Any], Any]] = {
    Claim: _claim,
    TakeOver: _take_over,
    Complete: _answered,
    Finish: _answered,
    Resolution: _answered,
    Save: _saved,
    Commit: _saved,
    Unpark: _unparked,
}


def _found(sealer: Sealer, place: Place, found: Found) -> Found:
    if found.answer is None and found.steps is None:
        return found
    try:
        answer, steps = sealer.opened_answer(place, found.answer), sealer.opened_steps(place, found.steps)
    except SecretMissing:
        if found.is_expired:  # It counts for nothing: a retry begins anew, or is refused for being late.
            return found
        raise
    return replace(found, answer=answer, steps=steps)


def _record(sealer: Sealer, _: Place, record: Record) -> Record:
    place = _of(record)
    answer, steps = sealer.opened_answer(place, record.answer), sealer.opened_steps(place, record.steps)
    return replace(record, answer=answer, steps=steps)


def _listed(sealer: Sealer, record: Record) -> Record:
    """One record of many: a list shows the others, too, and has no bodies."""
    place = _of(record)
    try:
        answer = sealer.opened_answer(place, record.answer, is_listed=True)
        return replace(record, answer=answer, steps=sealer.opened_steps(place, record.steps))
    except SecretMissing:
        return record


def _many(sealer: Sealer, _: Place, outcome: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_one_of_many(sealer, each) for each in outcome)


def _one_of_many(sealer: Sealer, each: Any) -> Any:
    if isinstance(each, Record):
        return _listed(sealer, each)
    return _stuck(sealer, each) if isinstance(each, Stuck) else each


def _stuck(sealer: Sealer, stuck: Stuck) -> Stuck:
    """One of many, too: those that can be read wait behind it. It is not run, since its request can't be read."""
    try:
        return replace(stuck, steps=sealer.opened_steps(_of(stuck.hold), stuck.steps))
    except SecretMissing:
        return stuck


def _page(sealer: Sealer, _: Place, page: Page) -> Page:
    return replace(page, records=tuple(_listed(sealer, each) for each in page.records))


def _request(sealer: Sealer, place: Place, request: Request) -> Request:
    return sealer.opened_request(place, request)


_OPENED: dict[type[Any], Callable[[Sealer, Place, Any], Any]] = {
    Found: _found,
    Record: _record,
    Request: _request,
    Page: _page,
    tuple: _many,
}


def place_of(command: Any) -> Place:
    """Return which record a command is about; nothing, for one that is about many."""
    about = getattr(command, "claim", None) or getattr(command, "hold", None) or command
    return getattr(about, "scope", None) or "", getattr(about, "key", None) or ""

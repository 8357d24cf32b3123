"""Messages that a consumer receives: the verdicts on a delivery, and what a receipt decides. Nothing here runs a
handler or reads a store.

A receipt is what the store has of one message for one consumer. Its first two states are left by another try, or by an
operator; *done* is final until it is past its retention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar

from semel.core.message import one_line
from semel.core.outbox import MAX_NAME
from semel.core.value import value
from semel.errors import ConfigurationError, MessageDiffers, MessageUnidentified

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: How often a message is tried. A fault that passes has passed by then, if the broker waits between deliveries.
MAX_ATTEMPTS = 5
#: How long a receipt is kept: longer than brokers redeliver by default (RabbitMQ and Celery within hours, streams
#: within days), and than a person takes to send a dead letter again after a week away.
INBOX_RETENTION = timedelta(days=14)
#: What an operator does once a parked message may run again.
AFTER_REQUEUE = (
    "Its adapter has rejected it, so it does not come by itself: send it again from the broker's dead letters, or have "
    "its producer send it again under the same id. Redis Streams and senders of webhooks deliver it again themselves."
)
#: The first characters of an error, as it is stored: a line or two. The whole of it is in the consumer's own log.
MAX_ERROR = 500


class ReceiptState(StrEnum):
    """What became of a message."""

    #: The last try failed, and the next delivery is another.
    FAILING = "failing"
    #: It failed too often, and waits for a person.
    PARKED = "parked"
    #: It was handled: the receipt and the handler's writes are one commit.
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Ran(Generic[T_co]):
    """The handler ran, and its writes are committed with the receipt."""

    #: What it returned. It is not stored: a redelivery gets a ``Duplicate``, without it.
    result: T_co

    @property
    def ack(self) -> bool:
        """True: it is committed, so the broker may forget the message."""
        return True


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The message was handled before. Nothing was run, and nothing was written."""

    @property
    def ack(self) -> bool:
        """True: its effects are committed, so the broker may forget this delivery, too."""
        return True


@dataclass(frozen=True, slots=True)
class Busy:
    """Another delivery of this message is being handled just now, or was in the way. Nothing is committed."""

    @property
    def ack(self) -> bool:
        """False: the other may fail yet, so the broker has to deliver the message again."""
        return False


@dataclass(frozen=True, slots=True)
class Parked:
    """The message has failed too often, and waits for a person: ``semel inbox list``."""

    #: How many tries have failed.
    attempts: int
    #: What the last one said.
    error: str | None = None

    @property
    def ack(self) -> bool:
        """True: it must not come again, since no delivery would run anything. The adapters reject it instead, so that
        a broker with dead letters keeps it.
        """
        return True


Verdict = Ran[T] | Duplicate | Busy | Parked


@value
class Receipt:
    """What the store has of one message, for one consumer."""

    state: ReceiptState
    #: How many tries have failed.
    attempts: int
    #: Of the payload; None: it was received without one.
    digest: bytes | None = None
    #: What the last failure said.
    error: str | None = None
    #: When it was last written, by the store's clock. Two receipts of one message differ in it.
    mark: int = 0


@value
class Seen:
    """What a look saw: the receipt, if there is one, and whether this transaction has the message's lock."""

    receipt: Receipt | None
    has_lock: bool = True


@value
class Returned:
    """The handler returned."""

    result: Any


@value
class Failed:
    """The handler raised."""

    error: Exception
    #: Whether it is a try that failed. A conflict with another transaction is none, and ``NoEffect`` says the same.
    counts: bool = True


def judge(seen: Seen, digest: bytes | None) -> Duplicate | Busy | Parked | None:
    """Decide about a delivery; None: run the handler. Another payload under the same id is refused first: *wait* would
    be the wrong answer to it.
    """
    receipt = seen.receipt
    if receipt is not None:
        check_digest(receipt, digest)
        if receipt.state is ReceiptState.DONE:
            return Duplicate()  # Whichever delivery has the lock.
        if receipt.state is ReceiptState.PARKED:
            return Parked(receipt.attempts, receipt.error)
    return None if seen.has_lock else Busy()


def check_digest(receipt: Receipt, digest: bytes | None) -> None:
    """Raise ``MessageDiffers`` where both payloads are known, and are not the same."""
    if digest is not None and receipt.digest is not None and receipt.digest != digest:
        raise MessageDiffers.of(stored=receipt.digest.hex(), received=digest.hex())


def digest_of(payload: object) -> bytes | None:
    """Return the digest of a *payload*: bytes, text, or what can be written as JSON; None: there is none."""
    match payload:
        case None:
            return None
        case bytes() | bytearray() | memoryview():
            data = bytes(payload)
        case str():
            data = payload.encode("utf-8", "surrogatepass")
        case _:
            try:
                # Sorted: two deliveries of one message may be parsed by two libraries.
                data = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
            except (TypeError, ValueError, RecursionError):
                raise ConfigurationError(
                    "payload= is the message as it came, bytes or text, or what can be written as JSON, "
                    f"not {type(payload).__name__}. It is only compared, so it may be left out."
                ) from None
    return hashlib.sha256(data).digest()


def digest_of_arguments(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes | None:
    """Return the digest of what a handler is called with, where all of it is data; None: some of it is not.

    One argument alone is a payload, and has the digest of that: a consumer may begin to give its payload, or end to.
    """
    if not args and not kwargs:
        return None
    called: object = args[0] if len(args) == 1 and not kwargs else [args, kwargs]
    if isinstance(called, bytes | bytearray | memoryview | str):
        return digest_of(called)
    try:
        data = json.dumps(called, sort_keys=True, separators=(",", ":"), default=_spelled)
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(data.encode()).digest()


def _spelled(argument: object) -> object:
    if isinstance(argument, bytes | bytearray | memoryview):
        return {"bytes": bytes(argument).hex()}
    raise TypeError


def check_id(message_id: object) -> str:
    """Return *message_id*, if it can be one."""
    if isinstance(message_id, str) and 1 <= len(message_id) <= MAX_NAME and _is_storable(message_id):
        return message_id
    shown = ascii(message_id)
    shown = shown if len(shown) <= MAX_NAME else f"{shown[:MAX_NAME]}..."
    raise MessageUnidentified(
        f"A message's id is a text of 1 to {MAX_NAME} printable characters, the same with every delivery; not {shown}."
    )


def said(error: BaseException) -> str:
    """Return what is stored of an *error*: its type and its words, on one line, bounded."""
    try:
        words = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # noqa: BLE001 - it has none; and a try that is not counted would be repeated for ever
        words = type(error).__name__
    line = one_line(" ".join(words.split()))
    return line if len(line) <= MAX_ERROR else f"{line[:MAX_ERROR]}..."


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return text.isprintable()

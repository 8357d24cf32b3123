"""What the adapters of all brokers share: where a message's id is found, and what a broker is told.

Only COMMIT makes an ack. Everything that is not known to be committed has to be delivered again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from typing import Any
from uuid import UUID

from semel.core.inbox import Parked, Verdict
from semel.core.outbox import MAX_NAME
from semel.errors import ConfigurationError, MessageRefused, MessageUnidentified
from semel.inbox.front import AsyncInbox

_logger = logging.getLogger("semel")

# Where a message's id stands, in the order in which it is asked for. What the producer of the event sets comes first: a
# broker's own id is another where the event was published twice. Header names are in any case.
#
#   webhook-id                              Standard Webhooks
#   id and source, behind a prefix          CloudEvents in headers: known by both together
#   id and source, in the body              CloudEvents in structured mode
#   message_id, message-id, Nats-Msg-Id     headers
#   message_id                              the property of AMQP
#   id, beside type and content-type        Semel's own publisher, on Kafka
#   id, among the fields of an entry        Semel's own publisher, in Redis Streams
#   the place in the log, and the time      Kafka, NATS JetStream, Redis Streams

#: How an attribute of CloudEvents begins over HTTP and NATS, on Kafka, and in AMQP, which has two spellings.
_EVENT_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")
_EVENT_BODY = "application/cloudevents+json"
_ID_HEADERS = ("message_id", "message-id", "nats-msg-id")
#: The fields of an entry that Semel's publisher has written. One of a stranger with an ``id`` may be anything.
_ENTRY = frozenset({b"id", b"type", b"payload", b"key", b"headers"})
#: Of a digest that stands for a source, in hexadecimal digits: as many as a UUID has.
_SOURCE_DIGITS = 32

Handler = Callable[..., Any]
#: Finds the id of a message of the broker's own type.
FindId = Callable[[Any], str]


class Answer(Enum):
    """What a broker is told."""

    #: It may forget the message.
    ACK = auto()
    #: It has to deliver the message again.
    AGAIN = auto()
    #: It must not deliver the message again, and may keep it among its dead letters.
    AWAY = auto()


def found_id(
    headers: Mapping[str, Any] | None, raw: object = None, body: object = None, content_type: str | None = None
) -> str | None:
    """Return the id of a message, by its *headers*, by the broker's own message *raw*, and by its *body*; None: it has
    none.
    """
    named = {str(name).lower(): value for name, value in (headers or {}).items()}
    return (
        _text(named, "webhook-id")
        or _event_id(named, body, content_type)
        or next(filter(None, (_text(named, name) for name in _ID_HEADERS)), None)
        or getattr(raw, "message_id", None)
        or _place(raw, named)
    )


def _text(named: Mapping[str, Any], name: str) -> str | None:
    found = named.get(name)
    if isinstance(found, bytes):
        try:
            found = found.decode()
        except UnicodeDecodeError:
            # With marks in place of what can't be read, two ids could become one, and one message be lost.
            raise MessageUnidentified(f"The header {name} of this message, its id, is not UTF-8.") from None
    return str(found) if found else None


def _event_id(named: Mapping[str, Any], body: object, content_type: str | None) -> str | None:
    """Return what an event of CloudEvents is known by: its id is unique for its source only."""
    for prefix in _EVENT_PREFIXES:
        if found := _text(named, f"{prefix}id"):
            return _of_source(found, _text(named, f"{prefix}source"))
    kind = content_type or _text(named, "content-type") or ""
    if isinstance(body, bytes) and kind.lower().startswith(_EVENT_BODY):
        with suppress(ValueError, RecursionError):  # It is no event, and its handler will say so.
            event = json.loads(body)
            if isinstance(event, dict) and isinstance(event.get("id"), str) and event["id"]:
                return _of_source(event["id"], event.get("source"))
    return None


def _of_source(event_id: str, source: object) -> str:
    if not isinstance(source, str) or not source:
        return event_id
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
    return _bounded(f"{event_id}@{digest[:_SOURCE_DIGITS]}")


def _bounded(text: str) -> str:
    """Return *text*, or what stands for it where an id may not be that long."""
    return text if len(text) <= MAX_NAME else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _place(raw: Any, named: Mapping[str, Any]) -> str | None:
    """Return the id that Semel's own publisher has put beside a message of a log, or else its place there.

    The time is that of the message, the same with each delivery: a place in a log that was made anew, or failed over,
    is not the place of before. An entry's id in Redis is a time already.
    """
    if isinstance(raw, Mapping):
        fields, entries = raw.get("data"), raw.get("message_ids")
        if isinstance(fields, Mapping) and frozenset(fields) == _ENTRY:
            return _text({"id": fields[b"id"]}, "id")
        return _bounded(f"{raw.get('channel')}/{entries[0].decode()}") if entries else None
    parts = [getattr(raw, name, None) for name in ("topic", "partition", "offset", "timestamp")]
    # confluent-kafka has methods, aiokafka attributes; the former's time comes with its kind.
    *place, time = [part() if callable(part) else part for part in parts]
    if None not in place:
        relayed = _text(named, "id") if "type" in named and "content-type" in named else None
        if relayed is not None and _is_uuid(relayed):
            return relayed
        return _bounded(f"{'/'.join(map(str, place))}@{time[1] if isinstance(time, tuple) else time}")
    try:
        found = raw.metadata
        return _bounded(f"{found.stream}/{found.sequence.stream}@{found.timestamp.isoformat()}")
    except Exception:  # noqa: BLE001 - it is no message of a stream
        return None


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False


def no_id(broker: str, instead: str) -> MessageUnidentified:
    """Say that a message has no id, and where one would be found."""
    return MessageUnidentified(
        f"This message of {broker} has no id, so it could not be known again: have its producer set {instead}, the "
        "same with every try; or give id=, a function that finds it in the message."
    )


def answer_for(verdict: Verdict[Any]) -> Answer:
    """Return what a broker is told after *verdict*."""
    if isinstance(verdict, Parked):
        return Answer.AWAY
    return Answer.ACK if verdict.ack else Answer.AGAIN


async def received(inbox: AsyncInbox, find_id: FindId, handler: Handler, message: Any, payload: object) -> Answer:
    """Receive *message*, and return what its broker is told. It raises nothing but a cancellation."""
    try:
        return answer_for(await inbox.receive(find_id(message), handler, message, payload=payload))
    except MessageRefused as refused:
        tell_refused(inbox.consumer, refused)
        return Answer.AWAY
    except Exception as error:  # noqa: BLE001 - whichever it was, nothing is committed
        tell_failed(inbox.consumer, error)
        return Answer.AGAIN


def unusable(consumer: str, why: str) -> ConfigurationError:
    """Log that no message can be received as the application has set it up, and return the error to raise."""
    _logger.critical("Messages for %s can't be received, and none is handled: %s", consumer, why)
    return ConfigurationError(why)


def tell_refused(consumer: str, refused: MessageRefused) -> None:
    """Log that a message can't be received."""
    _logger.error("A message for %s was refused, and not run: %s", consumer, refused)


def tell_failed(consumer: str, error: Exception) -> None:
    """Log why a message has to come again: its broker does not show it."""
    _logger.error("A message for %s could not be handled, and has to come again.", consumer, exc_info=error)

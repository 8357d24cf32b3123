"""What the adapters of all brokers share: where a message's id is found, and what a broker is told. It knows no broker.

Only COMMIT makes an ack. Everything that is not known to be committed has to be delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from semel.core.inbox import Parked, Verdict
from semel.errors import MessageRefused, MessageUnidentified
from semel.inbox.front import AsyncInbox

_logger = logging.getLogger("semel")

#: Headers that have a message's id, in the order in which they are asked. Those that the producer of the event sets
#: come first: a broker's own id is another where the event was published twice.
ID_HEADERS = ("webhook-id", "ce-id", "message_id", "message-id", "nats-msg-id")

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


def header_id(headers: Mapping[str, Any] | None) -> str | None:
    """Return the id that *headers* have; their names in any case."""
    named = {str(name).lower(): value for name, value in (headers or {}).items()}
    for name in ID_HEADERS:
        found = named.get(name)
        if isinstance(found, bytes):
            try:
                found = found.decode()
            except UnicodeDecodeError:
                # With marks in place of what can't be read, two ids could become one, and one message be lost.
                raise MessageUnidentified(f"The header {name} of this message, its id, is not UTF-8.") from None
        if found:
            return str(found)
    return None


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


def tell_refused(consumer: str, refused: MessageRefused) -> None:
    """Log that a message can't be received."""
    _logger.error("A message for %s was refused, and not run: %s", consumer, refused)


def tell_failed(consumer: str, error: Exception) -> None:
    """Log why a message has to come again: its broker does not show it."""
    _logger.error("A message for %s could not be handled, and has to come again.", consumer, exc_info=error)

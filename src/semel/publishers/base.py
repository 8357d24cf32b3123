"""The interface of every publisher, and which one a URL names. No publisher is implemented here.

To send messages elsewhere, write a class with these three methods and hand an object of it to the relay. Messages of
one key never come in the same call, so a publisher need not keep an order: it may send all of a call at once.

It may have two attributes more. ``limit``, a ``timedelta``, is after how long ``publish`` ends by itself: what was
confirmed until then is ``Delivered``, and the rest ``Unreachable``. Without it a call that takes longer than 30 s is
given up, all of its messages are sent again, and fewer at a time. ``batch`` is how many messages it sends side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from semel.core.outbox import Message, Schedule, Verdict
from semel.errors import ConfigurationError

#: Each is imported on first use: its client is an extra.
_PUBLISHERS = {
    "amqp": ("semel.publishers.rabbitmq", "RabbitMQ"),
    "amqps": ("semel.publishers.rabbitmq", "RabbitMQ"),
    "nats": ("semel.publishers.nats", "NATS"),
    "tls": ("semel.publishers.nats", "NATS"),
    "redis": ("semel.publishers.redis", "RedisStreams"),
    "rediss": ("semel.publishers.redis", "RedisStreams"),
    "kafka": ("semel.publishers.kafka", "Kafka"),
    "celery+amqp": ("semel.publishers.celery", "Celery"),
    "celery+redis": ("semel.publishers.celery", "Celery"),
    "http": ("semel.publishers.webhook", "Webhook.at"),
    "https": ("semel.publishers.webhook", "Webhook.at"),
    "discard": ("semel.publishers.discard", "Discard"),
}

_KNOWN = "amqp://, nats://, redis://, kafka://, celery+amqp://, celery+redis://, https://"


@runtime_checkable
class Publisher(Protocol):
    """Sends messages to one destination. It is used by one event loop."""

    #: The pauses between the tries of one message.
    schedule: Schedule

    async def open(self) -> None:
        """Connect, and check what can be checked. Called before the first ``publish``, and again after a failure.

        Raise ``OSError`` where the destination can't be reached, and ``ConfigurationError`` where it never will.
        """

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send *messages* and return a verdict for each, in their order. ``Delivered`` only for what was confirmed.

        An ``OSError`` or ``TimeoutError`` is ``Unreachable`` for all; any other exception is ``Failed``, and the
        messages are then sent one by one, so that one that can't be sent keeps none of the others.
        """

    async def close(self) -> None:
        """Disconnect. ``open`` may come again."""


def publisher(name: str, url: str) -> Publisher:
    """Return the publisher for destination *name* at *url*, which is an operator's: it may have secrets and settings in
    it. Nothing is connected yet.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        raise ConfigurationError(f"The URL of destination {name!r} can't be read.") from None
    if scheme not in _PUBLISHERS:
        what = f"{scheme}://" if scheme else "an address without a scheme"
        raise ConfigurationError(f"Destination {name!r}: no publisher is known for {what}. There are {_KNOWN}.")
    module, kind = _PUBLISHERS[scheme]
    make: Any = attrgetter(kind)(import_module(module))
    made: Publisher = make(name, url)
    return made

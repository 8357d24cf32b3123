"""Receives messages of RabbitMQ once, as a callback for aio-pika. Connections, queues and prefetch are the
application's.

::

    inbox = AsyncInbox("postgresql://…", consumer="billing")
    await queue.consume(once(inbox, handle))        # handle(connection, message)

What RabbitMQ is told, and does:

* ``Ran``, ``Duplicate``: ``basic.ack``, after COMMIT. It forgets the message.
* ``Busy``, an error of the handler or of the store, a COMMIT with an unknown outcome: ``basic.nack`` with requeue,
  after *pause*, since RabbitMQ would deliver it again at once.
* ``Parked``, and what can't be received (no id, another payload under the same id): ``basic.reject`` without requeue.
  It goes to the queue's dead letter exchange; without one it is gone, and ``semel inbox`` has what is known of it.
* A consumer that dies: nothing. The channel is closed, and RabbitMQ delivers what was not acked again.

A quorum queue with a delivery limit drops a message, or dead-letters it, when it was delivered that often: the limit
has to be higher than ``max_attempts``. A consumer can't ask for it, so this is not checked. How long RabbitMQ waits for
an ack (``consumer_timeout``, 30 minutes by default) can't be asked for either; keep ``retention`` above it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

from semel.inbox.brokers import Answer, FindId, Handler, found_id, no_id, received, unusable
from semel.inbox.front import AsyncInbox

try:
    from aio_pika.abc import AbstractIncomingMessage
    from aio_pika.exceptions import AMQPError, ChannelInvalidStateError
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("RabbitMQ needs aio-pika. Run: pip install 'semel[rabbitmq]'") from error

_logger = logging.getLogger("semel")

#: How long a message that has to come again is held back: what passes has passed after a few of these.
PAUSE = timedelta(seconds=1)


def once(
    inbox: AsyncInbox,
    handler: Handler,
    *,
    id: FindId | None = None,  # noqa: A002 - what it is
    pause: timedelta = PAUSE,
) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
    """Return a callback for ``queue.consume``: it calls ``handler(connection, message)`` once for each message.

    *id* finds a message's id, if not where ``brokers.py`` looks for it.
    """
    find_id = id or id_of

    async def callback(message: AbstractIncomingMessage) -> None:
        if message.locked:
            # RabbitMQ has forgotten it already, and what is on its way: the sooner this ends, the less is lost.
            await message.channel.basic_cancel(message.consumer_tag or "")
            raise unusable(inbox.consumer, "This consumer acks before the handler runs. Remove no_ack=True.")
        answer = await received(inbox, find_id, handler, message, message.body)
        try:
            if answer is Answer.ACK:
                await message.ack()
            elif answer is Answer.AWAY:
                await message.reject(requeue=False)
            else:
                await asyncio.sleep(pause.total_seconds())
                await message.nack(requeue=True)
        except (AMQPError, ChannelInvalidStateError, ConnectionError) as trouble:
            # RabbitMQ delivers it again: a duplicate, if it was handled.
            _logger.warning("RabbitMQ could not be told %s of a message: %s", answer.name, trouble)

    return callback


def id_of(message: AbstractIncomingMessage) -> str:
    """Return the id of a message: that of its event, or else its ``message_id``."""
    found = found_id(message.headers, message, message.body, message.content_type)
    if not found:
        raise no_id("RabbitMQ", "the property message_id")
    return found

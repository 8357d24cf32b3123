"""Receives messages of NATS JetStream once, with nats-py. Streams and connections are the application's.

::

    inbox = AsyncInbox("postgresql://…", consumer="billing")
    await subscribe(jetstream, "orders.paid", inbox, handle, durable="billing")     # handle(connection, message)

What NATS is told, and does:

* ``Ran``, ``Duplicate``: ack, after COMMIT. The consumer is not given the message again.
* ``Busy``, an error of the handler or of the store, a COMMIT with an unknown outcome: nak with a delay of *pause*.
* ``Parked``, and what can't be received (no id, another payload under the same id): term. It is delivered no more to
  this consumer, and stays in the stream as long as others do.
* A consumer that dies, or takes longer than ``ack_wait``: nothing. NATS delivers it again, and while the first is still
  being handled that one is ``Busy``.

The duplicate window of a stream (two minutes by default) is about what is *published* twice, and bounds nothing here.
What bounds redelivery is how long the stream keeps messages (``max_age``), which ``check`` compares with the retention.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from semel.inbox.brokers import Answer, FindId, Handler, found_id, no_id, received, unusable
from semel.inbox.front import AsyncInbox

try:
    from nats.aio.msg import Msg
    from nats.errors import Error, NotJSMessageError
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy
    from nats.js.errors import NotFoundError
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("NATS needs nats-py. Run: pip install 'semel[nats]'") from error

_logger = logging.getLogger("semel")

#: After which a message that has to come again is delivered.
PAUSE = timedelta(seconds=1)


async def subscribe(
    jetstream: JetStreamContext,
    subject: str,
    inbox: AsyncInbox,
    handler: Handler,
    *,
    id: FindId | None = None,  # noqa: A002 - what it is
    pause: timedelta = PAUSE,
    **options: Any,
) -> JetStreamContext.PushSubscription:
    """Check the stream of *subject*, and subscribe to it with *options* of nats-py (``durable``, ``queue`` …)."""
    stream = options.get("stream") or await jetstream.find_stream_name_by_subject(subject)
    await check(jetstream, stream, inbox)
    await _check_acks(jetstream, stream, inbox, options)
    callback = once(inbox, handler, id=id, pause=pause)
    return await jetstream.subscribe(subject, cb=callback, manual_ack=True, **options)


async def check(jetstream: JetStreamContext, stream: str, inbox: AsyncInbox) -> None:
    """Raise ``ConfigurationError`` if *stream* keeps messages for longer than the inbox has their receipts."""
    config = (await jetstream.stream_info(stream)).config
    if config.max_age:
        inbox.check_redelivery(timedelta(seconds=config.max_age), f"The stream {stream}")
    else:
        _logger.warning(
            "The stream %s keeps messages for ever, and receipts are kept for %s: a consumer that is made anew after "
            "that handles them again. Set max_age.",
            stream,
            inbox.retention,
        )


async def _check_acks(jetstream: JetStreamContext, stream: str, inbox: AsyncInbox, options: Mapping[str, Any]) -> None:
    """Raise where the consumer that is there, or is to be made, would take a message for handled before it is."""
    config = options.get("config")
    found = config.ack_policy if config else None
    if durable := options.get("durable") or options.get("queue"):
        with suppress(NotFoundError):
            found = (await jetstream.consumer_info(stream, durable)).config.ack_policy
    if options.get("ordered_consumer"):
        found = AckPolicy.NONE
    if found not in {None, AckPolicy.EXPLICIT}:
        raise unusable(
            inbox.consumer,
            f"This consumer of stream {stream} has the ack policy {found}: what fails, or was never handled, would not "
            "come again. Make it with ack_policy=AckPolicy.EXPLICIT, and without ordered_consumer.",
        )


def once(
    inbox: AsyncInbox,
    handler: Handler,
    *,
    id: FindId | None = None,  # noqa: A002 - as above
    pause: timedelta = PAUSE,
) -> Callable[[Msg], Awaitable[None]]:
    """Return a callback for a JetStream subscription: it calls ``handler(connection, message)`` once for each message.

    *id* finds a message's id, if not where ``brokers.py`` looks for it.
    """
    find_id = id or id_of

    async def callback(message: Msg) -> None:
        try:
            message.metadata  # noqa: B018 - it raises
        except NotJSMessageError:
            why = "A message of plain NATS is not delivered again. Subscribe to a stream of JetStream."
            raise unusable(inbox.consumer, why) from None
        answer = await received(inbox, find_id, handler, message, message.data)
        try:
            if answer is Answer.ACK:
                await message.ack()
            elif answer is Answer.AWAY:
                await message.term()
            else:
                await message.nak(delay=pause.total_seconds())
        except Error as trouble:
            # NATS delivers it again: a duplicate, if it was handled.
            _logger.warning("NATS could not be told %s of a message: %s", answer.name, trouble)

    return callback


def id_of(message: Msg) -> str:
    """Return the id of a message: in its headers, or else its stream and the number that it has there."""
    found = found_id(message.headers, message, message.data)
    if not found:
        raise no_id("NATS", "the header Nats-Msg-Id, and a stream keep it")
    return found

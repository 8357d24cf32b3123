"""Receives messages once, as a middleware of FastStream, whichever broker it is on. Brokers and routes are
FastStream's.

::

    inbox = AsyncInbox("postgresql://…", consumer="billing")
    broker = RabbitBroker(url, middlewares=[once(inbox)])

    @broker.subscriber("orders")
    async def handle(order: Order, connection: Annotated[Any, Context("semel_connection")]) -> None:
        …

The whole of what FastStream does for a message, parsing and the other middlewares inside this one among it, runs in the
transaction. What FastStream is told, and tells its broker:

* ``Ran``: nothing but the result. It acks, after COMMIT; and so it is where the handler has raised ``AckMessage``. With
  ``NackMessage``, ``RejectMessage`` and ``SkipMessage`` a handler undoes what it wrote.
* ``Duplicate``: ``AckMessage``. The handler is not called.
* ``Busy``, an error of the handler or of the store, a COMMIT with an unknown outcome: ``NackMessage``, after *pause*.
  So the ``ack_policy`` of a subscriber does not matter; but ``ACK_FIRST``, the default on Kafka, and ``MANUAL`` don't
  listen to it, and are refused: by ``check(broker)``, or by the first message. With librdkafka the message is tried
  again in its place.
* ``Parked``, and what can't be received (no id, another payload under the same id): ``RejectMessage``.

What a handler returns is published by FastStream after COMMIT, and would be lost where the worker dies before: so
subscribers with publishers are refused, and messages that ask for a reply are parked. The outbox is the way.

All subscribers behind one inbox are one consumer: of those that get the same message, one handles it. Those that are to
have it each need an inbox each, on routers of their own.

FastStream makes up an id for a message that has none, another one for each delivery, so it is never taken from
``message.message_id``. A subscriber with ``batch=True`` can't be used: several messages would have one receipt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from semel.core.inbox import Ran
from semel.errors import ConfigurationError, MessageRefused, NoEffect
from semel.inbox.brokers import Answer, FindId, answer_for, found_id, no_id, tell_failed, tell_refused, unusable
from semel.inbox.front import AsyncInbox

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage, StopConsume
    from faststream.message import StreamMessage
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("This needs FastStream. Run: pip install 'semel[faststream]'") from error

_logger = logging.getLogger("semel")

#: How long a message that has to come again is held back.
PAUSE = timedelta(seconds=1)
#: FastStream's packages for brokers on which what is nacked comes again. On MQTT a nack is nothing: what has failed
#: comes with the next connection, or never.
_BROKERS = frozenset({"confluent", "kafka", "nats", "rabbit", "redis"})
#: The name of the connection in FastStream's context.
CONNECTION = "semel_connection"


class InboxMiddleware(BaseMiddleware[Any, Any]):
    """One message on its way through FastStream."""

    def __init__(
        self,
        message: Any,
        /,
        *,
        context: Any,
        inbox: AsyncInbox,
        id: FindId,  # noqa: A002 - what it is
        pause: timedelta,
    ) -> None:
        """Receive it by *inbox*."""
        super().__init__(message, context=context)
        self._inbox = inbox
        self._find_id = id
        self._pause = pause

    async def consume_scope(self, call_next: Any, msg: StreamMessage[Any]) -> Any:
        """Call what comes next, in the transaction of the receipt."""
        subscriber = self.context.get_local("handler_")
        try:
            _check_acks(subscriber, self._inbox)
        except ConfigurationError as error:
            raise StopConsume from error
        while True:
            try:
                return await self._receive(call_next, msg, subscriber)
            except NackMessage:
                await asyncio.sleep(self._pause.total_seconds())
                # librdkafka goes back to a message for this consumer alone: with the next message of another partition
                # it would be committed, and a worker that dies then has lost it.
                if not callable(getattr(msg.raw_message, "partition", None)) or not subscriber.running:
                    raise

    async def _receive(self, call_next: Any, msg: StreamMessage[Any], subscriber: Any) -> Any:
        order = _Order()

        async def inside(connection: Any) -> Any:
            _check_reply(subscriber, msg)
            with self.context.scope(CONNECTION, connection), order.heard():
                return await call_next(msg)

        try:
            _check_publishers(subscriber)
            verdict = await self._inbox.receive(self._find_id(msg), inside, payload=_body(msg))
        except MessageRefused as refused:
            tell_refused(self._inbox.consumer, refused)
            raise RejectMessage from refused
        except Exception as trouble:
            if isinstance(trouble.__cause__, HandlerException):
                raise trouble.__cause__ from None
            tell_failed(self._inbox.consumer, trouble)
            raise NackMessage from trouble
        if isinstance(verdict, Ran):
            return order.obeyed(verdict.result)
        match answer_for(verdict):
            case Answer.ACK:
                raise AckMessage
            case Answer.AWAY:
                raise RejectMessage
            case Answer.AGAIN:
                raise NackMessage


class _Order:
    """What a handler tells FastStream to do, by an exception."""

    _ack: AckMessage | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Hear it. All but an ack is rolled back, and is no failure."""
        try:
            yield
        except AckMessage as ack:
            self._ack = ack
        except HandlerException as order:
            raise NoEffect from order

    def obeyed(self, result: Any) -> Any:
        """Return the *result*, or hand on the ack: what the handler wrote is committed by now."""
        if self._ack is not None:
            raise self._ack
        return result


def once(
    inbox: AsyncInbox,
    *,
    id: FindId | None = None,  # noqa: A002 - as above
    pause: timedelta = PAUSE,
) -> Callable[..., InboxMiddleware]:
    """Return a middleware for a broker or a subscriber. *id* finds the id of a ``StreamMessage``."""
    return partial(InboxMiddleware, inbox=inbox, id=id or id_of, pause=pause)


def check(broker: Any) -> None:
    """Raise ``ConfigurationError`` where a subscriber of *broker* can't be used with an inbox: to be called when all
    are there, before it is started. Else the first message finds it out, which may be lost by then.
    """
    served: dict[AsyncInbox, set[object]] = {}
    for subscriber in broker.subscribers:
        for middleware in subscriber._broker_middlewares:  # noqa: SLF001 - it has no other way
            if isinstance(middleware, partial) and middleware.func is InboxMiddleware:
                inbox = middleware.keywords["inbox"]
                _check_acks(subscriber, inbox)
                _check_publishers(subscriber)
                # One handler of two subscribers is one consumer indeed, as where one of them claims what was left.
                handlers = {call.handler._original_call for call in subscriber.calls}  # noqa: SLF001 - as above
                served[inbox] = served.get(inbox, set()) | handlers
    for inbox, handlers in served.items():
        if len(handlers) > 1:
            _logger.warning(
                "%d handlers are one consumer, %s: a message that two of them get is handled by one. If there are "
                "such messages, give each a router with an inbox of its own: middlewares=[once(inbox)].",
                len(handlers),
                inbox.consumer,
            )


def _check_acks(subscriber: Any, inbox: AsyncInbox) -> None:
    """Raise where what fails does not come again."""
    policy = getattr(subscriber, "ack_policy", None)
    if policy in {AckPolicy.ACK_FIRST, AckPolicy.MANUAL} or not _has_acks(subscriber):
        raise unusable(
            inbox.consumer,
            f"This subscriber acks by {policy}, or its broker has no acks, so that what fails would be lost. Give it "
            "ack_policy=AckPolicy.NACK_ON_ERROR, which is not the default on Kafka; on NATS also stream=, with a "
            "consumer that acks explicitly, and on Redis a stream with a group, without no_ack. MQTT can't be used.",
        )


def _has_acks(subscriber: Any) -> bool:
    if type(subscriber).__module__.split(".")[1] not in _BROKERS:
        return False
    of_nats = getattr(subscriber, "extra_options", None)
    if of_nats is None:
        return True
    is_explicit = subscriber.config.ack_policy in {None, "explicit"} and not of_nats.get("ordered_consumer")
    return "stream" in of_nats and is_explicit


#: FastStream publishes what a handler returns after COMMIT, and a worker that dies between them has lost it.
_INSTEAD = "What is to be sent goes into an outbox, in the handler: Outbox(...).add(connection, ...)."


def _check_publishers(subscriber: Any) -> None:
    """Raise where every message would be published from."""
    if any(call.handler._publishers for call in getattr(subscriber, "calls", ())):  # noqa: SLF001 - as above
        raise ConfigurationError(f"This subscriber has a publisher (@broker.publisher). Remove it. {_INSTEAD}")


def _check_reply(subscriber: Any, message: Any) -> None:
    """Raise where *message* asks for a reply. That is a failed try of its own: others don't wait behind it for ever."""
    if message.reply_to and not subscriber._no_reply:  # noqa: SLF001 - as above
        raise ConfigurationError(f"This message asks for a reply. Give its subscriber no_reply=True. {_INSTEAD}")


def id_of(message: StreamMessage[Any]) -> str:
    """Return the id of a message: in its headers, in the broker's own field, or its place in a log."""
    raw = message.raw_message
    if getattr(message, "batch_headers", None) or isinstance(raw, list | tuple):
        raise ConfigurationError(
            "This subscriber gets messages in a batch, and an inbox receives them one by one: their ids would be that "
            "of the first. Remove batch=True; or give id=, a function that makes one id for the whole batch."
        )
    found = found_id(message.headers, raw, message.body, message.content_type)
    if not found:
        raise no_id("FastStream", "message_id, or the header ce-id")
    return str(found)


def _body(message: StreamMessage[Any]) -> bytes | None:
    return message.body if isinstance(message.body, bytes) else None

"""Publishes to RabbitMQ (``amqp://``, ``amqps://``), with publisher confirms. It declares no exchange and no queue.

A message is delivered when RabbitMQ has confirmed it: a persistent message in a durable queue is then on disk, on a
majority of the nodes if it is a quorum queue. One that no queue takes is returned, and rejected. Without ``exchange=``
the message goes to the queue with the destination's name; with it, its type is the routing key.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers.address import TIMEOUT_SECONDS, Table, address, dropped, filled, late, template

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection
    from aio_pika.exceptions import (
        AMQPChannelError,
        AMQPError,
        ChannelInvalidStateError,
        ChannelNotFoundEntity,
        ChannelPreconditionFailed,
        DeliveryError,
        ProbableAuthenticationError,
        PublishError,
    )
    from aiormq.exceptions import ChannelAccessRefused, ConnectionNotAllowed
    from pamqp.commands import Basic
    from pamqp.common import FieldValue
    from pamqp.exceptions import PAMQPException
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("RabbitMQ needs aio-pika. Run: pip install 'semel[rabbitmq]'") from error

#: Of the client, handed on to it.
_CLIENT = ("cafile", "capath", "certfile", "heartbeat", "keyfile", "no_verify_ssl")
_SETTINGS = frozenset({"exchange", "routing_key", "timeout", *_CLIENT})

#: In bytes. Larger messages wait for each other at the socket, so that they are not all copied at once.
_LARGE = 16 * 1024

#: To disk, where the queue is durable.
_PERSISTENT = 2

#: How long a connection may take to say goodbye. One that is blocked never does.
_CLOSE_SECONDS = 2.0

#: What became of a message when its channel or connection was closed: its wait is cancelled, or raises one of these.
_CLOSED = (AMQPError, OSError, RuntimeError, asyncio.CancelledError)

#: The client cuts off what is longer, silently.
_MAX_HEADER_NAME = 128

#: What can't be written as AMQP: names of more than 255 bytes, a time before 1970.
_UNWRITABLE = (ValueError, TypeError, OverflowError, struct.error, PAMQPException)


class _Blocked(TimeoutError):
    """RabbitMQ reads nothing from those who publish: its memory or its disk is full."""


_MEANINGS: Table = (
    (ChannelPreconditionFailed, Rejected, "RabbitMQ will not take this message"),
    (ChannelAccessRefused, Unreachable, "RabbitMQ refuses the user: give it the right to write there"),
    (_Blocked, Unreachable, "RabbitMQ at {place} is blocked by an alarm: free its memory or disk"),
    (TimeoutError, late, "RabbitMQ at {place} did not confirm"),
    ((AMQPChannelError, ChannelInvalidStateError), dropped, "RabbitMQ at {place} has closed the channel"),
    (_CLOSED, dropped, "The connection to RabbitMQ at {place} was lost"),
    (_UNWRITABLE, Rejected, "The message can't be written as AMQP: shorten its type, key or headers"),
)


class RabbitMQ:
    """Publishes to an exchange, or to a queue."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        exchange: str = "",
        routing_key: str = "",
        timeout: float = TIMEOUT_SECONDS,
        schedule: Schedule = BROKER_SCHEDULE,
    ) -> None:
        """Publish what is sent to *name* at *url*; what the URL says has precedence."""
        self.schedule = schedule
        self._address = address(name, url, _SETTINGS)
        self._exchange_name = self._address.text("exchange", exchange)
        key = self._address.text("routing_key", routing_key) or ("{type}" if self._exchange_name else "")
        #: Empty: the destination's name.
        self._routing_key = template(name, key)
        self._timeout, self.limit = self._address.seconds(timeout)
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None

    def _url(self) -> str:
        where = self._address
        user = f"{quote(where.user, safe='')}:{quote(where.password or '', safe='')}@" if where.user else ""
        own = urlencode([each for each in where.settings if each[0] in _CLIENT])
        return f"{where.scheme}://{user}{where.place}/{quote(where.path or '/', safe='')}{'?' if own else ''}{own}"

    async def open(self) -> None:
        """Connect, and see whether the exchange is there."""
        await self.close()
        where = self._address
        try:
            async with asyncio.timeout(self._timeout):
                # Not the robust one: it reconnects behind the relay's back, which has its own pauses.
                self._connection = await aio_pika.connect(
                    self._url(), client_properties={"connection_name": f"semel relay: {where.name}"}
                )
                self._channel = await self._open_channel(self._connection)
        except ChannelNotFoundEntity as error:
            await self.close()
            raise ConfigurationError(self._no_exchange()) from error
        except (ProbableAuthenticationError, ConnectionNotAllowed, ChannelAccessRefused) as error:
            await self.close()
            user = where.user or "guest"
            raise PermissionError(
                where.reason(
                    f"RabbitMQ at {where.place} refuses user {user!r}: check password, vhost and rights", error
                )
            ) from None
        except TimeoutError:
            await self.close()
            raise ConnectionError(f"RabbitMQ at {where.place} did not answer within {self._timeout:g} s.") from None
        except (AMQPError, OSError, PAMQPException) as error:
            await self.close()
            raise ConnectionError(where.reason(f"RabbitMQ at {where.place} can't be reached", error)) from None

    async def _open_channel(self, connection: AbstractConnection) -> AbstractChannel:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            await channel.get_exchange(self._exchange_name, ensure=True)
        return channel

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send all at once, and wait for what RabbitMQ says of each."""
        deadline = time.monotonic() + self._timeout
        outcomes = await self._send(messages)
        if len(messages) > 1 and any(isinstance(outcome, ChannelPreconditionFailed) for outcome in outcomes):
            # RabbitMQ says that a message is wrong by closing the channel on all that it had not yet confirmed, and
            # then the connection, since more came for that channel. Alone, each is told from the others.
            with suppress(OSError):
                await self.open()
            for number, outcome in enumerate(outcomes):
                if time.monotonic() > deadline:
                    break  # The rest is sent with the next call.
                if isinstance(outcome, _CLOSED) and not isinstance(outcome, DeliveryError):
                    outcomes[number] = (await self._send([messages[number]]))[0]
        return [Delivered() if outcome is None else self._verdict(outcome) for outcome in outcomes]

    async def _send(self, messages: Sequence[Message]) -> list[BaseException | None]:
        """Return what became of each: None if it is confirmed."""
        connection, channel = self._connection, self._channel
        if connection is None or connection.is_closed or channel is None:
            return [ConnectionError("closed")] * len(messages)
        try:
            async with asyncio.timeout(self._timeout):
                if channel.is_closed:
                    channel = self._channel = await self._open_channel(connection)
                underlay = await channel.get_underlay_channel()
        except (AMQPError, OSError, RuntimeError) as error:
            return [error] * len(messages)
        tasks = [asyncio.ensure_future(self._send_one(underlay, each)) for each in messages]
        try:
            _, silent = await asyncio.wait(tasks, timeout=self._timeout)
        finally:
            for task in tasks:
                task.cancel()  # Those that are done don't mind.
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if silent:
            is_blocked = await self._is_blocked()
            await self.close()
            waited = (_Blocked if is_blocked else TimeoutError)(f"waited {self._timeout:g} s")
            return [waited if task in silent else said for task, said in zip(tasks, outcomes, strict=True)]
        return outcomes

    async def _send_one(self, channel: Any, message: Message) -> None:
        # Below aio-pika's exchange, which waits for the socket after each message: for small ones that costs
        # more than it saves.
        await channel.basic_publish(
            message.payload,
            exchange=self._exchange_name,
            routing_key=filled(self._routing_key, message) if self._routing_key else self._address.name,
            properties=_properties(message),
            mandatory=True,
            wait=len(message.payload) > _LARGE,
        )

    def _verdict(self, error: BaseException) -> Verdict:
        match error:
            case PublishError():
                return Rejected(self._address.reason(self._unroutable(error)))
            case ChannelNotFoundEntity():
                return Unreachable(self._no_exchange())
            case DeliveryError():  # What it says are numbers.
                return Failed("RabbitMQ refused the message: its queue is full, or without a leader. Is it consumed?")
            case _:
                return self._address.verdict(_MEANINGS, error)

    def _unroutable(self, error: PublishError) -> str:
        key = getattr(error.frame, "routing_key", "")
        if self._exchange_name:
            return (
                f"Exchange {self._exchange_name!r} has no queue bound for routing key {key!r}. Bind one, then requeue."
            )
        return f"There is no queue {key!r}. Declare it, then requeue; or set exchange= in the URL of the destination."

    def _no_exchange(self) -> str:
        return (
            f"RabbitMQ at {self._address.place} has no exchange {self._exchange_name!r} in vhost "
            f"{self._address.path or '/'!r}. Declare it, or leave exchange= out to send to the queue "
            f"{self._address.name!r}."
        )

    async def _is_blocked(self) -> bool:
        connection = self._connection
        if connection is None or connection.is_closed or connection.transport is None:
            return False
        try:
            async with asyncio.timeout(0):
                await connection.transport.ready()
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        """Disconnect."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with suppress(AMQPError, OSError, RuntimeError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await connection.close()


def _properties(message: Message) -> Basic.Properties:
    headers: dict[str, FieldValue] = dict(message.headers)
    if message.traceparent is not None:
        headers["traceparent"] = message.traceparent
    if message.key is not None:
        headers["semel-key"] = message.key
    if too_long := [each for each in headers if len(each.encode()) > _MAX_HEADER_NAME]:
        raise ValueError(f"the name of header {too_long[0][:40]}… has more than {_MAX_HEADER_NAME} bytes")
    return Basic.Properties(
        message_id=message.id,
        message_type=message.type,
        content_type=message.content_type,
        delivery_mode=_PERSISTENT,
        headers=headers,
        timestamp=datetime.fromtimestamp(int(message.created_at), UTC),
    )

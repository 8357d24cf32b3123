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
  So the ``ack_policy`` of a subscriber does not matter; but ``ACK_FIRST`` and ``MANUAL`` don't listen to it, and can't
  be used.
* ``Parked``, and what can't be received (no id, another payload under the same id): ``RejectMessage``.

FastStream makes up an id for a message that has none, another one for each delivery. So the id is looked for in the
headers and in the broker's own message, and never taken from ``message.message_id``. A subscriber with ``batch=True``
can't be used: several messages would have one receipt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from semel.core.inbox import Ran
from semel.errors import ConfigurationError, MessageRefused, NoEffect
from semel.inbox.brokers import Answer, FindId, answer_for, found_id, no_id, tell_failed, tell_refused
from semel.inbox.front import AsyncInbox

try:
    from faststream import BaseMiddleware
    from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage
    from faststream.message import StreamMessage
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("This needs FastStream. Run: pip install 'semel[faststream]'") from error

#: How long a message that has to come again is held back.
PAUSE = timedelta(seconds=1)
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
        order = _Order()

        async def inside(connection: Any) -> Any:
            with self.context.scope(CONNECTION, connection), order.heard():
                return await call_next(msg)

        try:
            verdict = await self._inbox.receive(self._find_id(msg), inside, payload=_body(msg))
        except MessageRefused as refused:
            tell_refused(self._inbox.consumer, refused)
            raise RejectMessage from refused
        except Exception as trouble:
            if isinstance(trouble.__cause__, HandlerException):
                raise trouble.__cause__ from None
            tell_failed(self._inbox.consumer, trouble)
            await asyncio.sleep(self._pause.total_seconds())
            raise NackMessage from trouble
        if isinstance(verdict, Ran):
            return order.obeyed(verdict.result)
        match answer_for(verdict):
            case Answer.ACK:
                raise AckMessage
            case Answer.AWAY:
                raise RejectMessage
            case Answer.AGAIN:
                await asyncio.sleep(self._pause.total_seconds())
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

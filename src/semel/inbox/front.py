"""``Inbox`` for threads and ``AsyncInbox`` for an event loop: what an application makes once, for each consumer. How a
broker's message becomes a call of ``receive`` is in the adapters beside this file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import cached_property, wraps
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, overload

from semel import stores
from semel.calls import Call, check
from semel.core.commands import Open, Undo
from semel.core.inbox import INBOX_RETENTION, MAX_ATTEMPTS, Seen, Verdict, check_id, digest_of, digest_of_arguments
from semel.core.outbox import check_name
from semel.errors import ConfigurationError
from semel.flows.receive import Delivery
from semel.flows.receive import receive as receiving
from semel.guard.measuring import measured_delivery
from semel.guard.running import arun, run
from semel.inbox.ports import AsyncPorts, ThreadPorts, caught, is_async
from semel.stores import AsyncStore, Store
from semel.stores.dialect import durable_of, keeps_messages, messages_of
from semel.stores.inbox import InboxStatements
from semel.stores.statement import Joined

T = TypeVar("T")
S = TypeVar("S", Store, AsyncStore)

#: That what the handler is called with is what is compared.
AS_CALLED: Final = object()
#: Finds the id, or the payload, of what a consumer is given.
Finder = Callable[..., Any]


class _Shared(Generic[S]):
    """What both colours have."""

    store: S

    def __init__(self, opened: S, consumer: str, max_attempts: int, retention: timedelta, *, is_given: bool) -> None:
        if not keeps_messages(opened):
            messages_of(opened, "inbox")  # It says why not.
        self.store = durable_of(opened)
        self._is_given = is_given
        #: Messages are known by (consumer, id): two consumers of one message both handle it.
        self.consumer = check_name("consumer", consumer)
        number: object = max_attempts  # what an application gave
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigurationError(f"max_attempts is how often a message is tried, 1 or more, not {number!r}.")
        self.max_attempts = max_attempts
        kept: object = retention
        if not isinstance(kept, timedelta) or kept <= timedelta(0):
            raise ConfigurationError(f"retention is a timedelta of more than nothing, not {kept!r}.")
        #: How long a redelivery is known. The services delete receipts after ``inbox_retention``, the same by default.
        self.retention = retention

    def check_redelivery(self, longest: timedelta, broker: str) -> None:
        """Raise where *broker* may deliver a message again after its receipt is gone: that would run it twice."""
        if longest >= self.retention:
            raise ConfigurationError(
                f"{broker} may deliver a message again after {longest}, and receipts are kept for {self.retention}: "
                f"such a message would be handled twice. Give Inbox(…, retention=…) and the services' inbox_retention "
                f"more than that."
            )

    @cached_property
    def _statements(self) -> InboxStatements:
        # On first use: Django says then which database it is.
        return InboxStatements(messages_of(self.store, "inbox"))

    @property
    def _probe(self) -> Joined[Seen]:
        # A look at the receipt of no message finds out all that could be in the way: not what a guard needs beside it.
        return self._statements.look(self.consumer, "")

    def _delivery(self, message_id: object, payload: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Delivery:
        digest = digest_of_arguments(args, kwargs) if payload is AS_CALLED else digest_of(payload)
        return Delivery(self.consumer, check_id(message_id), digest)

    def _call(self, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        wanted = "as handler(connection, *args, **kwargs)"
        check("the handler of %s", self.consumer, handler, (None, *args), kwargs, wanted=wanted)
        return Call(self.consumer, caught(handler), args, kwargs)


class Inbox(_Shared[Store]):
    """Receives messages, in threads: ``Inbox("postgresql://…", consumer="billing")``. Any number of threads may share
    it.
    """

    def __init__(
        self,
        store: Any,
        *,
        consumer: str,
        max_attempts: int = MAX_ATTEMPTS,
        retention: timedelta = INBOX_RETENTION,
    ) -> None:
        """Keep receipts in *store*: a URL, a ``Store``, or what the application has (an engine, a sessionmaker, a
        pool). A message that fails *max_attempts* times is parked.
        """
        is_given = isinstance(store, Store)
        if isinstance(store, AsyncStore):
            raise ConfigurationError(f"{type(store).__name__} belongs to an event loop. Use AsyncInbox.")
        super().__init__(
            store if is_given else stores.store(store), consumer, max_attempts, retention, is_given=is_given
        )

    def receive(
        self, message_id: str, handler: Callable[..., T], *args: Any, payload: object = AS_CALLED, **kwargs: Any
    ) -> Verdict[T]:
        """Call ``handler(connection, *args, **kwargs)`` in the transaction in which the receipt commits, unless the
        message was handled before.

        What the handler is called with is compared with what came under the same id before, if it is data that JSON can
        hold, or bytes: ``MessageDiffers`` if it is another. *payload* is compared in its place; None: nothing is. An
        error of the handler is raised, after its try was counted; the last one returns ``Parked``.
        """
        if is_async(handler):
            raise ConfigurationError(f"{_name(handler)} is `async def`, and can't be awaited here. Use AsyncInbox.")
        delivery = self._delivery(message_id, payload, args, kwargs)
        call = self._call(handler, args, kwargs)
        ports = ThreadPorts(self.store, call, self._statements, delivery, self.max_attempts)
        return run(measured_delivery(receiving, self.consumer), ports, delivery)

    def handler(
        self,
        *,
        id: Finder,  # noqa: A002 - what it is
        payload: Finder | None = None,
    ) -> Callable[[Callable[..., T]], Callable[..., Verdict[T]]]:
        """Make a function that receives: ``@inbox.handler(id=lambda message: message["id"])``.

        ``handler(connection, message)`` becomes ``received(message)``, which returns the verdict. *id* and *payload*
        are called with what the function is called with.
        """

        def decorate(function: Callable[..., T]) -> Callable[..., Verdict[T]]:
            @wraps(function)
            def received(*args: Any, **kwargs: Any) -> Verdict[T]:
                content = payload(*args, **kwargs) if payload else AS_CALLED
                return self.receive(id(*args, **kwargs), function, *args, payload=content, **kwargs)

            del received.__wrapped__  # Its signature has a connection more.
            return received

        return decorate

    def check(self) -> None:
        """Raise ``StoreNotReady`` or ``StoreReadOnly`` where no message could be received. Optional."""
        transaction = self.store.transaction()
        transaction.perform(Open())
        try:
            transaction.run(self._probe)
        finally:
            transaction.perform(Undo())

    def close(self) -> None:
        """Close the connections, unless the store was given. Using the inbox again opens them again."""
        if not self._is_given:
            self.store.close()

    def __enter__(self) -> Self:
        """Check it."""
        try:
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class AsyncInbox(_Shared[AsyncStore]):
    """Receives messages, on an event loop. A handler is ``async def``; or a plain function, which runs in a thread, if
    its connection need not be awaited.
    """

    def __init__(
        self,
        store: Any,
        *,
        consumer: str,
        max_attempts: int = MAX_ATTEMPTS,
        retention: timedelta = INBOX_RETENTION,
    ) -> None:
        """Keep receipts in *store*, as ``Inbox``: an ``AsyncStore``, an async engine, sessionmaker or pool."""
        is_given = isinstance(store, AsyncStore)
        if isinstance(store, Store):
            raise ConfigurationError(
                f"{type(store).__name__} would block the event loop. Use Inbox, or an async store."
            )
        opened = store if is_given else stores.async_store(store)
        super().__init__(opened, consumer, max_attempts, retention, is_given=is_given)

    @overload
    async def receive(
        self, message_id: str, handler: Callable[..., Awaitable[T]], *args: Any, payload: object = ..., **kwargs: Any
    ) -> Verdict[T]: ...
    @overload
    async def receive(
        self, message_id: str, handler: Callable[..., T], *args: Any, payload: object = ..., **kwargs: Any
    ) -> Verdict[T]: ...
    async def receive(
        self, message_id: str, handler: Callable[..., Any], *args: Any, payload: object = AS_CALLED, **kwargs: Any
    ) -> Verdict[Any]:
        """As ``Inbox.receive``. Cancelled in the middle, it rolls back: the message has to be delivered again."""
        delivery = self._delivery(message_id, payload, args, kwargs)
        call = self._call(handler, args, kwargs)
        ports = AsyncPorts(self.store, call, self._statements, delivery, self.max_attempts)
        return await arun(measured_delivery(receiving, self.consumer), ports, delivery)

    def handler(
        self,
        *,
        id: Finder,  # noqa: A002 - as above
        payload: Finder | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Verdict[Any]]]]:
        """As ``Inbox.handler``: what it makes is to be awaited."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Verdict[Any]]]:
            @wraps(function)
            async def received(*args: Any, **kwargs: Any) -> Verdict[Any]:
                content = payload(*args, **kwargs) if payload else AS_CALLED
                return await self.receive(id(*args, **kwargs), function, *args, payload=content, **kwargs)

            del received.__wrapped__  # As above.
            return received

        return decorate

    async def check(self) -> None:
        """As ``Inbox.check``."""
        transaction = self.store.transaction()
        await transaction.perform(Open())
        try:
            await transaction.run(self._probe)
        finally:
            await transaction.perform(Undo())

    async def close(self) -> None:
        """Close the connections, unless the store was given. Using the inbox again opens them again."""
        if not self._is_given:
            await self.store.close()

    async def __aenter__(self) -> Self:
        """Check it."""
        try:
            await self.check()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__

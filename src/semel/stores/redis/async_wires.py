"""Connections for an event loop. They carry parcels, and know nothing of what is in them.

A protocol of our own, not streams: what a batch waits for is one future, whatever the number of replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from hiredis import ProtocolError, Reader

from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.redis.address import Address, Node
from semel.stores.redis.courier import Carried, Talk
from semel.stores.redis.greeting import check, greeting
from semel.stores.redis.wire import Parcel, Reply, Trouble
from semel.stores.redis.wires import HUNG_UP

T = TypeVar("T")


class AsyncWires:
    """One connection to each server that is needed, opened when it is, and again when it is lost. Used by one task at a
    time.
    """

    def __init__(self, address: Address) -> None:
        """Connect to nothing yet."""
        self._address = address
        self._links: dict[Node, AsyncLink] = {}
        start_afresh_in_children(self)

    async def run(self, talk: Talk[T]) -> T:
        """Carry what *talk* yields, and return what it returns."""
        try:
            parcels = next(talk)
            while True:
                if len(parcels) == 1:
                    parcels = talk.send([await self._carry(parcels[0])])
                else:
                    parcels = talk.send(await asyncio.gather(*map(self._carry, parcels)))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # StopIteration is not generic

    def drop(self) -> None:
        """Disconnect at once."""
        links, self._links = self._links, {}
        for link in links.values():
            link.drop()

    def start_afresh(self) -> None:
        """Have no connection: they are the parent's."""
        leave_alone(self._links)
        self._links = {}

    async def _carry(self, parcel: Parcel) -> Carried:
        node = parcel.node
        link = self._links.get(node)
        if link is None or link.is_lost:
            try:
                link = self._links[node] = await AsyncLink.open(self._address, node)
            except Exception as error:  # noqa: BLE001 - it is the talk's to judge
                self._links.pop(node, None)
                return Trouble(error, was_sent=False)
        try:
            replies = await link.exchange(parcel.data, parcel.count, self._address.command_seconds)
        except (OSError, ProtocolError) as error:
            self._links.pop(node, None)
            return Trouble(error, was_sent=True)
        if node.is_sentinel:
            # It is asked again only when the master is lost, which may be in a year.
            self._links.pop(node).drop()
        return replies


class AsyncLink(asyncio.Protocol):
    """One connection, greeted and checked."""

    def __init__(self) -> None:
        """Have no connection yet."""
        self._reader = Reader()
        self._transport: asyncio.Transport | None = None
        self._replies: list[Reply] = []
        self._count = 0
        self._answer: asyncio.Future[list[Reply]] | None = None
        #: Who is told what comes unasked.
        self._heard: Callable[[list[Reply]], None] | None = None

    @classmethod
    async def open(cls, address: Address, node: Node) -> AsyncLink:
        """Connect. Raises ``OSError``, or a ``StoreError`` where the server is not one to use."""
        context = address.tls.context() if address.tls else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(address.connect_seconds):
            _, link = await loop.create_connection(cls, node.host, node.port, ssl=context)
        try:
            words, count = greeting(address, node)
            check(await link.exchange(words, count, address.connect_seconds) if count else [], address, node)
        except BaseException:
            link.drop()
            raise
        return link

    @property
    def is_lost(self) -> bool:
        """Whether the server has hung up, as when it was restarted."""
        return self._transport is None

    async def exchange(self, data: bytes, count: int, seconds: float) -> list[Reply]:
        """Send *data*, and wait so long for so many replies."""
        if self._transport is None:
            raise ConnectionResetError(HUNG_UP)
        loop = asyncio.get_running_loop()
        self._count = count
        answer: asyncio.Future[list[Reply]] = loop.create_future()
        self._answer = answer
        self._transport.write(data)
        end = loop.call_later(seconds, self.give_up)
        try:
            return await answer
        except BaseException:
            # Lost, too slow, or cancelled: what comes on this connection next would be somebody else's answer.
            self.drop()
            raise
        finally:
            end.cancel()

    async def follow(self, data: bytes, heard: Callable[[list[Reply]], None]) -> None:
        """Send *data*, and pass on all that comes from now on, until the connection is lost, which raises."""
        if self._transport is None:
            raise ConnectionResetError(HUNG_UP)
        self._heard = heard
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await answer
        finally:
            self.drop()

    def send(self, data: bytes) -> None:
        """Send *data*, and wait for nothing."""
        if self._transport is not None:
            self._transport.write(data)

    def give_up(self) -> None:
        """Have whoever waits on this connection wait no longer: it is silent."""
        self._fail(TimeoutError("It did not answer in time."))

    def drop(self) -> None:
        """Disconnect at once."""
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(RuntimeError):  # the loop that it was opened on may be closed
                transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        self._transport = None
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError(HUNG_UP))

    def data_received(self, data: bytes) -> None:
        """Read replies, and give them out when all are there."""
        gets, replies = self._reader.gets, self._replies
        self._reader.feed(data)
        try:
            while (reply := gets()) is not False:
                replies.append(reply)
        except ProtocolError as error:
            self._fail(error)
            return
        if self._heard is not None:
            self._replies = []
            self._heard(replies)
        elif len(replies) >= self._count:
            self._replies = []
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(replies)

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

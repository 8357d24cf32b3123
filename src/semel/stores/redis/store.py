"""The Redis store, sync and async. The commands are in ``keys.py`` and ``upkeep.py``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from semel.core.commands import Claim, Command, Complete, Renew
from semel.core.record import Hold
from semel.stores.base import AsyncStore, Store
from semel.stores.batching import AsyncBatcher, Batcher
from semel.stores.forks import start_afresh_in_children
from semel.stores.redis.address import Address
from semel.stores.redis.cluster import Client
from semel.stores.redis.connection import AsyncConnections, Connections
from semel.stores.redis.keys import OTHERS, Keys
from semel.stores.redis.listening import AsyncListener, Listener
from semel.stores.redis.upkeep import UPKEEP, Upkeep
from semel.stores.step import Step
from semel.stores.transaction import at_once

T = TypeVar("T")
L = TypeVar("L")
#: Carries out a batch of commands.
Execute = Callable[[Client, list[Any]], Coroutine[Any, Any, list[Any]]]


def _batchers(keys: Keys, upkeep: Upkeep, batcher: Callable[..., L]) -> dict[type[Command[Any]], L]:
    """Make the batchers, each with its own connection: claims, answers, leases, and the rest. In a server that evicts
    by now nothing begins any more, and what has begun may end.
    """
    return {
        Claim: batcher(keys.claim),
        Complete: batcher(keys.complete, looks=False),
        Renew: batcher(keys.renew, looks=False),
        **dict.fromkeys(OTHERS, batcher(keys.each)),
        # These are slow, and no request waits for them.
        **dict.fromkeys(UPKEEP, batcher(upkeep.each)),
    }


class RedisStore(Store):
    """Records in Redis, for threads."""

    def __init__(self, url: str) -> None:
        """Use the server that *url* names. Connects on first use."""
        self.address = Address.of(url)
        self.notes_replays = self.address.audit == "replays"
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Command[T]) -> T:
        """Carry out one store command."""
        return cast("T", self._batchers[type(command)].submit(command))

    def renewals(self) -> Callable[[Renew], frozenset[Hold]]:
        """Return what renews leases in this thread."""
        return _Renewals(self.address, self._keys).perform

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Subscribe to hints, once for all callbacks."""
        self._listener.add(on_end)

    def open(self) -> None:
        """Connect, and check whether the server, or every server of a Cluster, can serve."""
        self._apart(lambda client: client.check())

    def migrate(self) -> list[str]:
        """There is no schema."""
        return []

    def close(self) -> None:
        """Disconnect."""
        self.ended.close()
        self._listener.close()
        calls = self._keys.due.rest()
        if calls:
            self._apart(lambda client: client.execute(calls))
        for connections in self._connections:
            connections.close()

    def start_afresh(self) -> None:
        """Start with no connection, and no operation under way."""
        self._keys = Keys(self.address, lambda: self.actor)
        self._listener = Listener(self.address, self._keys.channel)
        self._connections: list[Connections] = []
        self._batchers = _batchers(self._keys, Upkeep(self._keys), self._batcher)

    def _batcher(self, execute: Execute, *, looks: bool = True) -> Batcher[Any]:
        connections = Connections(self.address, looks=looks)
        self._connections.append(connections)
        client = Client(self.address, connections)
        return Batcher(lambda batch: at_once(execute(client, batch)))

    def _apart(self, ask: Callable[[Client], Coroutine[Any, Any, Any]]) -> None:
        """Use separate connections: those of the batchers may be in use."""
        connections = Connections(self.address)
        try:
            at_once(ask(Client(self.address, connections)))
        finally:
            connections.close()


class AsyncRedisStore(AsyncStore):
    """Records in Redis, for an event loop."""

    def __init__(self, url: str) -> None:
        """Use the server that *url* names. Connects on first use."""
        self.address = Address.of(url)
        self.notes_replays = self.address.audit == "replays"
        self._keys = Keys(self.address, lambda: self.actor)
        self._upkeep = Upkeep(self._keys)
        self._renewals = _Renewals(self.address, self._keys)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: list[AsyncConnections] = []
        self._listener = AsyncListener(self.address, self._keys.channel)
        self._bind(None)

    def perform(self, command: Command[T]) -> Step[T]:
        """Start one store command."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        return self._batchers[type(command)].submit(command)

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases, from any thread, over a connection for threads."""
        return self._renewals.perform(command)

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Subscribe to hints, once for all callbacks."""
        self._listener.add(on_end)

    async def open(self) -> None:
        """Connect, and check whether the server, or every server of a Cluster, can serve."""
        await self._apart(lambda client: client.check())

    async def close(self) -> None:
        """Finish what is under way and disconnect."""
        await self.ended.close()
        await self._listener.close()
        if self._renewals.is_used:
            await asyncio.to_thread(self._renewals.close)
        if asyncio.get_running_loop() is not self._loop:
            return
        for batcher in set(self._batchers.values()):
            await batcher.idle()
        calls = self._keys.due.rest()
        if calls:
            await self._apart(lambda client: client.execute(calls))
        for connections in self._connections:
            connections.drop()

    def _bind(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start again on *loop*: a connection belongs to the loop that made it."""
        self._loop = loop
        for connections in self._connections:
            connections.drop()
        self._connections = []
        self._batchers = _batchers(self._keys, self._upkeep, self._batcher)

    def _batcher(self, execute: Execute, *, looks: bool = True) -> AsyncBatcher[Any]:
        connections = AsyncConnections(self.address, looks=looks)
        self._connections.append(connections)
        return AsyncBatcher(partial(execute, Client(self.address, connections)))

    async def _apart(self, ask: Callable[[Client], Coroutine[Any, Any, Any]]) -> None:
        """Use separate connections: those of the batchers may be in use."""
        connections = AsyncConnections(self.address)
        try:
            await ask(Client(self.address, connections))
        finally:
            connections.drop()


class _Renewals:
    """The connections for threads over which the leases of an event loop are renewed."""

    _mutex: threading.Lock
    #: Whether there may be a connection to close.
    is_used: bool

    def __init__(self, address: Address, keys: Keys) -> None:
        self._address = address
        self._keys = keys
        self.start_afresh()
        start_afresh_in_children(self)

    def perform(self, command: Renew) -> frozenset[Hold]:
        with self._mutex:
            self.is_used = True
            [outcome] = at_once(self._keys.renew(Client(self._address, self._connections), [command]))
        if isinstance(outcome, Exception):
            raise outcome
        return cast("frozenset[Hold]", outcome)

    def close(self) -> None:
        """Disconnect, after a renewal under way has ended. Another one connects again."""
        with self._mutex:
            self.is_used = False
            self._connections.close()

    def start_afresh(self) -> None:
        """Start without a connection: the old one is the parent's."""
        self._mutex = threading.Lock()
        self.is_used = False
        self._connections = Connections(self._address, looks=False)

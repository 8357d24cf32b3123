"""Hints of operations that end, in any process: one subscription for each process, by redis-py. They are hints only.

Some are lost: while there is no connection, and in a fail-over. So a waiting request also asks the store at intervals.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.client import PubSub
from redis.exceptions import RedisError

from semel.errors import StoreError
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.redis.address import Address, Node
from semel.stores.redis.cluster import Client
from semel.stores.redis.connection import AsyncConnections, Connections, client_options
from semel.stores.transaction import at_once

OnEnd = Callable[[str], None]

#: Seconds of silence before a PING is sent; and how long after that the connection counts as lost.
SILENCE_SECONDS = 30.0
PATIENCE_SECONDS = 10.0

#: Between two tries to connect: at first, and at most. Each varies at random, so that processes that lost their
#: server together do not reconnect together.
FIRST_PAUSE = 0.1
MAX_PAUSE = 15.0

#: How long closing a store waits for its thread: a server that hangs does not answer.
_END_SECONDS = 1.0

#: No connection, or a server that can't be used now: it is tried again.
_TROUBLE = (OSError, RedisError, StoreError)
_GONE = "The server is silent."

_logger = logging.getLogger("semel")


class AsyncListener:
    """The subscription of one event loop: a task of its own."""

    def __init__(self, address: Address, channel: bytes) -> None:
        """Listen to nothing yet."""
        self._address = address
        self._channel = channel
        self._heard_by: list[OnEnd] = []
        self._task: asyncio.Task[None] | None = None
        start_afresh_in_children(self)

    def add(self, on_end: OnEnd) -> None:
        """Call *on_end* with every hint from now on."""
        loop = asyncio.get_running_loop()
        if self._task is not None and (self._task.done() or self._task.get_loop() is not loop):
            # The former loop is closed, and its callbacks are useless.
            self._task = None
            self._heard_by = []
        if on_end not in self._heard_by:
            self._heard_by.append(on_end)
        if self._task is None:
            self._task = loop.create_task(self._listen())

    async def close(self) -> None:
        """Stop listening."""
        task, self._task, self._heard_by = self._task, None, []
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])

    def start_afresh(self) -> None:
        """Start without a subscription: the old one is the parent's."""
        leave_alone(self._task)
        self._task, self._heard_by = None, []

    async def _listen(self) -> None:
        pauses = _pauses()
        while True:
            servers = AsyncConnections(self._address)
            try:
                node = _any(await Client(self._address, servers).masters())
                async with AsyncRedis(**_options(self._address, node)) as client, client.pubsub() as subscription:
                    await subscription.subscribe(self._channel)
                    pauses = _pauses()
                    while True:
                        message = await subscription.get_message(timeout=SILENCE_SECONDS)
                        if message is None:
                            await subscription.ping()
                            message = await subscription.get_message(timeout=PATIENCE_SECONDS)
                        _pass_on(message, self._heard_by)
            except _TROUBLE as error:
                _logger.debug("No hints from %s for a while: %s", self._address, error)
            finally:
                servers.drop()
            await asyncio.sleep(next(pauses))


class Listener:
    """The subscription of one process of threads: a daemon thread of its own."""

    def __init__(self, address: Address, channel: bytes) -> None:
        """Listen to nothing yet."""
        self._address = address
        self._channel = channel
        self._mutex = threading.Lock()
        self._heard_by: list[OnEnd] = []
        self._run: _Run | None = None

    def add(self, on_end: OnEnd) -> None:
        """Call *on_end*, in the listener's thread, with every hint from now on."""
        with self._mutex:
            if on_end not in self._heard_by:
                self._heard_by.append(on_end)
            if self._run is None:
                self._run = _Run(self._address, self._channel, self._heard_by)

    def close(self) -> None:
        """Stop listening."""
        with self._mutex:
            run, self._run, self._heard_by = self._run, None, []
        if run is not None:
            run.end()


class _Run:
    """A thread that listens until it is told to end."""

    def __init__(self, address: Address, channel: bytes, heard_by: list[OnEnd]) -> None:
        self._address = address
        self._channel = channel
        self._heard_by = heard_by
        self._ended = threading.Event()
        self._mutex = threading.Lock()
        self._subscription: PubSub | None = None
        self._thread = threading.Thread(target=self._listen, name="semel-hints", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        with self._mutex, suppress(*_TROUBLE):
            if self._subscription is not None:
                # The server's confirmation wakes the thread.
                self._subscription.unsubscribe()  # type: ignore[no-untyped-call]
        self._thread.join(_END_SECONDS)

    def _listen(self) -> None:
        pauses = _pauses()
        while not self._ended.is_set():
            servers = Connections(self._address)
            try:
                node = _any(at_once(Client(self._address, servers).masters()))
                with Redis(**_options(self._address, node)) as client, client.pubsub() as subscription:
                    subscription.subscribe(self._channel)
                    pauses = _pauses()
                    self._follow(subscription)
            except _TROUBLE as error:
                _logger.debug("No hints from %s for a while: %s", self._address, error)
            finally:
                servers.close()
            self._ended.wait(next(pauses))

    def _follow(self, subscription: PubSub) -> None:
        with self._mutex:
            self._subscription = subscription
        try:
            while not self._ended.is_set():
                message = subscription.get_message(timeout=SILENCE_SECONDS)
                if message is None:
                    subscription.ping()
                    message = subscription.get_message(timeout=PATIENCE_SECONDS)
                _pass_on(message, self._heard_by)
        finally:
            with self._mutex:
                self._subscription = None


def _any(nodes: list[Node]) -> Node:
    """Return a server that gets all hints: in a Cluster, any of them."""
    return random.choice(nodes)  # noqa: S311 - chance here has no enemy


def _options(address: Address, node: Node) -> dict[str, Any]:
    options = client_options(address, address.login)
    # Any client may publish there, so redis-py must not decode it.
    return options | {"host": node.host, "port": node.port, "decode_responses": False}


def _pass_on(message: dict[str, Any] | None, heard_by: list[OnEnd]) -> None:
    if message is None:
        raise TimeoutError(_GONE)
    if message["type"] != "message":
        return
    with suppress(UnicodeDecodeError):
        name = message["data"].decode()
        for on_end in tuple(heard_by):
            on_end(name)


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - as above
        pause = min(2 * pause, MAX_PAUSE)

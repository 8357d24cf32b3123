"""Hears of operations that end, in whatever process: one subscription for each process. What it hears are hints.

Some are lost: while there is no connection, and in a fail-over. Whoever waits asks the store now and then all the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from semel.errors import StoreError
from semel.stores.forks import leave_alone, start_afresh_in_children
from semel.stores.redis.address import Address, Node
from semel.stores.redis.async_wires import AsyncLink, AsyncWires
from semel.stores.redis.courier import Courier, Talk
from semel.stores.redis.wire import Reply, packed
from semel.stores.redis.wires import Link, Wires

OnEnd = Callable[[str], None]

#: How long, in seconds, nothing is heard before the server is asked whether it is still there; and how long after that
#: it counts as gone.
SILENCE_SECONDS = 30.0
PATIENCE_SECONDS = 10.0

#: Between two tries to connect: at first, and at most. Each is somewhat more or less, so that processes that lost their
#: server together don't come back together.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 15.0

#: No connection, or a server that is not one to use: it may be one later.
_TROUBLE = (OSError, StoreError)

_PING = packed("PING")
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
            # The loop that others listened on is gone, and they with it.
            self._task = None
            self._heard_by = []
        if on_end not in self._heard_by:
            self._heard_by.append(on_end)
        if self._task is None:
            self._task = loop.create_task(self._listen())

    async def close(self) -> None:
        """Listen no more."""
        task, self._task, self._heard_by = self._task, None, []
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await asyncio.wait([task])

    def start_afresh(self) -> None:
        """Hear nothing: who listens are the parent's."""
        leave_alone(self._task)
        self._task, self._heard_by = None, []

    async def _listen(self) -> None:
        pauses = _pauses()
        while True:
            try:
                link = await AsyncLink.open(self._address, await self._node())
                pauses = _pauses()
                await self._follow(link)
            except _TROUBLE as error:
                _logger.debug("Hints from %s are not heard for a while: %s", self._address, error)
            await asyncio.sleep(next(pauses))

    async def _node(self) -> Node:
        wires = AsyncWires(self._address)
        try:
            return await wires.run(_somebody(Courier(self._address)))
        finally:
            wires.drop()

    async def _follow(self, link: AsyncLink) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(SILENCE_SECONDS, lambda: None)

        def wind(seconds: float, then: Callable[[], None]) -> None:
            nonlocal timer
            timer.cancel()
            timer = loop.call_later(seconds, then)

        def ask() -> None:
            link.send(_PING)
            wind(PATIENCE_SECONDS, link.give_up)

        def hear(replies: list[Reply]) -> None:
            wind(SILENCE_SECONDS, ask)
            _pass_on(replies, self._heard_by)

        wind(SILENCE_SECONDS, ask)
        try:
            await link.follow(packed("SUBSCRIBE", self._channel), hear)
        finally:
            timer.cancel()


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
        """Listen no more."""
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
        self._link: Link | None = None
        self._thread = threading.Thread(target=self._listen, name="semel-hints", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        with self._mutex:
            if self._link is not None:
                self._link.wake()
        self._thread.join()

    def _listen(self) -> None:
        pauses = _pauses()
        while not self._ended.is_set():
            try:
                link = Link(self._address, self._node())
                pauses = _pauses()
                self._follow(link)
            except _TROUBLE as error:
                _logger.debug("Hints from %s are not heard for a while: %s", self._address, error)
            self._ended.wait(next(pauses))

    def _node(self) -> Node:
        wires = Wires(self._address)
        try:
            return wires.run(_somebody(Courier(self._address)))
        finally:
            wires.close()

    def _follow(self, link: Link) -> None:
        try:
            with self._mutex:
                if self._ended.is_set():
                    return
                self._link = link
            link.send(packed("SUBSCRIBE", self._channel))
            while not self._ended.is_set():
                _pass_on(self._next(link), self._heard_by)
        finally:
            with self._mutex:
                self._link = None
            link.close()

    @staticmethod
    def _next(link: Link) -> list[Reply]:
        try:
            return link.receive(1, SILENCE_SECONDS)
        except TimeoutError:
            link.send(_PING)
            return link.receive(1, PATIENCE_SECONDS)


def _somebody(courier: Courier) -> Talk[Node]:
    """Return a server that hears of everything: in a Cluster, any."""
    return random.choice((yield from courier.masters()))  # noqa: S311 - chance here has no enemy


def _pass_on(replies: Iterable[Reply], heard_by: list[OnEnd]) -> None:
    for reply in replies:
        if not (isinstance(reply, list) and reply[0] == b"message"):
            continue
        with suppress(UnicodeDecodeError):  # Anybody may publish anything there.
            name = reply[2].decode()
            for on_end in tuple(heard_by):
                on_end(name)


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - as above
        pause = min(2 * pause, LONGEST_PAUSE)

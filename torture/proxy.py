"""A proxy before PostgreSQL that loses what it is told to lose: a statement, or the server's reply to it.

It reads as much of the protocol as it takes to know which statement is executed, and which bytes are its reply. What it
carries otherwise is passed on as it is.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from tests.kit.carrier import Carrier, greet, message


class Cut(Enum):
    """Where the connection is cut."""

    #: The statement never reaches the server, which undoes what was open.
    BEFORE = "before the server had it"
    #: The server has carried it out and said so, and its reply is lost.
    AFTER = "after the server had replied"
    #: The client is cut off first, and the statement reaches the server a little later.
    LATE = "while it was on its way"


@dataclass(frozen=True, slots=True)
class Lost:
    """One connection that was cut at a statement."""

    sql: str
    cut: Cut
    #: The matches of ``Proxy.marks`` in the client's last message that had any.
    marks: tuple[str, ...]


#: Told of each statement that is about to be executed; says where to cut, or None.
Choose = Callable[[str, tuple[str, ...]], Cut | None]


class Proxy(Carrier):
    """Cuts the connections that are chosen."""

    def __init__(self, url: str, choose: Choose, tell: Callable[[Lost], None], *, marks: str = r"pay-[\w-]+") -> None:
        """Stand before the server of *url*. *tell* hears of a cut before the client can notice it."""
        super().__init__(url)
        self.choose = choose
        self.tell = tell
        self.marks = re.compile(marks.encode())
        #: How long a statement is delayed if its client was cut off first.
        self.delay_seconds = 0.05
        #: Cuts after which the server has confirmed the statement.
        self.confirmed: list[Lost] = []

    async def carry(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Carry one connection until either side, or a cut, ends it."""
        try:
            servers = await asyncio.open_connection(*self.server)
        except OSError:  # The server is down, and the client sees that here, too.
            to_client.transport.abort()
            return
        link = _Link(self, client, to_client, *servers)
        try:
            await link.carry()
        finally:
            link.close()


class _Link:
    """One connection."""

    def __init__(
        self,
        proxy: Proxy,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client, self._to_client = client, to_client
        self._server, self._to_server = server, to_server
        #: SQL by the name of its prepared statement, and that by the name of its portal.
        self._statements: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._marks: tuple[str, ...] = ()
        #: Requests that the server answers with "ready", and how many it has; the greeting is the first.
        self._asked, self._answered = 1, 0
        #: Whether the client is told nothing any more.
        self._is_mute = False
        self._all_answered = asyncio.Event()
        self._is_complete = False

    async def carry(self) -> None:
        """Carry until either side, or a cut, ends it."""
        with suppress(OSError, asyncio.IncompleteReadError):
            if not await greet(self._client, self._to_client, self._to_server):
                return
            ways = [asyncio.ensure_future(way) for way in (self._up(), self._down())]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    def close(self) -> None:
        """Close both sides."""
        self._to_client.close()
        self._to_server.close()

    async def _up(self) -> None:
        while True:
            kind, packet = await message(self._client)
            sql = self._understood(kind, packet[5:])
            cut = None if sql is None else self._proxy.choose(sql, self._marks)
            if sql is None or cut is None:
                self._pass_on(kind, packet)
                await self._to_server.drain()
            else:
                await self._lose(Lost(sql, cut, self._marks), kind, packet)
                return

    async def _lose(self, lost: Lost, kind: bytes, packet: bytes) -> None:
        if lost.cut is Cut.BEFORE:
            # The server first, so that a client who comes back at once does not wait for what was open.
            self._to_server.close()
            self._proxy.tell(lost)
            return
        self._is_mute = True
        held = [(kind, packet)]
        while held[-1][0] not in {b"Q", b"S"}:
            held.append(await message(self._client))
        if lost.cut is Cut.LATE:
            self._proxy.tell(lost)
            self._to_client.close()
            await asyncio.sleep(self._proxy.delay_seconds)
        self._is_complete = False
        self._all_answered.clear()
        for each in held:
            self._pass_on(*each)
        await self._all_answered.wait()
        if lost.cut is Cut.AFTER:
            self._proxy.tell(lost)
        if self._is_complete:
            self._proxy.confirmed.append(lost)

    def _pass_on(self, kind: bytes, packet: bytes) -> None:
        self._asked += kind in {b"Q", b"S"}
        self._to_server.write(packet)

    async def _down(self) -> None:
        while True:
            kind, packet = await message(self._server)
            if kind == b"C":
                self._is_complete = not packet[5:].startswith(b"ROLLBACK")
            elif kind == b"Z":
                self._answered += 1
                if self._answered == self._asked:
                    self._all_answered.set()
            if not self._is_mute:
                self._to_client.write(packet)
                await self._to_client.drain()

    def _understood(self, kind: bytes, content: bytes) -> str | None:
        """Return the statement that this message executes, if it does."""
        found = self._proxy.marks.findall(content)
        if found:
            self._marks = tuple(each.decode() for each in found)
        first, _, rest = content.partition(b"\0")
        if kind == b"P":
            self._statements[first] = rest.partition(b"\0")[0].decode()
        elif kind == b"B":
            self._portals[first] = self._statements.get(rest.partition(b"\0")[0], "")
        elif kind == b"E":
            return self._portals.get(first, "")
        return first.decode() if kind == b"Q" else None


def is_commit(sql: str) -> bool:
    """Whether a statement, or the last of several, ends a transaction for good."""
    return sql.strip().rstrip(";").rpartition(";")[2].strip().upper() == "COMMIT"

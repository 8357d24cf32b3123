"""A proxy in front of an upstream that does what the test says, both on the test's own loop, over real sockets.

The upstream reads requests by itself and keeps their bytes: a library would hide what the proxy has sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from semel.core.commands import Browse, Look
from semel.core.record import Record
from semel.proxy.app import Proxy
from semel.proxy.config import made
from semel.proxy.protocol import Protocol
from semel.proxy.server import build

#: Nothing here takes a second; what takes this long hangs.
HANG = 30.0

KEY = "Idempotency-Key: key-1"
BOB = "X-User: bob"


@dataclass(frozen=True)
class Seen:
    """A request as the upstream got it."""

    method: str
    target: str
    #: Names as they were sent.
    lines: tuple[tuple[str, str], ...]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [each for sent, each in self.lines if sent.lower() == name.lower()]


Answer = Callable[[Seen, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def replying(head: str, body: bytes = b"ok", *lines: str) -> bytes:
    """Spell an answer with its length."""
    return "\r\n".join([f"HTTP/1.1 {head}", f"Content-Length: {len(body)}", *lines, "", ""]).encode() + body


async def created(seen: Seen, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(
        replying("201 Created", json.dumps({"body": len(seen.body)}).encode(), "Content-Type: application/json")
    )


@dataclass
class Origin:
    """The upstream."""

    answer: Answer = created
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    #: Connections that are open, and how many were at the same time.
    current: int = 0
    most: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.current += 1
        self.most = max(self.most, self.current)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (seen := await read_request(reader)) is not None:
                self.seen.append(seen)
                await self.answer(seen, reader, writer)
                await writer.drain()
        self.current -= 1
        writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.decode("latin-1").split("\r\n")[:-2]
    return first, tuple((name, each.strip()) for name, _, each in (line.partition(":") for line in rest))


async def read_request(reader: asyncio.StreamReader) -> Seen | None:
    head = await read_head(reader)
    if head is None:
        return None
    method, target, _ = head[0].split(" ")
    return Seen(method, target, head[1], await read_body(reader, {name.lower(): each for name, each in head[1]}))


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", 0)))


@dataclass(frozen=True)
class Got:
    """An answer as a client got it."""

    status: int
    lines: tuple[tuple[str, str], ...]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [each for sent, each in self.lines if sent.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_replay(self) -> bool:
        return self.values("idempotent-replayed") == ["true"]

    @property
    def code(self) -> str | None:
        is_ours = self.values("content-type") == ["application/problem+json"]
        return str(self.json()["code"]) if is_ours else None


class Client:
    """One connection to the proxy, on which a test writes bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def got(self, method: str = "POST") -> Got:
        """Read one answer."""
        async with asyncio.timeout(HANG):
            head = await read_head(self.reader)
            assert head is not None, "The proxy hung up without an answer."
            status = int(head[0].split(" ")[1])
            headers = {name.lower(): each for name, each in head[1]}
            is_bare = method == "HEAD" or status in {204, 304}
            return Got(status, head[1], b"" if is_bare else await read_body(self.reader, headers))


@dataclass
class World:
    """A proxy and its upstream."""

    origin: Origin
    proxy: Proxy
    port: int

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def raw(self, data: bytes, method: str = "POST") -> Got:
        async with self.connected() as client:
            client.writer.write(data)
            return await client.got(method)

    async def send(
        self, *lines: str, method: str = "POST", target: str = "/pay", body: bytes = b"{}", host: str = "shop"
    ) -> Got:
        return await self.raw(request(*lines, method=method, target=target, body=body, host=host), method)

    async def pay(self, key: str = "key-1", body: bytes = b"{}", user: str = "bob") -> Got:
        return await self.send(f"Idempotency-Key: {key}", f"X-User: {user}", body=body)

    async def record(self, key: str = "key-1", user: str = "bob") -> Record | None:
        return await self.proxy.guard.store.perform(Look(user, key))

    async def records(self) -> tuple[Record, ...]:
        return await self.proxy.guard.store.perform(Browse(limit=100))


def request(
    *lines: str, method: str = "POST", target: str = "/pay", body: bytes | None = b"{}", host: str = "shop"
) -> bytes:
    length = [] if not body and method in {"GET", "HEAD"} else [f"Content-Length: {len(body or b'')}"]
    head = [f"{method} {target} HTTP/1.1", f"Host: {host}", *length, *lines, "", ""]
    return "\r\n".join(head).encode("latin-1") + (body or b"")


@asynccontextmanager
async def proxied(
    folder: Path, origin: Origin | None = None, *, rules: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[World]:
    """Run a proxy in front of *origin*, with *rules* as its policy."""
    origin = origin or Origin()
    loop = asyncio.get_running_loop()
    serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving[task] = writer
        await origin.serve(reader, writer)

    upstream = await asyncio.start_server(serve, "127.0.0.1", 0)
    origin.port = upstream.sockets[0].getsockname()[1]
    given = {"upstream": origin.url, "scope": "header:X-User", "store": f"sqlite:///{folder}/keys.db", "work": False}
    chosen = made(given | settings, rules or {})
    proxy = build(chosen)
    protocol = Protocol.limited(chosen.client_timeout.total_seconds(), chosen.client_connections)
    config = uvicorn.Config(
        proxy,
        http=protocol,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )  # fmt: skip - as server.serve has it
    state = ServerState()
    async with lifespan(proxy):
        listener = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        yield World(origin, proxy, listener.sockets[0].getsockname()[1])
        listener.close()
        for each in list(state.connections):
            each.transport.close()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=HANG)
    upstream.close()
    for task, writer in serving.items():
        task.cancel()
        writer.close()
    if serving:
        await asyncio.wait(serving)
        await asyncio.gather(*(each.wait_closed() for each in serving.values()), return_exceptions=True)


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    """Do what a server does at its start and at its end."""
    asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    living = asyncio.create_task(app({"type": "lifespan"}, asked.get, said.put))
    for phase in ("startup", "shutdown"):
        asked.put_nowait({"type": f"lifespan.{phase}"})
        told = asyncio.create_task(said.get())
        await asyncio.wait({told, living}, return_when=asyncio.FIRST_COMPLETED, timeout=HANG)
        assert told.done(), "It did not start, or did not end."
        assert told.result()["type"] == f"lifespan.{phase}.complete"
        if phase == "startup":
            yield
    await living


async def gathered(works: Iterable[Awaitable[Got]]) -> list[Got]:
    async with asyncio.timeout(HANG):
        return list(await asyncio.gather(*works))

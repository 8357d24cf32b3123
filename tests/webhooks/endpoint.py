"""An endpoint of webhooks: a real server on loopback that answers as a test says. It verifies nothing."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

Answer = Callable[["Got"], bytes | Awaitable[bytes | None]]


@dataclass(frozen=True)
class Got:
    """One request."""

    line: str
    #: Lower-case names.
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter


@dataclass
class Server:
    """A server, and what it got."""

    port: int
    requests: list[Got] = field(default_factory=list)
    connections: int = 0

    def url(self, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}/hooks"


def http(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    """Return an answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in names.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@asynccontextmanager
async def serving(
    answer: Answer = lambda _: http(), *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve until the end of the block."""
    writers: list[asyncio.StreamWriter] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                pairs = (line.split(": ", 1) for line in head[1:-2])
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                made.requests.append(Got(head[0], headers, body, writer))
                said = answer(made.requests[-1])
                sent = said if isinstance(said, bytes) else await said
                if sent is None:
                    break
                writer.write(sent)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, host, port, ssl=tls)
    made = Server(server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()
        for writer in writers:
            writer.close()

"""The proxy as its users run it: ``semel proxy`` as a process of its own."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.proxy.kit import HANG, Client, Got, request

ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    """A process, where it listens, and its first line."""

    process: asyncio.subprocess.Process
    where: str
    line: str

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        if self.where.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(self.where.removeprefix("unix:"))
        else:
            host, _, port = self.where.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def send(self, *lines: str, method: str = "POST", target: str = "/pay", body: bytes = b"{}") -> Got:
        async with self.connected() as client:
            client.writer.write(request(*lines, method=method, target=target, body=body))
            return await client.got(method)

    async def pay(self, key: str = "key-1", body: bytes = b"{}") -> Got:
        return await self.send(f"Idempotency-Key: {key}", "X-User: bob", body=body)

    async def get(self, target: str) -> Got:
        return await self.send("X-User: bob", method="GET", target=target, body=b"")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), HANG)


@asynccontextmanager
async def running(
    folder: Path,
    upstream: str,
    *options: str,
    listen: str = "127.0.0.1:0",
    rules: str = "",
    store: str = "",
    program: tuple[str, ...] = ("-m", "semel"),
    **environment: str,
) -> AsyncIterator[Running]:
    """Run ``semel proxy`` in front of *upstream*, with *rules* as its table [policy]."""
    config = folder / "semel.toml"
    config.write_text(f"[policy]\n{rules}\n")
    given = ["--upstream", upstream, "--scope", "header:X-User", "--listen", listen, "--config", str(config)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "proxy", "--store", store or f"sqlite:///{folder}/keys.db", *given, *options),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]]), **environment},
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), HANG)).decode()
        assert line.startswith("Listening on "), f"It said {line!r}."
        yield Running(process, line.removeprefix("Listening on ").partition(",")[0], line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

"""Examples, loaded from their files and served in this process. It asserts nothing."""

import asyncio
import importlib.util
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import httpx

from tests.kit.servers import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BASE_URL = "http://localhost:8000"
HANG_SECONDS = 60
#: How a real server is asked. Nothing is encrypted, and to read the world's certificates takes longer than a request.
ASKING: dict[str, Any] = {"timeout": HANG_SECONDS, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}


def load(name: str) -> ModuleType:
    """Run an example as a fresh module: each test gets its own."""
    spec = importlib.util.spec_from_file_location(f"example_{uuid4().hex}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def asgi(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of *app*, which is started and stopped as a server would."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    running = asyncio.ensure_future(app(scope, inbox.get, outbox.put))
    inbox.put_nowait({"type": "lifespan.startup"})
    told = asyncio.ensure_future(outbox.get())
    await asyncio.wait([told, running], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # raises what it ended with
    assert (await told)["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        yield client
    inbox.put_nowait({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await running


@contextmanager
def wsgi(app: Any, guard: Any) -> Iterator[httpx.Client]:
    """A client of *app*, whose *guard* is closed at the end."""
    with httpx.Client(transport=httpx.WSGITransport(app), base_url=BASE_URL) as client:
        yield client
    guard.guard.leases.close()
    guard.store.close()
    guard.store.close()


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real server of a tutorial's payments.py, and where it takes payments."""
    port = free_port()
    command = ["-m", "uvicorn", "payments:app", "--port", str(port), "--log-level", "critical"]
    with process(folder, command, port) as running:
        yield running, f"http://127.0.0.1:{port}/payments"


@contextmanager
def process(folder: Path, command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Python's that listens on *port*."""
    with subprocess.Popen([sys.executable, *command], cwd=folder, stderr=subprocess.DEVNULL) as running:
        try:
            while running.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            yield running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGTERM)

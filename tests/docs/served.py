"""Examples, loaded from their files and served in this process. It asserts nothing."""

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import httpx

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
BASE_URL = "http://localhost:8000"


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
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
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
    guard.keeper.close()
    guard.store.close()

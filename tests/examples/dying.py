"""A warm process that runs one request of Rocket Rides at a time, each in a forked child that may kill itself half-way.

Run as a program: a line of its standard input is a `Job`, a line of its standard output the `Outcome`.
"""

import asyncio
import importlib
import json
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import semel
from examples.rides import app, effects, postgres, sqlite
from semel import operation
from semel.asgi import IdempotencyMiddleware
from semel.guard import running, steps

# Imported on first use, and by the parent, so that no child has to.
FIRST_USED = (
    "anyio._backends._asyncio",
    "concurrent.futures.thread",
    "importlib.readers",
    "semel.stores.connections.asyncpg",
    "semel.stores.postgres.async_store",
    "semel.stores.sqlite.store",
)

_FLOWS = Path(str(semel.__file__)).parent / "flows"
TRACED = {
    *(str(module.__file__) for module in (app, effects, postgres, sqlite, operation, running, steps)),
    *(str(file) for file in _FLOWS.glob("*.py")),
}


@dataclass(frozen=True)
class Job:
    """Whose ride to book, and where to die."""

    store: str
    provider: str
    rider: str
    #: Die before this line is executed, counted from 1 and from the request's start; 0 is not to die.
    line: int = 0
    #: Count the lines of this function alone.
    function: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    killed: bool
    status: int | None = None
    replayed: bool = False
    retry_after: str | None = None
    ride: Any = None
    #: How many lines were executed.
    lines: int = 0


class Tracer:
    """Counts the lines that are executed, in every thread, and kills this process at one of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.lines = 0

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        is_wanted = code.co_filename in TRACED and self._job.function in {None, code.co_name}
        return self._line if is_wanted else None

    def _line(self, _frame: FrameType, event: str, _argument: object) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines == self._job.line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


@asynccontextmanager
async def started(api: IdempotencyMiddleware) -> AsyncIterator[None]:
    """Start the app, as a server does. It is never stopped: this process dies in one way or the other."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    serving = asyncio.ensure_future(api({"type": "lifespan", "state": {}}, inbox.get, outbox.put))
    inbox.put_nowait({"type": "lifespan.startup"})
    message = await outbox.get()
    if message["type"] != "lifespan.startup.complete":
        raise RuntimeError(message)
    yield
    serving.cancel()


async def serve(job: Job) -> Outcome:
    api = app.make_app(job.store, job.provider)
    api.workers = None  # The retry has to do without them; and their lines come when they like.
    tracer = Tracer(job)
    wanted = {"from": "Kourou", "to": "Tranquility Base", "card": "card_1"}
    headers = {"X-Rider": job.rider, "Idempotency-Key": "key-1"}
    transport = httpx.ASGITransport(api)
    async with started(api), httpx.AsyncClient(transport=transport, base_url="http://rides") as client:
        request = client.build_request("POST", "/rides", json=wanted, headers=headers)
        tracer.start()
        answer = await client.send(request)
        tracer.stop()
    return Outcome(
        killed=False,
        status=answer.status_code,
        replayed="idempotent-replayed" in answer.headers,
        retry_after=answer.headers.get("retry-after"),
        ride=answer.json(),
        lines=tracer.lines,
    )


def in_child(job: Job) -> Outcome:
    """Fork, and wait for what comes of it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, json.dumps(asdict(asyncio.run(serve(job)))).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Outcome(killed=True)
    return Outcome(**json.loads(said))


if __name__ == "__main__":
    for name in FIRST_USED:
        importlib.import_module(name)
    # Every child would read the world's certificates again, for longer than its request takes; the provider has none.
    ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]
    httpx.create_ssl_context()
    for line in sys.stdin:
        print(json.dumps(asdict(in_child(Job(**json.loads(line))))), flush=True)  # noqa: T201 - spoken to a program

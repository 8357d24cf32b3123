"""What one request does inside Semel, counted and not timed: ``python -m bench calls``. There is no HTTP in it: the app
is driven in this process, with a request made by hand. Nothing here knows a name inside the package.
"""

from __future__ import annotations

import asyncio
import dis
import enum
import functools
import inspect
import json
import secrets
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

import semel
from bench.app import app
from bench.cases import StoreKind, Work
from bench.databases import Databases, databases
from bench.load import BODY, KEY_DIGITS, LoadFailed
from bench.report import Calls
from bench.setup import Setup
from bench.table import call_rows

PACKAGE = str(Path(semel.__file__).parent) + "/"
#: Before anything is counted: connections are opened, statements prepared, caches filled.
WARM_UP = 30
#: Each kind of request is counted so often, and the median is shown: a timer of the package may fall into one.
PASSES = 5
#: Turns of the loop after an answer in which a request may tidy up.
TURNS = 10
#: Written as expressions, and inlined by later versions of Python.
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
HEADERS = [
    (b"host", b"127.0.0.1"),
    (b"user-agent", b"semel-bench"),
    (b"accept", b"application/json"),
    (b"content-type", b"application/json"),
    (b"content-length", str(len(BODY)).encode()),
]


Functions = Counter[CodeType]
Counted = tuple[Calls, Functions]

#: By what the handler does: the requests with one new key, in order, each with its goals for calls. Only PostgreSQL's
#: store has transactions of the handler's.
Goals = tuple[int | None, int | None]
REQUESTS: dict[Work, dict[str, Goals]] = {
    "nothing": {"first": (80, 60), "replay": (50, 35)},
    "atomic": {"atomic, first": (None, None), "atomic, replay": (None, None)},
    "phases": {"three phases": (None, None)},
}


class Trace:
    """Counts while it is on. It sees the calls of this thread, and of every thread that begins after it."""

    def __init__(self) -> None:
        self._is_on = False
        #: How often each function of the package was called, in all threads.
        self.functions: Functions = Counter()
        self._tasks = 0
        self._objects = 0

    def install(self) -> None:
        """See every call from here on. That is for the life of the process, which has no other purpose."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        asyncio.get_running_loop().set_task_factory(self._new_task)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count, beginning at zero."""
        self.functions.clear()
        self._tasks = self._objects = 0
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def counts(self) -> dict[str, int]:
        """Sum up what was counted last, by the names that ``Calls`` has."""
        return {
            "calls": self.functions.total(),
            "files": len({code.co_filename for code in self.functions}),
            "objects": self._objects,
            "coroutines": sum(number for code, number in self.functions.items() if code.co_flags & SUSPENDED),
            "tasks": self._tasks,
        }

    def watch_classes(self) -> None:
        """Have every class of the package count its objects. One that sets fields on a bare ``__new__`` is not seen."""
        for kind in sorted(_classes(object), key=lambda kind: len(kind.__mro__)):
            if str(kind.__module__).partition(".")[0] != "semel" or issubclass(kind, enum.Enum):
                continue
            if issubclass(kind, tuple):
                kind.__new__ = self._counting(kind.__new__, "__new__")  # type: ignore[method-assign]
            elif "__init__" in vars(kind) or not hasattr(kind.__init__, "counts"):
                kind.__init__ = self._counting(kind.__init__, "__init__")  # type: ignore[method-assign]

    def _counting(self, make: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(make)
        def counting(made: Any, *given: Any, **named: Any) -> Any:
            # Not for each of its base classes as well.
            made_kind = made if isinstance(made, type) else type(made)
            self._objects += self._is_on and getattr(made_kind, name) is counting
            return None if make is object.__init__ else make(made, *given, **named)

        counting.counts = True  # type: ignore[attr-defined]
        return counting

    def _new_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        self._tasks += self._is_on
        return asyncio.Task(coroutine, loop=loop, **named)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if not self._is_on or event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in COMPREHENSIONS:
            return
        # A coroutine that goes on is reported as a call, too.
        if not code.co_flags & SUSPENDED or frame.f_lasti <= _beginning(code):
            self.functions[code] += 1


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"


@functools.cache
def _beginning(code: CodeType) -> int:
    return next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")


def _classes(base: type) -> set[type]:
    below: set[type] = set(type.__subclasses__(base))
    return below.union(*(_classes(kind) for kind in below))


class Client:
    """Sends requests to an ASGI app in this process."""

    def __init__(self, served: Any) -> None:
        self._app = served

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Start the app, and end it."""
        said: asyncio.Queue[str] = asyncio.Queue()
        heard: asyncio.Queue[str] = asyncio.Queue()

        async def receive() -> dict[str, Any]:
            return {"type": await said.get()}

        async def send(message: dict[str, Any]) -> None:
            await heard.put(message["type"])

        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        serving = asyncio.get_running_loop().create_task(self._app(scope, receive, send))
        for word in ("startup", "shutdown"):
            await said.put(f"lifespan.{word}")
            if (answer := await heard.get()) != f"lifespan.{word}.complete":
                raise LoadFailed(f"The app answered {word} with {answer}.")
            if word == "startup":
                try:
                    yield
                except BaseException:
                    serving.cancel()
                    raise
        await serving

    async def post(self, key: str) -> None:
        """Send one request; return when it is answered and the app has returned."""
        body: list[dict[str, Any]] = [{"type": "http.request", "body": BODY, "more_body": False}]
        is_answered = asyncio.Event()
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await is_answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif not message.get("more_body"):
                is_answered.set()

        await self._app(_scope(key), receive, send)
        if statuses != [201]:
            raise LoadFailed(f"A request was answered with {statuses}.")


def _scope(key: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/orders",
        "raw_path": b"/orders",
        "root_path": "",
        "query_string": b"",
        "headers": [*HEADERS, (b"idempotency-key", key.encode())],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 80),
        "state": {},
    }


def count(stores: Sequence[StoreKind]) -> list[Counted]:
    """Count every kind of request on these stores. It changes this process for good: let it be one of its own."""
    with databases(stores) as bases:
        if missing := [store for store in stores if not bases.has(store)]:
            raise LoadFailed(f"No redis-server here, which {', '.join(missing)} needs. Install one, or leave it out.")
        return [each for store in stores for work in REQUESTS for each in _count(store, work, bases)]


def _count(store: StoreKind, work: Work, bases: Databases) -> list[Counted]:
    if work != "nothing" and store != "PostgreSQL":
        return []
    place = bases.new(store)
    setup = Setup(place, work, None if work == "nothing" else place.url)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(_trace(setup, list(REQUESTS[work])))
    goals = REQUESTS[work] if store == "PostgreSQL" else {}
    return [
        (Calls(store, name, *goals.get(name, (None, None)), **counts), functions)
        for name, (counts, functions) in seen.items()
    ]


async def _trace(setup: Setup, requests: list[str]) -> dict[str, tuple[dict[str, int], Functions]]:
    """Send keys to one app, each as many times as there are *requests*."""
    trace = Trace()
    trace.install()
    client = Client(app(setup))
    passes: dict[str, list[tuple[dict[str, int], Functions]]] = {name: [] for name in requests}
    async with client.lifespan():
        for number in range(WARM_UP + PASSES):
            if number == WARM_UP:
                # Once everything is imported.
                trace.watch_classes()
            key = secrets.token_hex(KEY_DIGITS // 2)
            for name in requests:
                with trace.on():
                    await client.post(key)
                    for _ in range(TURNS):
                        await asyncio.sleep(0)
                passes[name].append((trace.counts(), trace.functions.copy()))
    return {name: sorted(each[WARM_UP:], key=lambda one: one[0]["calls"])[PASSES // 2] for name, each in passes.items()}


def listed(rows: list[Counted], *, with_functions: bool) -> str:
    """Lay the counts out, and the functions below them if they are asked for."""
    lines = call_rows([each for each, _ in rows])
    for each, functions in rows if with_functions else ():
        lines += ["", f"{each.store}, {each.request}: calls of each function"]
        lines += [f"{number:>4}  {_name(code)}" for code, number in functions.most_common()]
    return "\n".join(lines)


def as_json(rows: list[Counted]) -> str:
    """Spell the counts for programs."""
    return json.dumps([asdict(each) for each, _ in rows])

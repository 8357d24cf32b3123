"""Waiting through the ASGI entry point: clients that hang up, and what waiting costs the store."""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route

from semel import Policy, stores
from semel.asgi import PER_ROUTE, IdempotencyMiddleware, claim, disconnect
from semel.core.commands import Claim, Command, Look, Release
from semel.core.state import State
from semel.guard.waiting import AsyncWaiters
from semel.stores.base import AsyncStore
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.step import Step
from tests.web.harness import HANG_SECONDS, AsgiClient, Message, Request, asgi_scope

SOON = timedelta(milliseconds=50)
NEVER = timedelta(hours=1)
KEYED = Request(lines=(("Idempotency-Key", b"key-1"), ("Content-Type", b"text/plain")), body=b"amount=5")
#: What a worker that died has left behind, where no fingerprint is compared.
DEAD = Claim("alice", "key-1", b"d" * 16, b"", timedelta(milliseconds=1), NEVER)


class Counting(AsyncMemoryStore):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        super().__init__(memory=self.memory)
        self.asked: Counter[type[Command[Any]]] = Counter()

    def perform(self, command: Command[Any]) -> Step[Any]:
        self.asked[type(command)] += 1
        return super().perform(command)


class Entry:
    """An app whose handler is held until it is let go, behind the middleware, or with a route that claims its key."""

    def __init__(
        self, store: AsyncStore, *, by_route: bool = False, middleware: Any = (), poll: timedelta = NEVER, **policy: Any
    ) -> None:
        self.runs = 0
        self.let_go = asyncio.Event()
        self._by_route = by_route
        chosen = Policy.ietf(**{"in_progress": "wait", "fingerprint": None, "max_waiters_per_key": 10_000, **policy})
        app = Starlette(routes=[Route("/pay", self._pay, methods=["POST"])], middleware=middleware)
        scope: Any = PER_ROUTE if by_route else (lambda _: "alice")
        self.app = IdempotencyMiddleware(app, store=store, scope=scope, policy=chosen)
        self.app.guard = replace(self.app.guard, room=AsyncWaiters(store.listen, poll=poll))
        self.answer: Callable[[StarletteRequest], StarletteResponse] = lambda _: PlainTextResponse("made", 201)

    async def _pay(self, request: StarletteRequest) -> StarletteResponse:
        if self._by_route:
            await claim(request.scope, "alice")
        await request.body()
        self.runs += 1
        await self.let_go.wait()
        return self.answer(request)

    @property
    def waiting(self) -> int:
        return self.app.guard.room.count

    def start(self, receive: Any = None) -> tuple[AsgiClient, "asyncio.Task[None]"]:
        client = AsgiClient(KEYED)
        return client, asyncio.create_task(self.app(asgi_scope(KEYED), receive or client.receive, client.send))

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not is_so():  # noqa: ASYNC110 - there is no event for every count
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def first(self) -> AsyncIterator[None]:
        """Have a request in its handler, and at the end its answer."""
        client, task = self.start()
        await self.until(lambda: self.runs == 1)
        yield
        self.let_go.set()
        await asyncio.wait_for(task, HANG_SECONDS)
        assert client.response().status == 201


class Between(BaseHTTPMiddleware):
    """What applications put around their routes: it wraps ``receive``, and has tasks of its own."""

    async def dispatch(self, request: StarletteRequest, call_next: RequestResponseEndpoint) -> StarletteResponse:
        return await call_next(request)


#: Where a task listens for the end of a connection.
LISTENING = disconnect.__file__

ENTRIES = [
    pytest.param({}, id="the whole app"),
    pytest.param({"by_route": True}, id="a route"),
    pytest.param({"by_route": True, "middleware": [Middleware(Between)]}, id="a route behind another middleware"),
]


def ears() -> list["asyncio.Task[Any]"]:
    """The tasks that still listen to a client."""
    running = ((task, task.get_coro()) for task in asyncio.all_tasks())
    return [task for task, coro in running if inspect.iscoroutine(coro) and coro.cr_code.co_filename == LISTENING]


@pytest.mark.parametrize("kind", ENTRIES)
async def test_a_client_that_hangs_up_frees_its_place(kind: dict[str, Any]) -> None:
    """A client that hangs up while it is kept waiting waits no longer; nothing is said to the store about it."""
    store = Counting()
    entry = Entry(store, **kind)
    async with entry.first():
        client, task = entry.start()
        await entry.until(lambda: entry.waiting == 1)
        assert len(ears()) == 1
        asked = store.asked.total()
        client.gone.set()
        await asyncio.wait_for(task, HANG_SECONDS)
        assert (entry.waiting, store.asked.total()) == (0, asked)
    assert store.asked[Release] == 0
    assert (entry.runs, ears()) == (1, [])


@pytest.mark.parametrize("kind", ENTRIES)
async def test_a_server_that_cancels_frees_the_place(kind: dict[str, Any]) -> None:
    """A request that its server cancels while it is kept waiting waits no longer, and leaves no task behind."""
    store = Counting()
    entry = Entry(store, **kind)
    async with entry.first():
        _, task = entry.start()
        await entry.until(lambda: entry.waiting == 1)
        task.cancel()
        await asyncio.wait([task])
        await entry.until(lambda: entry.waiting == 0 and not ears())
    assert (store.asked[Release], entry.runs) == (0, 1)


@pytest.mark.parametrize("kind", ENTRIES)
async def test_a_thousand_hang_up(kind: dict[str, Any]) -> None:
    """A thousand who wait and hang up leave nothing behind: no place, no task."""
    entry = Entry(AsyncMemoryStore(), **kind)
    async with entry.first():
        before = len(asyncio.all_tasks())
        started = [entry.start() for _ in range(1000)]
        await entry.until(lambda: entry.waiting == 1000)
        for client, _ in started:
            client.gone.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task in started)), HANG_SECONDS)
        assert entry.waiting == 0
        await entry.until(lambda: len(asyncio.all_tasks()) == before)
    assert entry.runs == 1


@pytest.mark.parametrize("kind", ENTRIES)
async def test_all_who_wait_get_the_answer(kind: dict[str, Any]) -> None:
    """What ends in this process is told to all who wait for it at once, and costs the store one question."""
    store = Counting()
    entry = Entry(store, **kind)
    async with entry.first():
        started = [entry.start() for _ in range(100)]
        await entry.until(lambda: entry.waiting == 100)
        claims = store.asked[Claim]
        entry.let_go.set()
        for client, task in started:
            await asyncio.wait_for(task, HANG_SECONDS)
            assert (client.response().status, client.response().is_replay) == (201, True)
    assert (store.asked[Claim] - claims, entry.runs, ears()) == (1, 1, [])


@pytest.mark.parametrize("kind", ENTRIES)
async def test_who_took_over_still_hears_its_client(kind: dict[str, Any]) -> None:
    """A request that waited and then runs itself gets what its server says, as if it had never been listened to."""
    store = Counting()
    entry = Entry(store, poll=SOON, **kind)
    heard: list[Message] = []

    def stream(request: StarletteRequest) -> StarletteResponse:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            heard.append(await request.receive())

        return StreamingResponse(events(), media_type="text/event-stream")

    entry.answer = stream
    store.memory.perform(replace(DEAD, lease=SOON * 4))
    entry.let_go.set()
    client, task = entry.start()
    await entry.until(lambda: entry.waiting == 1)
    await entry.until(lambda: len(client.sent) == 2)
    client.gone.set()
    await asyncio.wait_for(task, HANG_SECONDS)
    assert [message["type"] for message in heard] == ["http.disconnect"]
    assert (entry.runs, ears()) == (1, [])


async def test_a_client_that_hangs_up_when_it_is_its_turn() -> None:
    """A request that has waited, and has its key at last, runs to its end though its client is gone: as any does."""
    store = Counting()
    entry = Entry(store, poll=SOON)
    store.memory.perform(replace(DEAD, lease=SOON * 4))
    client, task = entry.start()
    await entry.until(lambda: entry.runs == 1)
    client.gone.set()
    entry.let_go.set()
    await asyncio.wait_for(task, HANG_SECONDS)
    record = store.memory.perform(Look("alice", "key-1"))
    assert record is not None
    assert (record.state, record.attempt) == (State.COMPLETE, 2)


class Spoken:
    """A server's ``receive`` that says each thing once, as hypercorn's does, and may break."""

    def __init__(self, *messages: Message | Exception) -> None:
        self._queue: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.say({"type": "http.request", "body": KEYED.body, "more_body": False}, *messages)

    def say(self, *messages: Message | Exception) -> None:
        for message in messages:
            self._queue.put_nowait(message)

    async def __call__(self) -> Message:
        message = await self._queue.get()
        if isinstance(message, Exception):
            raise message
        return message


async def test_a_server_that_says_twice_that_the_body_is_over() -> None:
    """An empty piece after the end of the body is no hanging up."""
    entry = Entry(Counting())
    async with entry.first():
        spoken = Spoken({"type": "http.request", "body": b"", "more_body": False})
        client, task = entry.start(spoken)
        await entry.until(lambda: entry.waiting == 1)
        await asyncio.sleep(0)
        assert not task.done()
        entry.let_go.set()
        await asyncio.wait_for(task, HANG_SECONDS)
        assert client.response().is_replay


async def test_a_body_that_is_given_out_for_ever() -> None:
    """Where a middleware in front has put a body in place of ``receive``, nobody listens for a hanging up."""
    calls = 0

    async def receive() -> Message:
        nonlocal calls
        calls += 1
        if calls > 100:  # Whoever asks on and on would let nobody else run.
            await asyncio.Event().wait()
        return {"type": "http.request", "body": KEYED.body, "more_body": False}

    entry = Entry(Counting())
    async with entry.first():
        client, task = entry.start(receive)
        await entry.until(lambda: entry.waiting == 1)
        await entry.until(lambda: not ears() or calls > 100)
        assert calls < 100
        entry.let_go.set()
        await asyncio.wait_for(task, HANG_SECONDS)
        assert client.response().is_replay


async def test_a_server_that_breaks_while_a_client_waits() -> None:
    """A server whose ``receive`` fails has a client that waits on, and gets its answer if it can be sent."""
    entry = Entry(Counting())
    async with entry.first():
        client, task = entry.start(Spoken(RuntimeError("broken")))
        await entry.until(lambda: entry.waiting == 1 and not ears())
        entry.let_go.set()
        await asyncio.wait_for(task, HANG_SECONDS)
        assert client.response().is_replay


async def test_hanging_up_is_heard_by_all() -> None:
    """Where a server says only once that the client has gone, both we and the app know."""
    store = Counting()
    entry = Entry(store, by_route=True, poll=SOON)
    heard: list[str] = []

    def stream(request: StarletteRequest) -> StarletteResponse:
        async def events() -> AsyncIterator[bytes]:
            heard.extend([(await request.receive())["type"] for _ in range(2)])
            yield b"data: 1\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    entry.answer = stream
    store.memory.perform(replace(DEAD, lease=SOON * 4))
    spoken = Spoken()
    _, task = entry.start(spoken)
    await entry.until(lambda: entry.runs == 1)
    spoken.say({"type": "http.disconnect"})
    entry.let_go.set()
    await asyncio.wait_for(task, HANG_SECONDS)
    assert heard == ["http.disconnect"] * 2


async def test_one_question_for_all_who_wait() -> None:
    """Two hundred who wait for one key cost the store one statement in each interval, and nothing else."""
    store = Counting()
    entry = Entry(store, poll=SOON)
    async with entry.first():
        started = [entry.start() for _ in range(200)]
        await entry.until(lambda: entry.waiting == 200)
        began, claims = asyncio.get_running_loop().time(), store.asked[Claim]
        others = store.asked.total() - claims
        await entry.until(lambda: store.asked[Claim] >= claims + 5)
        asked = store.asked[Claim] - claims
        intervals = (asyncio.get_running_loop().time() - began) / SOON.total_seconds()
        assert asked <= intervals + 1
        assert store.asked.total() - store.asked[Claim] == others
        entry.let_go.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task in started)), HANG_SECONDS)
    assert all(client.response().is_replay for client, _ in started)


class Database:
    """A PostgreSQL database, looked at from outside."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, application_name="checker")

    def close(self) -> None:
        self._connection.close()

    def sessions(self) -> Counter[str]:
        """How many connections there are, by what they do."""
        rows = self._connection.execute(
            "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        return Counter(state for (state,) in rows)


@pytest.fixture
def database(migrated_postgres_url: str) -> Iterator[Database]:
    opened = Database(migrated_postgres_url)
    yield opened
    opened.close()


@pytest.mark.parametrize("mode", ["guard", "atomic"])
async def test_nobody_who_waits_holds_a_connection(migrated_postgres_url: str, database: Database, mode: str) -> None:
    """Fifty who wait have no connection to PostgreSQL among them, and no transaction is open for any of them."""
    store = stores.async_store(f"{migrated_postgres_url}?pool=3")
    try:
        entry = Entry(store, mode=mode, fingerprint=Policy.ietf().fingerprint, poll=SOON)
        async with entry.first():
            fifty = [entry.start() for _ in range(50)]
            await entry.until(lambda: entry.waiting == 50)
            # The one that claims for all, and the one that listens. In atomic mode each begins a transaction to look,
            # and gives its connection back before it waits: here there are three of these, and the handler has one.
            most, in_handlers = (2 + 3, 1) if mode == "atomic" else (2, 0)
            assert database.sessions().total() <= most
            await entry.until(lambda: database.sessions()["idle in transaction"] == in_handlers)
            entry.let_go.set()
            await asyncio.wait_for(asyncio.gather(*(task for _, task in fifty)), HANG_SECONDS)
        assert all(client.response().is_replay for client, _ in fifty)
        assert entry.runs == 1
    finally:
        await store.close()

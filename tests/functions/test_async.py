"""Async functions, on one event loop or on several."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import semel
from semel import functions
from semel.errors import ConfigurationError, InProgress, KeyReused, NotGuarded, NotReplayable
from semel.functions import FailedBefore, guards, idempotent, once
from semel.stores import AsyncStore
from semel.stores.memory import AsyncMemoryStore, MemoryStore

HANG_SECONDS = 60


async def test_a_second_call_gets_the_first_result(async_keys: AsyncStore) -> None:
    """An async function runs once for each key, and every later call gets its result."""
    sent: list[int] = []

    @idempotent(key="number", store=async_keys, name="send")
    async def send(number: int, how: str = "mail") -> list[Any]:
        sent.append(number)
        return [len(sent), semel.current().key]

    first: Any = [1, "7"]
    assert [await send(7), await send(7), await send(8)] == [first, first, [2, "8"]]
    with pytest.raises(KeyReused):
        await send(7, "fax")
    with pytest.raises(NotGuarded):
        semel.current()


async def test_exceptions(async_keys: AsyncStore) -> None:
    """An exception frees the key unless it is to be kept; a result that is no JSON is not run again."""
    faults: list[Any] = [OSError("away"), ValueError("odd")]

    @idempotent(key="number", store=async_keys, keep=ValueError, name="send")
    async def send(number: int) -> Any:
        if faults:
            raise faults.pop(0)
        return {number}

    with pytest.raises(OSError, match="away"):
        await send(1)
    with pytest.raises(ValueError, match="odd"):
        await send(1)
    with pytest.raises(FailedBefore, match="ValueError: odd"):
        await send(1)
    with pytest.raises(ConfigurationError, match="returned set"):
        await send(2)
    with pytest.raises(NotReplayable):
        await send(2)


async def test_twenty_tasks_one_run(async_keys: AsyncStore) -> None:
    """Of twenty calls at once with one key one runs, and the others are told to come back."""
    go, runs = asyncio.Event(), []

    @idempotent(key="number", store=async_keys, name="send")
    async def send(number: int) -> str:
        runs.append(number)
        await go.wait()
        return "sent"

    calls = [asyncio.create_task(send(1)) for _ in range(20)]
    refused = 0
    for each in asyncio.as_completed(calls):
        try:
            assert await each == "sent"
        except InProgress:
            refused += 1
            if refused == 19:
                go.set()
    assert (refused, runs) == (19, [1])


async def test_nested_operations(async_keys: AsyncStore) -> None:
    """Each function has its own operation, and the outer one is back when the inner has ended."""

    @idempotent(key="number", store=async_keys, name="inner")
    async def inner(number: int) -> str:
        return semel.current().key

    @idempotent(key="number", store=async_keys, name="outer")
    async def outer(number: int) -> list[str]:
        both = await asyncio.gather(inner(number + 1), inner(number + 2))
        return [semel.current().key, *both]

    assert await outer(1) == ["1", "2", "3"]


async def test_a_cancelled_caller_leaves_the_function_to_its_end(async_keys: AsyncStore) -> None:
    """Who waits for a function may be cancelled; the function goes on, and its result is there for the next call."""
    begun, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @idempotent(key="number", store=async_keys, name="send")
    async def send(number: int) -> str:
        begun.set()
        await go.wait()
        ended.set()
        return "sent"

    caller = asyncio.create_task(send(1))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(InProgress):
        await send(1)
    go.set()
    await ended.wait()
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            try:
                assert await send(1) == "sent"
                return
            except InProgress:
                await asyncio.sleep(0)


async def test_a_failure_that_nobody_waits_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A function that fails after its caller was cancelled says so in the log."""
    begun, go = asyncio.Event(), asyncio.Event()

    @idempotent(key="number", store="memory://", name="send")
    async def send(number: int) -> None:
        begun.set()
        await go.wait()
        raise OSError("away")

    caller = asyncio.create_task(send(1))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    told = asyncio.Event()

    def tell(_record: logging.LogRecord) -> bool:
        told.set()
        return True

    caplog.handler.addFilter(tell)
    with caplog.at_level(logging.ERROR, "semel"):
        await asyncio.wait_for(told.wait(), HANG_SECONDS)
    assert "send failed after its caller was cancelled" in caplog.text
    assert "OSError: away" in caplog.text


async def test_once(async_keys: AsyncStore) -> None:
    """A one-off that is async is awaited."""
    runs: list[int] = []

    async def work(number: int) -> int:
        runs.append(number)
        return number

    assert (
        await once("a", work, 5, store=async_keys, name="work")
        == await once("a", work, 5, store=async_keys, name="work")
        == 5
    )
    assert runs == [5]


async def test_once_by_url(durable_url: str) -> None:
    """A one-off may name its store by URL: it is closed with the loop."""

    async def work() -> int:
        return 5

    assert await once("a", work, store=durable_url) == await once("a", work, store=durable_url) == 5


def test_one_loop_after_another(durable_url: str) -> None:
    """A function may be called with asyncio.run again and again; each loop ends with nothing left open."""
    runs: list[int] = []

    @idempotent(key="number", store=durable_url, name="send")
    async def send(number: int) -> int:
        runs.append(number)
        return len(runs)

    @idempotent(key="number", store=durable_url, name="archive")
    async def archive(number: int) -> int:
        return number

    async def both(number: int) -> list[int]:
        return [await send(number), await archive(number), len(guards._on_loops)]

    assert [asyncio.run(both(number)) for number in (1, 1, 2)] == [[1, 1, 1], [1, 1, 1], [2, 2, 1]]
    assert not guards._on_loops


def test_several_loops_at_once(durable_url: str) -> None:
    """Threads may each have an event loop of their own."""
    together = threading.Barrier(4)

    @idempotent(key="number", store=durable_url, name="send")
    async def send(number: int) -> int:
        together.wait(HANG_SECONDS)
        return number

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(asyncio.run, send(number)) for number in range(4)]
        assert [call.result(HANG_SECONDS) for call in calls] == [0, 1, 2, 3]
    assert not guards._on_loops


def test_memory_outlives_a_loop() -> None:
    """Keys in memory are this process's, not a loop's, until they are closed."""
    runs: list[int] = []

    @idempotent(key="number", store="memory://", name="send")
    async def send(number: int) -> int:
        runs.append(number)
        return number

    assert [asyncio.run(send(1)), asyncio.run(send(1))] == [1, 1]
    assert runs == [1]
    functions.close()
    asyncio.run(send(1))
    assert runs == [1, 1]


def test_a_loop_that_was_closed_roughly_is_forgotten(sqlite_url: str) -> None:
    """A loop that ended without closing what ran on it is forgotten by the next."""

    @idempotent(key="number", store=sqlite_url, name="send")
    async def send(number: int) -> int:
        return number

    loop = asyncio.new_event_loop()
    loop.run_until_complete(send(1))
    store: Any = guards._on_loops[loop, sqlite_url][0].store
    loop.close()
    assert asyncio.run(send(1)) == 1
    assert not guards._on_loops
    asyncio.run(store.close())


async def test_a_store_of_the_wrong_colour() -> None:
    """A plain function needs a plain store, an async one an async store, and both say so."""

    @idempotent(key="number", store=AsyncMemoryStore(), name="plain")
    def plain(number: int) -> None: ...

    @idempotent(key="number", store=MemoryStore(), name="awaited")
    async def awaited(number: int) -> None: ...

    @idempotent(key="number", store=[], name="neither")
    def neither(number: int) -> None: ...

    with pytest.raises(ConfigurationError, match="or a Store, not AsyncMemoryStore"):
        plain(1)
    with pytest.raises(ConfigurationError, match="or an AsyncStore, not MemoryStore"):
        await awaited(1)
    with pytest.raises(ConfigurationError, match="not list"):
        neither(1)


class Sender:
    async def __call__(self, number: int) -> str:
        return semel.current().scope


async def test_an_object_that_is_called(sqlite_url: str) -> None:
    """An object with an async __call__ is guarded like a function, under its type's name."""
    send = idempotent(key="number", store=sqlite_url)(Sender())
    assert (await send(1)).endswith("Sender")

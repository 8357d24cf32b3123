"""Calls that wait for the first of their key to end, and get its result."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from semel import Policy
from semel.errors import InProgress, KeyReused
from semel.functions import idempotent, once
from semel.functions.guards import async_guard_at, guard_at
from semel.stores import AsyncStore, Store
from tests.web.harness import HANG_SECONDS, wait_until

WAITS = Policy(in_progress="wait")


class Work:
    """What is called: it is held until it is let go."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, order: str) -> dict[str, Any]:
        self.calls.append(order)
        self.entered.set()
        assert self.let_go.wait(HANG_SECONDS)
        return {"order": order, "calls": len(self.calls)}


def test_a_call_waits_for_the_first(keys: Store) -> None:
    """A second call with the same key waits for the first to return, and returns the same; other arguments do not."""
    work = Work()

    @idempotent(key="number", store=keys, policy=WAITS, name="send")
    def send(number: str, order: str) -> dict[str, Any]:
        return work(order)

    with ThreadPoolExecutor(4) as threads:
        try:
            first = threads.submit(send, "1", "a")
            assert work.entered.wait(HANG_SECONDS)
            others = [threads.submit(send, "1", "a") for _ in range(3)]
            wait_until(lambda: guard_at(keys).room.count == 3)
            with pytest.raises(KeyReused):
                send("1", "b")
        finally:
            work.let_go.set()
        assert [each.result(HANG_SECONDS) for each in (first, *others)] == [{"order": "a", "calls": 1}] * 4
    assert guard_at(keys).room.count == 0


def test_a_failure_lets_the_next_run(keys: Store) -> None:
    """When the first call fails, which frees its key, one that waits is called."""
    work = Work()

    @idempotent(key="number", store=keys, policy=WAITS, name="send")
    def send(number: str) -> int:
        work(number)
        if len(work.calls) == 1:
            raise ValueError("no paper")
        return len(work.calls)

    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(send, "1")
            assert work.entered.wait(HANG_SECONDS)
            other = threads.submit(send, "1")
            wait_until(lambda: guard_at(keys).room.count == 1)
        finally:
            work.let_go.set()
        with pytest.raises(ValueError, match="no paper"):
            first.result(HANG_SECONDS)
        assert other.result(HANG_SECONDS) == 2


def test_the_time_is_over(keys: Store) -> None:
    """A call that has waited for as long as it may raises what it would have raised at once."""
    work = Work()
    policy = Policy(in_progress="wait", wait=timedelta(milliseconds=50))
    with ThreadPoolExecutor(1) as threads:
        try:
            call = partial(once, "1", work, "a", store=keys, name="send", policy=policy)
            first = threads.submit(call)
            assert work.entered.wait(HANG_SECONDS)
            with pytest.raises(InProgress) as caught:
                call()
        finally:
            work.let_go.set()
        assert caught.value.retry_after == 1
        assert first.result(HANG_SECONDS)["calls"] == 1
    assert once("1", work, "a", store=keys, name="send", policy=policy)["calls"] == 1


async def test_async_calls_wait_too(async_keys: AsyncStore) -> None:
    """An async function's calls wait on the loop; one that is cancelled frees its place, and the others wait on."""
    calls, entered, let_go = 0, asyncio.Event(), asyncio.Event()

    @idempotent(key="number", store=async_keys, policy=WAITS, name="send")
    async def send(number: str) -> int:
        nonlocal calls
        calls += 1
        entered.set()
        await let_go.wait()
        return calls

    room = (await async_guard_at(async_keys)).room
    tasks = [asyncio.create_task(send("1"))]
    await asyncio.wait_for(entered.wait(), HANG_SECONDS)
    tasks += [asyncio.create_task(send("1")) for _ in range(20)]
    async with asyncio.timeout(HANG_SECONDS):
        while room.count < 20:  # noqa: ASYNC110 - there is no event for every count
            await asyncio.sleep(0.005)
    tasks.pop().cancel()
    async with asyncio.timeout(HANG_SECONDS):
        while room.count > 19:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    let_go.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), HANG_SECONDS) == [1] * 20
    assert (room.count, calls) == (0, 1)

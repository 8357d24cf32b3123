"""The batcher for tasks: what is asked meanwhile goes out together, and nobody's trouble is another's."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel.core.commands import Look
from semel.errors import StoreRefused, StoreUnavailable
from semel.stores import fair_queue
from semel.stores.batching import AsyncBatcher

FIRST = "first"


class Backlog:
    """A batcher whose batches are held until it is let go."""

    def __init__(self, answer: Callable[[list[str]], list[Any]] = list) -> None:
        self.batches: list[list[str]] = []
        self.is_open = asyncio.Event()
        self._entered = asyncio.Event()
        self._answer = answer
        self.batcher = AsyncBatcher(self._execute)

    def ask(self, name: str) -> asyncio.Future[Any]:
        return self.batcher.submit(Look("batcher", name))

    async def busy(self, names: list[str]) -> dict[str, asyncio.Future[Any]]:
        """Return the futures of *names*, which queue up behind a first batch that is held until it is let go."""
        futures = {FIRST: self.ask(FIRST)}
        await self._entered.wait()
        return futures | {name: self.ask(name) for name in names}

    async def _execute(self, commands: list[Look]) -> list[Any]:
        names = [command.key for command in commands]
        self.batches.append(names)
        self._entered.set()
        await self.is_open.wait()
        return self._answer(names)


async def test_free_lane_sends_at_once() -> None:
    """A lone caller waits for nobody; what is asked in one breath goes out in one batch."""
    backlog = Backlog()
    backlog.is_open.set()
    assert await backlog.ask("a") == "a"
    assert await asyncio.gather(*[backlog.ask("b"), backlog.ask("c")]) == ["b", "c"]
    assert backlog.batches == [["a"], ["b", "c"]]


async def test_what_queues_meanwhile_goes_out_together() -> None:
    """Whoever comes while a batch is under way is in the next one, in the order they came, and gets its own answer."""
    backlog = Backlog(lambda names: [name.upper() for name in names])
    futures = await backlog.busy(["a", "b", "c"])
    backlog.is_open.set()
    assert await asyncio.gather(*futures.values()) == ["FIRST", "A", "B", "C"]
    assert backlog.batches == [[FIRST], ["a", "b", "c"]]


async def test_batches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue goes out in several batches, still in order."""
    monkeypatch.setattr(fair_queue, "MAX_BATCH", 4)
    backlog = Backlog()
    futures = await backlog.busy(list("abcdefghij"))
    backlog.is_open.set()
    assert await asyncio.gather(*futures.values()) == [FIRST, *"abcdefghij"]
    assert backlog.batches == [[FIRST], list("abcd"), list("efgh"), list("ij")]


async def test_poisoned_row_fails_alone() -> None:
    """When a row spoils its batch, the others are tried without it, and its own error tells nothing of its data."""

    def answer(names: list[str]) -> list[Any]:
        if "bad" in names:
            raise ValueError("poison")
        return names

    backlog = Backlog(answer)
    futures = await backlog.busy(["a", "bad", "b"])
    backlog.is_open.set()
    assert (await futures["a"], await futures["b"]) == ("a", "b")
    with pytest.raises(StoreRefused, match="ValueError") as told:
        await futures["bad"]
    assert "poison" not in str(told.value)
    assert backlog.batches[1:] == [["a", "bad", "b"], ["a"], ["bad"], ["b"]]


async def test_store_error_fails_its_batch() -> None:
    """When the store is gone nobody is tried one by one: that would make a queue of time-outs."""

    def answer(names: list[str]) -> list[Any]:
        if "a" in names:
            raise StoreUnavailable("gone")
        return names

    backlog = Backlog(answer)
    futures = await backlog.busy(["a", "b"])
    backlog.is_open.set()
    for name in "ab":
        with pytest.raises(StoreUnavailable, match="gone"):
            await futures[name]
    assert backlog.batches == [[FIRST], ["a", "b"]]
    assert await backlog.ask("c") == "c"


async def test_exception_among_the_outcomes() -> None:
    """An outcome that is an exception is raised to its own caller."""
    backlog = Backlog(lambda names: [OSError("mine") if name == "a" else name for name in names])
    backlog.is_open.set()
    mine, other = backlog.ask("a"), backlog.ask("b")
    with pytest.raises(OSError, match="mine"):
        await mine
    assert await other == "b"


async def test_cancelled_caller_loses_nothing() -> None:
    """A caller that goes away takes neither its own command with it nor its neighbours', queued or under way."""
    backlog = Backlog()
    futures = await backlog.busy(["a", "b", "c"])
    futures[FIRST].cancel()
    futures["b"].cancel()
    backlog.is_open.set()
    assert (await futures["a"], await futures["c"]) == ("a", "c")
    assert backlog.batches == [[FIRST], ["a", "b", "c"]]


async def test_idle() -> None:
    """Idle is when everything that was asked for has been done, by then or meanwhile."""
    backlog = Backlog()
    await backlog.batcher.idle()
    futures = await backlog.busy(["a"])
    waiting = asyncio.ensure_future(backlog.batcher.idle())
    backlog.is_open.set()
    await waiting
    assert all(future.done() for future in futures.values())


async def test_end_of_the_loop_strands_nobody() -> None:
    """When the batcher is cancelled, as the loop ends, those under way and those queued learn that."""
    backlog = Backlog()
    futures = await backlog.busy(["a", "b"])
    assert backlog.batcher._drain is not None
    backlog.batcher._drain.cancel()
    for future in futures.values():
        with pytest.raises(StoreUnavailable) as caught:
            await future
        assert caught.value.was_sent
    backlog.is_open.set()
    assert await backlog.ask("c") == "c"


async def test_stress() -> None:
    """200 tasks, 20 commands each: every answer finds its own caller, and no two batches overlap."""
    alone = asyncio.Lock()

    async def execute(commands: list[Look]) -> list[Any]:
        assert not alone.locked()
        async with alone:
            await asyncio.sleep(0)  # lets others come in between, if they can
            return [command.key for command in commands]

    batcher = AsyncBatcher(execute)

    async def work(task: int) -> bool:
        return all(
            [await batcher.submit(Look("batcher", f"{task} {number}")) == f"{task} {number}" for number in range(20)]
        )

    assert all(await asyncio.gather(*[work(task) for task in range(200)]))

"""The batcher for threads: what is asked meanwhile goes out together, and nobody's trouble is another's."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from semel.core.commands import Look
from semel.errors import StoreRefused, StoreUnavailable
from semel.stores import batching, fair_queue
from semel.stores.batching import Batcher

FIRST = "first"
SECONDS = 30  # for what happens at once; only a broken batcher is waited for that long


class Queue(fair_queue.FairQueue[Any]):
    """A queue that tells of arrivals."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = threading.Semaphore(0)

    def append(self, command: Any, item: Any) -> None:
        super().append(command, item)
        self.arrivals.release()


class Backlog:
    """A batcher whose first batch is held until it is let go."""

    def __init__(self, answer: Callable[[list[str]], list[Any]] = list) -> None:
        self.batches: list[list[str]] = []
        self.is_open = threading.Event()
        self._entered = threading.Event()
        self._answer = answer
        self.queue = Queue()
        self.batcher = Batcher(self._execute)
        self.batcher._queue = self.queue

    def ask(self, name: str) -> Any:
        return self.batcher.submit(Look("batcher", name))

    def _execute(self, commands: list[Look]) -> list[Any]:
        names = [command.key for command in commands]
        self.batches.append(names)
        self._entered.set()
        assert self.is_open.wait(SECONDS)
        return self._answer(names)

    @contextmanager
    def busy(self, names: list[str]) -> Iterator[dict[str, Future[Any]]]:
        """Lend the futures of *names*, which queue up in this order behind a first batch that ends with this block."""
        with ThreadPoolExecutor(len(names) + 1) as pool:
            futures = {FIRST: pool.submit(self.ask, FIRST)}
            assert self._entered.wait(SECONDS)
            assert self.queue.arrivals.acquire(timeout=SECONDS)
            for name in names:
                futures[name] = pool.submit(self.ask, name)
                assert self.queue.arrivals.acquire(timeout=SECONDS)
            try:
                yield futures
            finally:
                self.is_open.set()


def test_free_lane_sends_at_once() -> None:
    """A lone caller waits for nobody."""
    backlog = Backlog()
    backlog.is_open.set()
    assert [backlog.ask(name) for name in "ab"] == ["a", "b"]
    assert backlog.batches == [["a"], ["b"]]


def test_what_queues_meanwhile_goes_out_together() -> None:
    """Whoever comes while a batch is under way is in the next one, in the order they came, and gets its own answer."""
    backlog = Backlog(lambda names: [name.upper() for name in names])
    with backlog.busy(["a", "b", "c"]) as futures:
        pass
    assert backlog.batches == [[FIRST], ["a", "b", "c"]]
    assert {name: future.result() for name, future in futures.items()} == {
        FIRST: "FIRST",
        "a": "A",
        "b": "B",
        "c": "C",
    }


def test_batches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long queue goes out in several batches, still in order."""
    monkeypatch.setattr(fair_queue, "MAX_BATCH", 4)
    backlog = Backlog()
    with backlog.busy(list("abcdefghij")) as futures:
        pass
    assert backlog.batches == [[FIRST], list("abcd"), list("efgh"), list("ij")]
    assert all(future.result() == name for name, future in futures.items())


def test_poisoned_row_fails_alone() -> None:
    """When a row spoils its batch, the others are tried without it, and its own error tells nothing of its data."""

    def answer(names: list[str]) -> list[Any]:
        if "bad" in names:
            raise ValueError("poison")
        return names

    backlog = Backlog(answer)
    with backlog.busy(["a", "bad", "b"]) as futures:
        pass
    assert (futures["a"].result(), futures["b"].result()) == ("a", "b")
    with pytest.raises(StoreRefused, match="ValueError") as told:
        futures["bad"].result()
    assert "poison" not in str(told.value)
    assert backlog.batches[1:] == [["a", "bad", "b"], ["a"], ["bad"], ["b"]]


def test_store_error_fails_its_batch() -> None:
    """When the store is gone nobody is tried one by one: that would make a queue of time-outs."""

    def answer(names: list[str]) -> list[Any]:
        if "a" in names:
            raise StoreUnavailable("gone")
        return names

    backlog = Backlog(answer)
    with backlog.busy(["a", "b"]) as futures:
        pass
    for name in "ab":
        with pytest.raises(StoreUnavailable, match="gone"):
            futures[name].result()
    assert backlog.batches == [[FIRST], ["a", "b"]]
    assert backlog.ask("c") == "c"


def test_exception_among_the_outcomes() -> None:
    """An outcome that is an exception is raised to its own caller."""
    backlog = Backlog(lambda names: [OSError("mine") if name == "a" else name for name in names])
    with backlog.busy(["a", "b"]) as futures:
        pass
    with pytest.raises(OSError, match="mine"):
        futures["a"].result()
    assert futures["b"].result() == "b"


def test_killed_leader_strands_nobody() -> None:
    """When the thread that carries a batch is killed, those in it learn that it may have been sent; the rest go on."""

    def answer(names: list[str]) -> list[Any]:
        if "a" in names:
            raise KeyboardInterrupt
        return names

    backlog = Backlog(answer)
    with backlog.busy(["a", "b"]) as futures:
        pass
    with pytest.raises(KeyboardInterrupt):
        futures["a"].result()
    with pytest.raises(StoreUnavailable) as caught:
        futures["b"].result()
    assert caught.value.was_sent
    assert backlog.ask("c") == "c"


@pytest.mark.parametrize("is_woken", [False, True], ids=["asleep", "just woken to lead"])
def test_killed_follower_strands_nobody(monkeypatch: pytest.MonkeyPatch, is_woken: bool) -> None:
    """When a thread is killed while it waits for its turn, its command does not go out, and those behind are served."""
    wait = batching._Ticket.wait

    def wait_or_die(ticket: Any) -> None:
        if is_woken or ticket.command.key != "a":
            wait(ticket)
        if ticket.command.key == "a":
            raise KeyboardInterrupt

    monkeypatch.setattr(batching._Ticket, "wait", wait_or_die)
    backlog = Backlog()
    with backlog.busy(["a", "b"]) as futures:
        if not is_woken:
            assert isinstance(futures["a"].exception(SECONDS), KeyboardInterrupt)
    assert isinstance(futures["a"].exception(), KeyboardInterrupt)
    assert futures["b"].result() == "b"
    assert backlog.batches == [[FIRST], ["b"]]
    assert backlog.ask("c") == "c"


def test_stress() -> None:
    """32 threads, 100 commands each: every answer finds its own caller, and no two batches overlap."""
    alone = threading.Lock()
    sizes: list[int] = []

    def execute(commands: list[Look]) -> list[Any]:
        assert alone.acquire(blocking=False)
        try:
            sizes.append(len(commands))
            return [command.key for command in commands]
        finally:
            alone.release()

    batcher = Batcher(execute)
    start = threading.Barrier(32)

    def work(thread: int) -> bool:
        start.wait()
        return all(
            batcher.submit(Look("batcher", f"{thread} {number}")) == f"{thread} {number}" for number in range(100)
        )

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, range(32)))
    assert sum(sizes) == 3200

"""What waits for the store is bounded, and belongs to one process and one event loop."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import Claim, Command, Complete, Look
from semel.core.message import Answer
from semel.core.record import Hold, Record
from semel.core.state import Event, State
from semel.errors import StoreUnavailable
from semel.flows.handle import LARGE_ANSWER
from semel.guard import unstored
from semel.guard.unstored import AsyncUnstored, Unstored
from semel.stores.leases import AsyncLeases, Leases
from semel.stores.memory import AsyncMemoryStore, MemoryStore

LEASE = timedelta(seconds=30)
SECONDS = 30


class Away:
    """A store that is away until it is let back."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.is_back = threading.Event()
        self.refuses: Callable[[Complete], bool] = lambda _: True
        #: Set when the end of an operation is stored, or given up.
        self.has_ended = threading.Event()
        self.leases = Leases(self.store.perform)
        self.unstored = Unstored(self.perform, self.leases, lambda *_: self.has_ended.set())

    def perform(self, command: Command[Any]) -> Any:
        if isinstance(command, Complete) and not self.is_back.is_set() and self.refuses(command):
            raise StoreUnavailable("It is away.")
        return self.store.perform(command)

    def keep(self, key: str, body: bytes = b"paid") -> bool:
        hold = self.store.perform(Claim("alice", key, key.encode().ljust(16), b"", LEASE, LEASE))
        assert isinstance(hold, Hold)
        return self.unstored.add(hold, (Complete(hold, Event.COMPLETE, Answer(201, (), body)),), LEASE)

    def record(self, key: str) -> Record:
        record = self.store.perform(Look("alice", key))
        assert record is not None
        return record

    def close(self) -> None:
        self.is_back.set()
        self.unstored.close()
        self.leases.close()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Away]:
    monkeypatch.setattr(unstored, "FIRST_PAUSE_SECONDS", 0.01)
    with closing(Away()) as away:
        yield away


def test_bytes_are_bounded(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the answers that wait take too much memory, the next are kept without their bodies: they are done."""
    monkeypatch.setattr(unstored, "MAX_BYTES", 10)
    assert away.keep("first", b"0123456789")
    assert away.keep("second", b"x")
    away.is_back.set()
    away.unstored.close()
    stored = [away.record(key).answer for key in ("first", "second")]
    assert stored == [Answer(201, (), b"0123456789"), Answer(201, (), None)]


def test_number_is_bounded(away: Away, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that is too many is left to its lease, and logged as lost."""
    monkeypatch.setattr(unstored, "MAX_ANSWERS", 1)
    assert away.keep("first")
    assert not away.keep("second")
    assert "AnswerLost" in caplog.text


def test_large_answer_that_never_gets_through(away: Away) -> None:
    """Where the store answers and a large answer is lost each time, it is stored without its body: it is done."""
    away.refuses = lambda command: len(command.answer.body or b"") > LARGE_ANSWER
    assert away.keep("first", bytes(LARGE_ANSWER + 1))
    assert away.has_ended.wait(SECONDS)
    assert away.record("first").answer == Answer(201, (), None)


def test_end_of_the_process(away: Away, caplog: pytest.LogCaptureFixture) -> None:
    """What can't be stored when the time is over is given up, and logged as lost."""
    assert away.keep("first")
    away.unstored.close_seconds = 0.0
    away.unstored.close()
    assert "AnswerLost" in caplog.text
    away.is_back.set()
    assert away.keep("second"), "it may be used again"
    away.unstored.close_seconds = SECONDS
    away.unstored.close()
    assert [away.record(key).state for key in ("first", "second")] == [State.PROCESSING, State.COMPLETE]


def test_forked_child(away: Away) -> None:
    """The answers of a parent are not its child's."""
    assert away.keep("first")
    child = os.fork()
    if child == 0:
        os._exit(len(away.unstored._entries))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    away.is_back.set()
    assert away.has_ended.wait(SECONDS)
    assert away.record("first").state is State.COMPLETE


def test_closed_loop(caplog: pytest.LogCaptureFixture) -> None:
    """An answer can't outlive the event loop that its store belongs to."""
    ended = threading.Event()
    memory = AsyncMemoryStore()

    def perform(command: Command[Any]) -> Any:
        raise StoreUnavailable("It is away.")

    async def keep() -> None:
        hold = await memory.perform(Claim("alice", "key", bytes(16), b"", LEASE, LEASE))
        assert isinstance(hold, Hold)
        waiting = AsyncUnstored(perform, AsyncLeases(memory.renew), lambda *_: ended.set())
        waiting.add(hold, (Complete(hold, Event.COMPLETE, Answer(201)),), LEASE)

    asyncio.run(keep())
    assert ended.wait(SECONDS)
    assert "its event loop was closed" in caplog.text


def test_stopped_loop() -> None:
    """An event loop that is stopped, and may run again, holds up no answer of another one; its own waits for it."""
    memory = AsyncMemoryStore()
    stored = {key: threading.Event() for key in ("stopped", "running")}
    waiting = AsyncUnstored(memory.perform, AsyncLeases(memory.renew), lambda _scope, key: stored[key].set())

    async def keep(key: str) -> None:
        hold = await memory.perform(Claim("alice", key, key.encode().ljust(16), b"", LEASE, LEASE))
        assert isinstance(hold, Hold)
        waiting.add(hold, (Complete(hold, Event.COMPLETE, Answer(201)),), LEASE)

    async def until_stored(key: str) -> None:
        assert await asyncio.to_thread(stored[key].wait, SECONDS)

    with closing(asyncio.new_event_loop()) as stopped, asyncio.Runner() as runner:
        stopped.run_until_complete(keep("stopped"))
        runner.run(keep("running"))
        runner.run(until_stored("running"))
        assert not stored["stopped"].is_set()
        stopped.run_until_complete(until_stored("stopped"))

"""Waiting in threads: who looks when, who is turned away, and that nobody's place outlives him."""

import asyncio
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from semel.core.commands import Again
from semel.core.handler import TooManyWaiters, Wait
from semel.errors import Interrupted
from semel.guard.waiting import MAX_THREADS, AsyncWaiters, Waiter, Waiters
from semel.guard.waiting.queue import Told
from tests.guard.waiters import FOUND, HANG_SECONDS, NEVER, SCOPE, SOON, Ears, deaf, end_of, name_of, wait_for
from tests.web.harness import wait_until

AGAIN, TOO_MANY = Again.AGAIN, TooManyWaiters.TOO_MANY
MANY = 100
PATIENT = wait_for(max_waiters=MANY)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MANY) as pool:
        yield pool


def quiet_room() -> Waiters:
    """A room in which nobody looks without a hint."""
    return Waiters(deaf, poll=NEVER)


class Visitor:
    """One request that waits, and may again."""

    def __init__(self, room: Waiters, threads: ThreadPoolExecutor, command: Wait = PATIENT) -> None:
        self._room = room
        self._threads = threads
        self._command = command
        self.visit = Waiter()

    def sit(self) -> "Future[Told]":
        """Begin to wait."""
        before = self._room.count
        task = self._threads.submit(self.wait)
        wait_until(lambda: self._room.count > before)
        return task

    def wait(self) -> Told:
        return self._room.wait(self._command, self.visit)


def test_a_hint_sends_the_first(threads: ThreadPoolExecutor) -> None:
    """Of those who wait for a key, a hint has one look: who has waited longest since it looked itself."""
    room = quiet_room()
    visitors = [Visitor(room, threads) for _ in range(3)]
    tasks = [visitor.sit() for visitor in visitors]
    for turn in (0, 1, 2, 0, 1):
        room.hint(SCOPE, "a")
        assert tasks[turn].result(HANG_SECONDS) is AGAIN
        assert sum(task.done() for task in tasks) == 1
        tasks[turn] = visitors[turn].sit()
    room.announce(*end_of())
    assert [task.result(HANG_SECONDS) for task in tasks] == [FOUND] * 3
    assert room.count == 0


def test_what_is_announced_is_told_to_all_who_wait_for_it(threads: ThreadPoolExecutor) -> None:
    """What one finds of a key is told to all who wait for it, and to nobody else."""
    room = quiet_room()
    mine = [Visitor(room, threads).sit() for _ in range(5)]
    others = Visitor(room, threads, wait_for("b", max_waiters=MANY)).sit()
    room.hint(SCOPE, "c")
    room.announce(*end_of("c"))
    room.announce(*end_of())
    assert [task.result(HANG_SECONDS) for task in mine] == [FOUND] * 5
    assert (room.count, others.done()) == (1, False)
    room.announce(*end_of("b"))
    assert others.result(HANG_SECONDS) is FOUND


def test_somebody_looks_without_a_hint(threads: ThreadPoolExecutor) -> None:
    """Without any hint, one who waits for each key looks once in a while."""
    room = Waiters(deaf, poll=SOON)
    tasks = [threads.submit(Visitor(room, threads, wait_for(key)).wait) for key in "abc"]
    assert [task.result(HANG_SECONDS) for task in tasks] == [AGAIN] * 3


def test_one_looks_for_all(threads: ThreadPoolExecutor) -> None:
    """However many wait for a key, the store is asked about it once in each interval, whenever they came."""
    room = Waiters(deaf, poll=SOON)
    asked: list[None] = []

    def keep_waiting() -> None:
        visitor = Visitor(room, threads)
        while visitor.wait() is AGAIN:
            asked.append(None)

    began = time.monotonic()
    tasks = [threads.submit(keep_waiting) for _ in range(50)]
    wait_until(lambda: len(asked) >= 10)
    asks = len(asked)
    assert asks <= (time.monotonic() - began) / SOON.total_seconds() + 1
    room.announce(*end_of())
    while not all(task.done() for task in tasks):
        room.announce(*end_of())  # To whoever was just looking.
    assert room.count == 0


@pytest.mark.parametrize(
    "command, others",
    [
        pytest.param(wait_for(max_waiters_per_key=2), "aa", id="for its key"),
        pytest.param(wait_for(max_waiters=2), "bc", id="in its process"),
        pytest.param(wait_for(max_waiters=0), "", id="where nobody may wait"),
        pytest.param(wait_for(), "b" * MAX_THREADS, id="where the policy does not say"),
    ],
)
def test_no_room(threads: ThreadPoolExecutor, command: Wait, others: str) -> None:
    """One too many is turned away at once."""
    room = quiet_room()
    visitors = [Visitor(room, threads, wait_for(key, max_waiters=MANY)) for key in others]
    tasks = [visitor.sit() for visitor in visitors]
    assert Visitor(room, threads, command).wait() is TOO_MANY
    assert room.count == len(others)
    for visitor in visitors:
        visitor.visit.leave()
    assert all(isinstance(task.exception(HANG_SECONDS), Interrupted) for task in tasks)
    assert room.count == 0


def test_whoever_looks_keeps_its_place(threads: ThreadPoolExecutor) -> None:
    """Who got up to look sits down again, and nobody else has its place meanwhile, unless it waits no more."""
    room = quiet_room()
    for only_one in (wait_for(max_waiters=1), wait_for(max_waiters_per_key=1)):
        first = Visitor(room, threads, only_one)
        task = first.sit()
        room.hint(SCOPE, "a")
        assert task.result(HANG_SECONDS) is AGAIN
        assert Visitor(room, threads, only_one).wait() is TOO_MANY
        task = first.sit()
        room.hint(SCOPE, "a")
        assert task.result(HANG_SECONDS) is AGAIN
        room.end(first.visit)
        other = Visitor(room, threads, only_one).sit()
        room.announce(*end_of())
        assert other.result(HANG_SECONDS) is FOUND


def test_the_time_is_counted_from_the_first_time(threads: ThreadPoolExecutor) -> None:
    """However often one looks, it waits no longer in all than its patience; and it looks once before it gives up."""
    visitor = Visitor(quiet_room(), threads, wait_for(patience=SOON))
    assert [visitor.wait() for _ in range(3)] == [AGAIN, TOO_MANY, TOO_MANY]


def test_the_next_in_line_sees_to_the_next_look(threads: ThreadPoolExecutor) -> None:
    """When the first of a line gives up, the second does not sleep on until its own time is over."""
    room = Waiters(deaf, poll=SOON * 5)
    first = Visitor(room, threads, wait_for(max_waiters=MANY))
    leaving = first.sit()
    second = Visitor(room, threads).sit()
    first.visit.leave()
    assert isinstance(leaving.exception(HANG_SECONDS), Interrupted)
    assert second.result(HANG_SECONDS) is AGAIN


def test_who_left_before_it_came(threads: ThreadPoolExecutor) -> None:
    """A client that hung up while its key was claimed does not wait at all."""
    room = quiet_room()
    visitor = Visitor(room, threads)
    visitor.visit.leave()
    with pytest.raises(Interrupted):
        visitor.wait()
    assert room.count == 0


def test_many_come_and_go(threads: ThreadPoolExecutor) -> None:
    """Whatever is said to whom, and in whatever order, all of many who wait are told something, and none is left."""
    room = Waiters(deaf, poll=SOON)

    def come_and_go(number: int) -> None:
        visitor = Visitor(room, threads, wait_for(str(number % 3), patience=SOON * 10, max_waiters=MANY))
        while visitor.wait() is AGAIN:
            room.hint(SCOPE, str(number % 2))

    tasks = [threads.submit(come_and_go, number) for number in range(MANY)]
    for key in "012" * 20:
        room.hint(SCOPE, key)
    room.announce(*end_of("1"))
    for task in tasks:
        task.result(HANG_SECONDS)
    assert room.count == 0


def test_hints_of_the_store(threads: ThreadPoolExecutor) -> None:
    """Nobody listens before somebody waits; then a hint of the store's is as good as one of this process."""
    ears = Ears()
    room = Waiters(ears.listen, poll=NEVER)
    room.hint(SCOPE, "a")
    assert not ears.listeners
    task = Visitor(room, threads).sit()
    wait_until(lambda: bool(ears.listeners))
    (hear,) = ears.listeners
    hear(name_of("b"))
    hear(name_of())
    assert task.result(HANG_SECONDS) is AGAIN


async def test_loops_hear_what_threads_hear() -> None:
    """Where views of both colours are served, what ends in a thread is hinted to those who wait on a loop."""
    ears = Ears()
    room = Waiters(ears.listen, poll=NEVER)
    async_room = AsyncWaiters(room.overhear, poll=NEVER)
    for hint in (lambda: room.hint(SCOPE, "a"), lambda: ears.listeners[0](name_of())):
        waiting = asyncio.create_task(async_room.wait(wait_for(), Waiter()))
        await asyncio.sleep(0)
        await asyncio.to_thread(hint)
        assert await waiting is AGAIN


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_an_empty_room(threads: ThreadPoolExecutor) -> None:
    """Who waits in a process does not wait in its children, and a lock that was held at the fork is nobody's there."""
    room = quiet_room()
    task = Visitor(room, threads).sit()
    with room._mutex:
        child = os.fork()
    if child == 0:
        is_so = room.count == 0 and room.wait(wait_for(patience=SOON), Waiter()) is AGAIN
        os._exit(0 if is_so else 1)
    assert os.waitpid(child, 0)[1] == 0
    room.announce(*end_of())
    assert task.result(HANG_SECONDS) is FOUND

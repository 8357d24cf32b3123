"""Waiting on event loops: who looks when, who is turned away, and that nobody's place outlives him."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import Again
from semel.core.handler import TooManyWaiters, Wait
from semel.errors import Interrupted
from semel.guard.waiting import MAX_WAITERS, AsyncWaiters, Waiter
from semel.guard.waiting.queue import Told
from tests.guard.waiters import FOUND, HANG_SECONDS, NEVER, SCOPE, SOON, Ears, deaf, end_of, name_of, wait_for

AGAIN, TOO_MANY = Again.AGAIN, TooManyWaiters.TOO_MANY


def quiet_room() -> AsyncWaiters:
    """A room in which nobody looks without a hint."""
    return AsyncWaiters(deaf, poll=NEVER)


class Visitor:
    """One request that waits, and may again."""

    def __init__(self, room: AsyncWaiters, command: Wait | None = None) -> None:
        self._room = room
        self._command = command or wait_for()
        self.visit = Waiter()

    async def sit(self) -> "asyncio.Task[Told]":
        """Begin to wait."""
        task = asyncio.create_task(self._room.wait(self._command, self.visit))
        await asyncio.sleep(0)
        return task

    async def wait(self) -> Told:
        async with asyncio.timeout(HANG_SECONDS):
            return await self._room.wait(self._command, self.visit)


async def told(task: "asyncio.Task[Told]") -> Told:
    async with asyncio.timeout(HANG_SECONDS):
        return await task


async def test_a_hint_sends_the_first() -> None:
    """Of those who wait for a key, a hint has one look: who has waited longest since it looked itself."""
    room = quiet_room()
    visitors = [Visitor(room) for _ in range(3)]
    tasks = [await visitor.sit() for visitor in visitors]
    for turn in (0, 1, 2, 0, 1):
        room.hint(SCOPE, "a")
        assert await told(tasks[turn]) is AGAIN
        assert sum(task.done() for task in tasks) == 1
        tasks[turn] = await visitors[turn].sit()
    assert room.count == 3
    room.announce(*end_of())
    assert [await told(task) for task in tasks] == [FOUND] * 3


async def test_what_is_announced_is_told_to_all_who_wait_for_it() -> None:
    """What one finds of a key is told to all who wait for it, and to nobody else."""
    room = quiet_room()
    mine, others = [await Visitor(room).sit() for _ in range(5)], await Visitor(room, wait_for("b")).sit()
    room.hint(SCOPE, "c")
    room.announce(*end_of("c"))
    room.announce(*end_of())
    assert [await told(task) for task in mine] == [FOUND] * 5
    assert (room.count, others.done()) == (1, False)
    room.announce(*end_of("b"))
    await told(others)


async def test_what_is_announced_comes_before_what_is_hinted() -> None:
    """Whoever is told the answer does not look for it, whatever is said next."""
    room = quiet_room()
    task = await Visitor(room).sit()
    room.announce(*end_of())
    room.hint(SCOPE, "a")
    assert await told(task) is FOUND


async def test_somebody_looks_without_a_hint() -> None:
    """Without any hint, one who waits for each key looks once in a while."""
    room = AsyncWaiters(deaf, poll=SOON)
    for key in ("a", "b", "a"):
        assert await Visitor(room, wait_for(key)).wait() is AGAIN
    assert await asyncio.gather(*(Visitor(room, wait_for(key)).wait() for key in "abc")) == [AGAIN] * 3


async def test_one_looks_for_all() -> None:
    """However many wait for a key, the store is asked about it once in each interval."""
    room = AsyncWaiters(deaf, poll=SOON)
    asked = 0
    enough = asyncio.Event()

    async def keep_waiting() -> None:
        nonlocal asked
        visitor = Visitor(room)
        while await visitor.wait() is AGAIN:
            asked += 1
            if asked == 10:
                enough.set()

    began = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(keep_waiting()) for _ in range(200)]
    async with asyncio.timeout(HANG_SECONDS):
        await enough.wait()
    intervals = (asyncio.get_running_loop().time() - began) / SOON.total_seconds()
    assert asked <= intervals + 1
    room.announce(*end_of())
    await asyncio.gather(*tasks)
    assert room.count == 0


@pytest.mark.parametrize(
    "command, others",
    [
        pytest.param(wait_for(max_waiters_per_key=2), ("a", "a"), id="for its key"),
        pytest.param(wait_for(max_waiters=2), ("b", "c"), id="in its process"),
        pytest.param(wait_for(max_waiters=0), (), id="where nobody may wait"),
        pytest.param(wait_for(), ("b",) * MAX_WAITERS, id="where the policy does not say"),
    ],
)
async def test_no_room(command: Wait, others: tuple[str, ...]) -> None:
    """One too many is turned away at once, and has its place when another has left."""
    room = quiet_room()
    tasks = [await Visitor(room, wait_for(key)).sit() for key in others]
    assert await Visitor(room, command).wait() is TOO_MANY
    assert room.count == len(others)
    if tasks:
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        late = await Visitor(room, command).sit()
        assert not late.done()
        late.cancel()
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    assert room.count == 0


async def test_whoever_looks_keeps_its_place() -> None:
    """Who got up to look sits down again, and nobody else has its place meanwhile."""
    room, only_one = quiet_room(), wait_for(max_waiters=1)
    for command in (only_one, wait_for(max_waiters_per_key=1)):
        first = Visitor(room, command)
        task = await first.sit()
        room.hint(SCOPE, "a")
        assert await told(task) is AGAIN
        assert await Visitor(room, command).wait() is TOO_MANY
        task = await first.sit()
        room.announce(*end_of())
        assert await told(task) is FOUND
        assert not (await Visitor(room, command).sit()).done()
        room.announce(*end_of())


def end(visitor: Visitor, room: AsyncWaiters) -> None:
    """It has found what it waited for."""
    room.end(visitor.visit)


def leave(visitor: Visitor, _room: AsyncWaiters) -> None:
    """Its client has gone."""
    visitor.visit.leave()


def forget(visitor: Visitor, _room: AsyncWaiters) -> None:
    """It has ended without a word: the store could not be asked."""
    del visitor.visit


def be_late(visitor: Visitor, _room: AsyncWaiters) -> None:
    """Its time is over, and it still looks."""
    visitor.visit.deadline = 0.0


@pytest.mark.parametrize("cease", [end, leave, forget, be_late])
async def test_whoever_looks_and_does_not_come_back(cease: Callable[[Visitor, AsyncWaiters], None]) -> None:
    """Who got up to look, and has no more to wait for, has left its place to others."""
    room, only_one = quiet_room(), wait_for(max_waiters=1)
    first = Visitor(room, only_one)
    task = await first.sit()
    room.hint(SCOPE, "a")
    assert await told(task) is AGAIN
    del task
    cease(first, room)
    other = await Visitor(room, only_one).sit()
    assert not other.done()
    room.announce(*end_of())
    await told(other)


async def test_the_time_is_counted_from_the_first_time() -> None:
    """However often one looks, it waits no longer in all than its patience; and it looks once before it gives up."""
    room = quiet_room()
    visitor = Visitor(room, wait_for(patience=SOON))
    assert await visitor.wait() is AGAIN
    assert await visitor.wait() is TOO_MANY
    assert await visitor.wait() is TOO_MANY
    assert room.count == 0


async def test_whose_time_is_over_need_not_look_where_another_has() -> None:
    """Of many who lose their patience at once, one looks."""
    room = quiet_room()
    visitors = [Visitor(room, wait_for(patience=SOON)) for _ in range(50)]
    outcomes = await asyncio.gather(*(visitor.wait() for visitor in visitors))
    assert outcomes.count(AGAIN) == 1
    assert outcomes.count(TOO_MANY) == 49


async def test_who_leaves_waits_no_longer() -> None:
    """A request whose client has gone frees its place, and never sits down again."""
    room = quiet_room()
    visitor = Visitor(room)
    task = await visitor.sit()
    visitor.visit.leave()
    with pytest.raises(Interrupted):
        await told(task)
    with pytest.raises(Interrupted):
        await visitor.wait()
    assert room.count == 0


async def test_who_left_before_it_came() -> None:
    """A client that hung up while its key was claimed does not wait at all."""
    room = quiet_room()
    visitor = Visitor(room)
    visitor.visit.leave()
    with pytest.raises(Interrupted):
        await visitor.wait()
    assert room.count == 0


@pytest.mark.parametrize("leave", [True, False], ids=["gone", "cancelled"])
async def test_a_thousand_who_leave(leave: bool) -> None:
    """A thousand who wait and leave, by hanging up or by being cancelled, leave nothing behind."""
    room = quiet_room()
    visitors = [Visitor(room, wait_for(str(number % 7))) for number in range(MAX_WAITERS)]
    tasks = [await visitor.sit() for visitor in visitors]
    assert room.count == MAX_WAITERS
    for visitor, task in zip(visitors, tasks, strict=True):
        if leave:
            visitor.visit.leave()
        else:
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert room.count == 0
    assert await Visitor(room, wait_for(patience=SOON)).wait() is AGAIN


async def test_hints_of_the_store() -> None:
    """Nobody listens before somebody waits; then a hint of the store's is as good as one of this process."""
    ears = Ears()
    room = AsyncWaiters(ears.listen, poll=NEVER)
    room.hint(SCOPE, "a")
    assert not ears.listeners
    task = await Visitor(room).sit()
    (hear,) = ears.listeners
    hear(name_of("b"))
    hear(name_of())
    assert await told(task) is AGAIN
    # A store that was closed and opened again has to be told again; it takes the same for the same.
    again = await Visitor(room).sit()
    assert ears.listeners == [hear, hear]
    room.announce(*end_of())
    await told(again)


class OtherLoop:
    """A loop in a thread of its own, as each request has under some frameworks."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def submit(self, running: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(running, self.loop)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def other_loop() -> Any:
    loop = OtherLoop()
    yield loop
    loop.end()


def hint_here(room: AsyncWaiters) -> None:
    room.hint(SCOPE, "a")


def hint_in_thread(room: AsyncWaiters) -> None:
    thread = threading.Thread(target=room.hint, args=(SCOPE, "a"))
    thread.start()
    thread.join()


@pytest.mark.parametrize("hint", [hint_here, hint_in_thread])
async def test_hints_cross_loops(other_loop: OtherLoop, hint: Callable[[AsyncWaiters], None]) -> None:
    """What ends on one loop, or in a thread, is hinted to those who wait on every loop."""
    room = quiet_room()
    there = Visitor(room)
    sitting = other_loop.submit(there.sit())
    task = await asyncio.wrap_future(sitting)
    here = await Visitor(room).sit()
    assert room.count == 2
    hint(room)
    assert await told(here) is AGAIN
    assert await asyncio.wrap_future(other_loop.submit(told(task))) is AGAIN


async def test_all_loops_count(other_loop: OtherLoop) -> None:
    """The limits are those of the process, whichever loops its requests are on."""
    room = quiet_room()
    task = await asyncio.wrap_future(other_loop.submit(Visitor(room).sit()))
    for command in (wait_for(max_waiters=1), wait_for(max_waiters_per_key=1)):
        assert await Visitor(room, command).wait() is TOO_MANY
    other_loop.loop.call_soon_threadsafe(task.cancel)
    await asyncio.wrap_future(other_loop.submit(asyncio.wait([task])))
    here = await Visitor(room, wait_for(max_waiters=1)).sit()
    assert not here.done()
    room.announce(*end_of())
    await told(here)


def test_a_loop_that_ends_in_the_middle() -> None:
    """Whoever waited on a loop that was ended waits no more: nobody is hinted at, and nobody is counted."""
    room = quiet_room()
    dying = asyncio.new_event_loop()
    task = dying.run_until_complete(Visitor(room).sit())
    assert room.count == 1
    dying.close()
    room.hint(SCOPE, "a")

    async def wait() -> int:
        here = await Visitor(room).sit()
        count = room.count
        room.announce(*end_of())
        await told(here)
        return count

    assert asyncio.run(wait()) == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()
    assert room.count == 0


def test_loops_are_not_kept() -> None:
    """A room that outlives its loops holds none of them."""
    room = AsyncWaiters(deaf, poll=timedelta(seconds=1))
    for _ in range(3):
        asyncio.run(_wait_once(room))
    gc.collect()
    assert not room._by_loop


async def _wait_once(room: AsyncWaiters) -> None:
    task = await Visitor(room).sit()
    room.announce(*end_of())
    await told(task)

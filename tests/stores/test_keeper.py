"""Leases are kept alive in one command for all, for as long as their handlers run."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.errors import StoreUnavailable
from semel.stores.keeper import RENEWALS_PER_LEASE, AsyncKeeper, Keeper

#: A round every 10 ms: long enough to come in between, short enough to wait for.
SHORT = timedelta(milliseconds=30)
LONG = timedelta(hours=1)
SECONDS = 30  # only a broken keeper is waited for that long

A, B, C = (Hold("alice", key, 1, b"t" * 16) for key in "abc")

Answer = Callable[[Renew], frozenset[Hold]]


def nothing_lost(_renew: Renew) -> frozenset[Hold]:
    return frozenset()


def fails_once() -> Answer:
    """An answer that fails the first time."""
    faults = [StoreUnavailable("gone")]

    def answer(_renew: Renew) -> frozenset[Hold]:
        if faults:
            raise faults.pop()
        return frozenset()

    return answer


# Threads


class Rounds:
    """What a keeper of threads asks for."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._asked: queue.SimpleQueue[Renew] = queue.SimpleQueue()
        self.keeper = Keeper(self._renew)

    def _renew(self, renew: Renew) -> frozenset[Hold]:
        self._asked.put(renew)
        return self._answer(renew)

    def until(self, *holds: Hold) -> Renew:
        """Wait for a round of exactly these holds; those of before, or of half of them, may come first."""
        while True:
            renew = self._asked.get(timeout=SECONDS)
            if dict(renew.holds).keys() == set(holds):
                return renew


@contextmanager
def kept(answer: Answer = nothing_lost) -> Iterator[Rounds]:
    rounds = Rounds(answer)
    try:
        yield rounds
    finally:
        rounds.keeper.close()


#: Doors that other tests have opened, and never closed, have keepers too.
_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_of_this_test() -> None:
    _of_others.clear()
    _of_others.update(threading.enumerate())


def keepers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "semel-keeper" and each not in _of_others]


def test_one_command_for_all() -> None:
    """All leases are renewed together, each at its own length, again and again."""
    with kept() as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.keeper.add(B, LONG)
        assert dict(rounds.until(A, B).holds) == {A: SHORT, B: LONG}
        rounds.until(A, B)
        assert len(keepers()) == 1


def test_lost_holds_are_dropped() -> None:
    """A hold that is lost is renewed no more; the others are."""
    with kept(lambda _: frozenset({A})) as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.keeper.add(B, SHORT)
        rounds.until(B)


def test_loser_is_told_once() -> None:
    """Whoever has lost its hold is told, once, though the store goes on to say so; the others are told nothing."""
    told: list[str] = []
    with kept(lambda _: frozenset({A})) as rounds:
        rounds.keeper.add(A, SHORT, lambda: told.append("a"))
        rounds.keeper.add(B, SHORT, lambda: told.append("b"))
        rounds.until(B)
        rounds.until(B)
    assert told == ["a"]


def test_who_has_ended_is_not_told() -> None:
    """A hold that ends while it is renewed is found ended by its renewal: that is no loss, and nobody is told."""
    told: list[str] = []

    def ends(_renew: Renew) -> frozenset[Hold]:
        rounds.keeper.discard(A)
        return frozenset({A})

    with kept(ends) as rounds:
        rounds.keeper.add(A, SHORT, lambda: told.append("a"))
        rounds.keeper.add(B, SHORT)
        rounds.until(B)
    assert not told


def test_nobody_is_told_of_a_failure() -> None:
    """A round that fails is no loss: the leases may well be alive."""
    told: list[str] = []
    with kept(fails_once()) as rounds:
        rounds.keeper.add(A, SHORT, lambda: told.append("a"))
        rounds.until(A)
        rounds.until(A)
    assert not told


def test_all_are_told_where_the_store_says_that_all_is_lost() -> None:
    """A store that knows that every hold is lost says so, and all are told at once, each once; the next are kept."""
    watchers: list[Callable[[], None]] = []
    told: list[str] = []
    keeper = Keeper(nothing_lost, watchers.append)
    try:
        keeper.add(A, LONG, lambda: told.append("a"))
        keeper.add(B, LONG, lambda: told.append("b"))
        (all_is_lost,) = watchers
        all_is_lost()
        assert told == ["a", "b"]
        keeper.add(C, LONG, lambda: told.append("c"))
        all_is_lost()
        assert told == ["a", "b", "c"]
    finally:
        keeper.close()


def test_finished_holds_are_dropped() -> None:
    """A hold whose handler has ended is left alone; leaving it twice is no mistake."""
    with kept() as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.keeper.add(B, SHORT)
        rounds.until(A, B)
        rounds.keeper.discard(A)
        rounds.keeper.discard(A)
        rounds.until(B)


def test_store_failure_is_survived() -> None:
    """A round that fails is followed by the next: two may fail before a live worker loses its lease."""
    with kept(fails_once()) as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.until(A)
        rounds.until(A)
    assert RENEWALS_PER_LEASE == 3


def test_shorter_lease_is_renewed_in_time() -> None:
    """A short lease does not wait for the timer of a long one."""
    with kept() as rounds:
        rounds.keeper.add(A, LONG)
        rounds.keeper.add(B, SHORT)
        rounds.until(A, B)


def test_empty_rounds_ask_nothing() -> None:
    """Without leases the store is asked for nothing, and the next lease is kept all the same."""
    with kept() as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.until(A)
        rounds.keeper.discard(A)
        rounds.keeper.add(B, SHORT)
        assert all(renew.holds for renew in [rounds.until(B), rounds.until(B)])


def test_close_ends_the_thread() -> None:
    """After close there is no thread; closing twice is no mistake, and adding starts anew."""
    with kept() as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.until(A)
        rounds.keeper.close()
        rounds.keeper.close()
        assert not keepers()
        rounds.keeper.add(B, SHORT)
        rounds.until(B)
    assert not keepers()


def test_close_before_the_thread_has_begun() -> None:
    """A keeper that is closed at once ends at once, however long its leases are."""
    for _ in range(100):
        with kept() as rounds:
            rounds.keeper.add(A, timedelta(hours=1))
    assert not keepers()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # That is the point of it.
def test_fork() -> None:
    """After a fork the child keeps its own leases, by its own thread, and none of the parent's."""
    with kept() as rounds:
        rounds.keeper.add(A, SHORT)
        rounds.until(A)
        child = os.fork()
        if child == 0:
            rounds.keeper.add(B, SHORT)
            rounds.until(B)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        rounds.until(A)


# Tasks


class AsyncRounds:
    """What a keeper of tasks asks for."""

    def __init__(self, answer: Answer = nothing_lost) -> None:
        self._answer = answer
        self._asked: asyncio.Queue[Renew] = asyncio.Queue()
        self.keeper = AsyncKeeper(self._renew)

    async def _renew(self, renew: Renew) -> frozenset[Hold]:
        self._asked.put_nowait(renew)
        return self._answer(renew)

    async def until(self, *holds: Hold) -> Renew:
        async with asyncio.timeout(SECONDS):
            while True:
                renew = await self._asked.get()
                if dict(renew.holds).keys() == set(holds):
                    return renew


async def test_async_one_command_for_all() -> None:
    """All leases are renewed together, each at its own length, again and again."""
    rounds = AsyncRounds()
    rounds.keeper.add(A, SHORT)
    rounds.keeper.add(B, LONG)
    assert dict((await rounds.until(A, B)).holds) == {A: SHORT, B: LONG}
    await rounds.until(A, B)
    rounds.keeper.close()


async def test_async_lost_holds_are_dropped() -> None:
    """A hold that is lost is renewed no more; the others are."""
    rounds = AsyncRounds(lambda _: frozenset({A}))
    rounds.keeper.add(A, SHORT)
    rounds.keeper.add(B, SHORT)
    await rounds.until(A, B)
    await rounds.until(B)
    rounds.keeper.close()


async def test_async_loser_is_told_once() -> None:
    """Whoever has lost its hold is told, once; the others are told nothing."""
    told: list[str] = []
    rounds = AsyncRounds(lambda _: frozenset({A}))
    rounds.keeper.add(A, SHORT, lambda: told.append("a"))
    rounds.keeper.add(B, SHORT, lambda: told.append("b"))
    await rounds.until(B)
    await rounds.until(B)
    rounds.keeper.close()
    assert told == ["a"]


async def test_async_who_has_ended_is_not_told() -> None:
    """A hold that ends while it is renewed is found ended by its renewal: that is no loss, and nobody is told."""
    told: list[str] = []

    def ends(_renew: Renew) -> frozenset[Hold]:
        rounds.keeper.discard(A)
        return frozenset({A})

    rounds = AsyncRounds(ends)
    rounds.keeper.add(A, SHORT, lambda: told.append("a"))
    rounds.keeper.add(B, SHORT)
    await rounds.until(B)
    rounds.keeper.close()
    assert not told


async def test_async_all_are_told_where_the_store_says_that_all_is_lost() -> None:
    """A store that knows that every hold is lost says so in any thread, and all are told at once, on their loop."""
    watchers: list[Callable[[], None]] = []
    told: list[str] = []
    last = asyncio.Event()
    keeper = AsyncKeeper(AsyncRounds()._renew, watchers.append)
    (all_is_lost,) = watchers
    all_is_lost()  # Nobody holds anything yet.
    keeper.add(A, LONG, lambda: told.append("a"))
    keeper.add(B, LONG, last.set)
    await asyncio.to_thread(all_is_lost)
    async with asyncio.timeout(SECONDS):
        await last.wait()
    assert told == ["a"]
    keeper.close()


def test_async_loop_that_has_ended_is_not_told() -> None:
    """Whose loop has ended has no handler to stop."""
    watchers: list[Callable[[], None]] = []

    async def keep() -> None:
        AsyncKeeper(AsyncRounds()._renew, watchers.append).add(A, LONG)

    asyncio.run(keep())
    watchers[0]()


async def test_async_finished_holds_are_dropped() -> None:
    """A hold whose handler has ended is left alone."""
    rounds = AsyncRounds()
    rounds.keeper.add(A, SHORT)
    rounds.keeper.add(B, SHORT)
    rounds.keeper.discard(A)
    rounds.keeper.discard(A)
    await rounds.until(B)
    rounds.keeper.close()


async def test_async_store_failure_is_survived() -> None:
    """A round that fails is followed by the next."""
    rounds = AsyncRounds(fails_once())
    rounds.keeper.add(A, SHORT)
    await rounds.until(A)
    await rounds.until(A)
    rounds.keeper.close()


async def test_async_shorter_lease_is_renewed_in_time() -> None:
    """A short lease does not wait for the timer of a long one."""
    rounds = AsyncRounds()
    rounds.keeper.add(A, LONG)
    rounds.keeper.add(B, SHORT)
    await rounds.until(A, B)
    rounds.keeper.close()


async def test_async_timer_runs_only_while_there_are_leases() -> None:
    """Without leases a round asks for nothing and winds no timer; the next lease winds it again."""
    rounds = AsyncRounds()
    rounds.keeper.add(A, SHORT)
    rounds.keeper.discard(A)
    rounds.keeper._start_round()
    assert rounds.keeper._timer is None
    assert rounds.keeper._round is None
    rounds.keeper.add(B, SHORT)
    await rounds.until(B)
    rounds.keeper.close()
    assert rounds.keeper._timer is None
    rounds.keeper.close()


async def test_async_last_lease_ends_as_a_round_begins() -> None:
    """A round that begins as the last lease ends does no harm."""
    rounds = AsyncRounds()
    rounds.keeper.add(A, SHORT)
    rounds.keeper._start_round()
    rounds.keeper.discard(A)
    assert rounds.keeper._round is not None
    await rounds.keeper._round
    rounds.keeper.close()


def test_async_another_loop() -> None:
    """On another loop the leases of the first are forgotten: their handlers went with it."""
    rounds = AsyncRounds()

    async def add(hold: Hold) -> None:
        rounds._asked = asyncio.Queue()
        rounds.keeper.add(hold, SHORT)
        await rounds.until(hold)

    asyncio.run(add(A))
    asyncio.run(add(B))

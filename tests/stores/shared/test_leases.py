"""Leases are kept alive in one command for all, for as long as their handlers run."""

import asyncio
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.errors import ConfigurationError, StoreUnavailable
from semel.functions import idempotent
from semel.stores import leases
from semel.stores.leases import RENEWALS_PER_LEASE, AsyncLeases, Leases

ROOT = Path(__file__).parents[3]
#: A round every 10 ms: long enough to come in between, short enough to wait for.
SHORT = timedelta(milliseconds=30)
LONG = timedelta(hours=1)
SECONDS = 30  # only a broken leases is waited for that long

A, B, C = (Hold("alice", key, 1, key.encode() * 16) for key in "abc")

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
    """What a leases of threads asks for."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._asked: queue.SimpleQueue[Renew] = queue.SimpleQueue()
        self.leases = Leases(self._renew)

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
        rounds.leases.close()


#: Entry points that other tests have opened, and never closed, have keepers too.
_of_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def only_of_this_test() -> None:
    _of_others.clear()
    _of_others.update(threading.enumerate())


def renewers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "semel-leases" and each not in _of_others]


def test_one_command_for_all() -> None:
    """All leases are renewed together, each at its own length, again and again."""
    with kept() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, LONG)
        assert dict(rounds.until(A, B).holds) == {A: SHORT, B: LONG}
        rounds.until(A, B)
        assert len(renewers()) == 1


class Clock:
    """The process's own clock, put forward by a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("renew", [nothing_lost, fails_once()])
def test_sure_for_half_a_lease(monkeypatch: pytest.MonkeyPatch, renew: Answer) -> None:
    """For half of a lease after the store has said so, it is sure that no other can have the operation; and then again
    once it was renewed. A renewal that fails makes nothing sure.
    """
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    rounds = Rounds(renew)
    rounds.leases.add(A, LONG)
    clock.now += LONG.total_seconds() / 2
    assert rounds.leases.is_sure(A)
    clock.now += 1
    assert not rounds.leases.is_sure(A)
    rounds.leases.confirm(A)
    if renew is not nothing_lost:
        assert not rounds.leases.is_sure(A)
        rounds.leases.confirm(A)
    assert rounds.leases.is_sure(A)
    rounds.leases.close()
    assert not rounds.leases.is_sure(A)


def test_not_sure_of_what_is_lost() -> None:
    """Nothing is sure of an operation that was not kept alive, or that another worker has."""
    lost = threading.Event()
    with kept(lambda _renew: frozenset({A})) as rounds:
        rounds.leases.confirm(A)
        assert not rounds.leases.is_sure(A)
        rounds.leases.add(A, LONG, lost.set)
        rounds.leases.confirm(A)
        assert lost.is_set()
        assert not rounds.leases.is_sure(A)


def test_a_renewal_by_the_way_makes_nothing_sure_once_it_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that may have run out may be being taken over while it is renewed, and the renewal does not see that."""
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    with kept() as rounds:
        rounds.leases.add(A, LONG)
        clock.now += LONG.total_seconds() + 1
        rounds.leases.add(B, SHORT)  # The round that is due soon renews both.
        rounds.until(A, B)
        rounds.until(A, B)
        assert not rounds.leases.is_sure(A)
        rounds.leases.confirm(A)
        assert rounds.leases.is_sure(A)


def test_shorter_leases_put_nothing_off() -> None:
    """A lease is renewed in its time, though each that comes after it is a little shorter."""
    lease, step = timedelta(seconds=1), timedelta(milliseconds=1)
    renewed = threading.Event()

    def answer(renew: Renew) -> frozenset[Hold]:
        if A in dict(renew.holds):
            renewed.set()
        return frozenset()

    with kept(answer) as rounds:
        ends_at = time.monotonic() + lease.total_seconds()
        rounds.leases.add(A, lease)
        while not renewed.wait(0.02) and time.monotonic() < ends_at:
            lease -= step
            rounds.leases.add(B, lease)
        assert renewed.is_set()


def test_lost_holds_are_dropped() -> None:
    """A hold that is lost is renewed no more; the others are."""
    with kept(lambda _: frozenset({A})) as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, SHORT)
        rounds.until(B)


def test_loser_is_told_once() -> None:
    """Whoever has lost its hold is told, once, though the store goes on to say so; the others are told nothing."""
    told: list[str] = []
    with kept(lambda _: frozenset({A})) as rounds:
        rounds.leases.add(A, SHORT, lambda: told.append("a"))
        rounds.leases.add(B, SHORT, lambda: told.append("b"))
        rounds.until(B)
        rounds.until(B)
    assert told == ["a"]


def test_who_has_ended_is_not_told() -> None:
    """A hold that ends while it is renewed is found ended by its renewal: that is no loss, and nobody is told."""
    told: list[str] = []

    def ends(_renew: Renew) -> frozenset[Hold]:
        rounds.leases.discard(A)
        return frozenset({A})

    with kept(ends) as rounds:
        rounds.leases.add(A, SHORT, lambda: told.append("a"))
        rounds.leases.add(B, SHORT)
        rounds.until(B)
    assert not told


def test_nobody_is_told_of_a_failure() -> None:
    """A round that fails is no loss: the leases may well be alive."""
    told: list[str] = []
    with kept(fails_once()) as rounds:
        rounds.leases.add(A, SHORT, lambda: told.append("a"))
        rounds.until(A)
        rounds.until(A)
    assert not told


def test_all_are_told_where_the_store_says_that_all_is_lost() -> None:
    """A store that knows that every hold is lost says so, and all are told at once, each once; the next are kept."""
    watchers: list[Callable[[], None]] = []
    told: list[str] = []
    leases = Leases(nothing_lost, watchers.append)
    try:
        leases.add(A, LONG, lambda: told.append("a"))
        leases.add(B, LONG, lambda: told.append("b"))
        (all_is_lost,) = watchers
        all_is_lost()
        assert told == ["a", "b"]
        leases.add(C, LONG, lambda: told.append("c"))
        all_is_lost()
        assert told == ["a", "b", "c"]
    finally:
        leases.close()


def test_finished_holds_are_dropped() -> None:
    """A hold whose handler has ended is left alone; leaving it twice is no mistake."""
    with kept() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, SHORT)
        rounds.until(A, B)
        rounds.leases.discard(A)
        rounds.leases.discard(A)
        rounds.until(B)


def test_store_failure_is_survived() -> None:
    """A round that fails is followed by the next: two may fail before a live worker loses its lease."""
    with kept(fails_once()) as rounds:
        rounds.leases.add(A, SHORT)
        rounds.until(A)
        rounds.until(A)
    assert RENEWALS_PER_LEASE == 3


def test_store_that_was_away_is_asked_again_soon(caplog: pytest.LogCaptureFixture) -> None:
    """After a round that fails the next comes within a second or so, however long the leases are: their workers live,
    and must be heard before another takes their keys over. The log has one line of it.
    """
    faults = [StoreUnavailable("gone"), StoreUnavailable("still gone")]

    def answer(_renew: Renew) -> frozenset[Hold]:
        if faults:
            raise faults.pop(0)
        return frozenset()

    with kept(answer) as rounds:
        rounds.leases.add(A, LONG)
        rounds.leases._wake_up()
        for _ in range(3):
            rounds.until(A)
    assert caplog.text.count("could not be renewed") == 1


def test_shorter_lease_is_renewed_in_time() -> None:
    """A short lease does not wait for the timer of a long one."""
    with kept() as rounds:
        rounds.leases.add(A, LONG)
        rounds.leases.add(B, SHORT)
        rounds.until(A, B)


def test_empty_rounds_ask_nothing() -> None:
    """Without leases the store is asked for nothing, and the next lease is kept all the same."""
    with kept() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.until(A)
        rounds.leases.discard(A)
        rounds.leases.add(B, SHORT)
        assert all(renew.holds for renew in [rounds.until(B), rounds.until(B)])


def test_close_ends_the_thread() -> None:
    """After close there is no thread; closing twice is no mistake, and adding starts anew."""
    with kept() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.until(A)
        rounds.leases.close()
        rounds.leases.close()
        assert not renewers()
        rounds.leases.add(B, SHORT)
        rounds.until(B)
    assert not renewers()


def test_close_before_the_thread_has_begun() -> None:
    """A leases that is closed at once ends at once, however long its leases are."""
    for _ in range(100):
        with kept() as rounds:
            rounds.leases.add(A, timedelta(hours=1))
    assert not renewers()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # That is the point of it.
def test_fork() -> None:
    """After a fork the child keeps its own leases, by its own thread, and none of the parent's."""
    with kept() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.until(A)
        child = os.fork()
        if child == 0:
            rounds.leases.add(B, SHORT)
            rounds.until(B)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        rounds.until(A)


# Event loops


class AsyncRounds(Rounds):
    """What a leases of event loops asks for, in a thread."""

    def __init__(self, answer: Answer = nothing_lost) -> None:
        self._answer = answer
        self._asked = queue.SimpleQueue()
        self.leases: AsyncLeases = AsyncLeases(self._renew)

    async def come(self, *holds: Hold) -> Renew:
        """Wait for a round of exactly these holds, and let the loop go on meanwhile."""
        return await asyncio.to_thread(self.until, *holds)


@contextmanager
def kept_on_a_loop(answer: Answer = nothing_lost) -> Iterator[AsyncRounds]:
    rounds = AsyncRounds(answer)
    try:
        yield rounds
    finally:
        rounds.leases.close()


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop is taken for dead after two leases."""
    monkeypatch.setattr(leases, "LOOP_SILENCE", 2 * SHORT)
    monkeypatch.setattr(leases, "LOOP_SILENCE_LEASES", 1)


async def test_async_one_command_for_all() -> None:
    """All leases are renewed together, each at its own length, again and again, by one thread."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, LONG)
        assert dict((await rounds.come(A, B)).holds) == {A: SHORT, B: LONG}
        await rounds.come(A, B)
        assert len(renewers()) == 1


async def test_async_a_blocked_loop_keeps_its_leases() -> None:
    """Leases are renewed while a handler blocks the loop."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        for _ in range(2 * RENEWALS_PER_LEASE):
            rounds.until(A)  # This waits without giving the loop a turn.


@pytest.mark.usefixtures("short_silence")
async def test_async_a_dead_loop_loses_its_leases() -> None:
    """A loop that shows no life for long enough has its leases renewed no more; others are. It may come back."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        await asyncio.to_thread(rounds.leases.add, B, SHORT)  # A thread's, which shows life by nothing.
        rounds.until(A, B)
        rounds.until(B)
        rounds.until(B)
        await asyncio.sleep(0)
        await rounds.come(A, B)


@pytest.mark.usefixtures("short_silence")
async def test_async_a_loop_that_comes_back_hears_what_it_has_lost() -> None:
    """A loop that was taken for dead is told, when it comes back, of what another worker has taken meanwhile."""
    lost = asyncio.Event()
    taken: set[Hold] = set()
    with kept_on_a_loop(lambda renew: frozenset(dict(renew.holds).keys() & taken)) as rounds:
        rounds.leases.add(A, SHORT, lost.set)
        await asyncio.to_thread(rounds.leases.add, B, SHORT)
        rounds.until(B)
        taken.add(A)
        async with asyncio.timeout(SECONDS):
            await lost.wait()


@pytest.mark.usefixtures("short_silence")
async def test_async_a_loop_without_leases_shows_life_with_the_next() -> None:
    """A loop that had no lease for long is not dead: it has shown life by the next one."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.until(A)
        rounds.leases.discard(A)
        await asyncio.to_thread(rounds.leases.add, B, SHORT)
        for _ in range(3 * RENEWALS_PER_LEASE):
            rounds.until(B)
        rounds.leases.add(C, SHORT)
        rounds.until(B, C)


async def test_async_lost_holds_are_dropped() -> None:
    """A hold that is lost is renewed no more; the others are."""
    with kept_on_a_loop(lambda _: frozenset({A})) as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, SHORT)
        await rounds.come(B)


async def test_async_loser_is_told_once() -> None:
    """A worker that has lost its hold is told, once, on its loop; the others are told nothing."""
    told: list[tuple[str, threading.Thread]] = []
    with kept_on_a_loop(lambda _: frozenset({A})) as rounds:
        rounds.leases.add(A, SHORT, lambda: told.append(("a", threading.current_thread())))
        rounds.leases.add(B, SHORT, lambda: told.append(("b", threading.current_thread())))
        await rounds.come(B)
        await rounds.come(B)
    assert told == [("a", threading.current_thread())]


async def test_async_who_has_ended_is_not_told() -> None:
    """A hold that ends while it is renewed is found ended by its renewal: that is no loss, and nothing is told."""
    told: list[str] = []

    def ends(_renew: Renew) -> frozenset[Hold]:
        rounds.leases.discard(A)
        return frozenset({A})

    with kept_on_a_loop(ends) as rounds:
        rounds.leases.add(A, SHORT, lambda: told.append("a"))
        rounds.leases.add(B, SHORT)
        await rounds.come(B)
    assert not told


async def test_async_all_are_told_where_the_store_says_that_all_is_lost() -> None:
    """A store that knows that every hold is lost says so in any thread, and all are told at once, on their loop."""
    watchers: list[Callable[[], None]] = []
    told: list[str] = []
    last = asyncio.Event()
    leases = AsyncLeases(nothing_lost, watchers.append)
    (all_is_lost,) = watchers
    all_is_lost()  # Nothing is held yet.
    leases.add(A, LONG, lambda: told.append("a"))
    leases.add(B, LONG, last.set)
    await asyncio.to_thread(all_is_lost)
    async with asyncio.timeout(SECONDS):
        await last.wait()
    assert told == ["a"]
    leases.close()


def test_async_loop_that_has_ended_is_not_told() -> None:
    """A loop that has ended has no handler to stop."""
    watchers: list[Callable[[], None]] = []
    leases = AsyncLeases(nothing_lost, watchers.append)

    async def keep() -> None:
        leases.add(A, LONG)

    asyncio.run(keep())
    watchers[0]()
    leases.close()


async def test_async_finished_holds_are_dropped() -> None:
    """A hold that its handler has ended is left alone."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        rounds.leases.add(B, SHORT)
        rounds.leases.discard(A)
        rounds.leases.discard(A)
        await rounds.come(B)


async def test_async_store_failure_is_survived() -> None:
    """A round that fails is followed by the next."""
    with kept_on_a_loop(fails_once()) as rounds:
        rounds.leases.add(A, SHORT)
        await rounds.come(A)
        await rounds.come(A)


async def test_async_shorter_lease_is_renewed_in_time() -> None:
    """A short lease does not wait for the round of a long one."""
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, LONG)
        rounds.leases.add(B, SHORT)
        await rounds.come(A, B)


def test_async_loops_that_end_leave_their_leases() -> None:
    """What a loop had in flight when it ended is renewed no more: its handlers went with it."""
    with kept_on_a_loop() as rounds:

        async def add(hold: Hold) -> None:
            rounds.leases.add(hold, SHORT)
            await rounds.come(hold)

        asyncio.run(add(A))
        asyncio.run(add(B))


def test_async_several_loops_at_once() -> None:
    """Loops in several threads have their leases renewed together, and each is told of its own."""
    with kept_on_a_loop(lambda renew: frozenset({A}) if len(renew.holds) > 1 else frozenset()) as rounds:
        have_added = threading.Barrier(2)

        async def keep(hold: Hold, *, is_loser: bool) -> None:
            lost = asyncio.Event()
            rounds.leases.add(hold, SHORT, lost.set)
            await asyncio.to_thread(have_added.wait, SECONDS)
            if is_loser:
                await asyncio.wait_for(lost.wait(), SECONDS)
            else:
                await rounds.come(hold)
                assert not lost.is_set()

        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(asyncio.run, keep(hold, is_loser=hold is A)) for hold in (A, B)]
            for end in ends:
                end.result(SECONDS)


def test_async_a_loop_that_is_not_running_has_no_leases() -> None:
    """Between two runs of a loop its handlers can't go on, and their leases are not renewed; then they are again."""
    loop = asyncio.new_event_loop()
    with kept_on_a_loop() as rounds:

        async def add() -> None:
            rounds.leases.add(A, SHORT)
            await rounds.come(A)

        loop.run_until_complete(add())
        rounds.leases.add(B, SHORT)  # A thread's: this one has no loop now.
        rounds.until(B)
        rounds.until(B)
        loop.run_until_complete(rounds.come(A, B))
    loop.close()


async def test_async_the_thread_ends_where_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leases the thread ends by itself; the next lease starts another."""
    monkeypatch.setattr(leases, "IDLE_SECONDS", 0.01)
    with kept_on_a_loop() as rounds:
        rounds.leases.add(A, SHORT)
        [thread] = renewers()
        rounds.leases.discard(A)
        await asyncio.to_thread(thread.join, SECONDS)
        assert not renewers()
        rounds.leases.add(B, SHORT)
        await rounds.come(B)


# Greenlets


def test_eventlet_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where eventlet has replaced the threads, a guard can't be made: its error says which workers there are."""
    patcher = SimpleNamespace(is_monkey_patched=lambda name: name == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(ConfigurationError, match="gthread or gevent"):
        Leases(nothing_lost)


def test_a_profiler_of_locks_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that replaces ``threading.Lock`` by its own, as profilers of locks do, changes nothing for a guard."""
    real = threading.Lock
    monkeypatch.setattr(threading, "Lock", partial(real))
    guarded = idempotent(key="order", store="memory://", name="profiled", compare=None)(lambda order: "paid")
    assert [guarded(order=1) for _ in range(2)] == ["paid", "paid"]


def test_under_gevent_the_thread_is_the_systems() -> None:
    """Under gevent a lease is renewed while a greenlet gives no other a turn, and when a shorter one comes."""
    program = f"""
        from gevent import monkey; monkey.patch_all()
        import signal, sys; sys.path.insert(0, {str(ROOT)!r})
        from datetime import timedelta
        from semel.stores.leases import Leases
        from tests.stores.shared.test_leases import A, B, LONG, SHORT
        renewed, beside = [], []
        leases = Leases(lambda _: frozenset(), None, lambda: lambda renew: renewed.append(renew) or frozenset())
        leases.add(A, LONG)
        leases.add(B, SHORT, lambda: None)
        while len(renewed) < 3: signal.sigtimedwait((), 0.01)
        assert {{hold for hold, _ in renewed[-1].holds}} == {{A, B}}
        leases.discard(A)
        count = len(renewed)
        while len(renewed) < count + 2: signal.sigtimedwait((), 0.01)
        assert {{hold for hold, _ in renewed[-1].holds}} == {{B}}
        leases.close()
        count = len(renewed)
        signal.sigtimedwait((), 0.1)
        assert len(renewed) == count
        leases.add(A, SHORT)
        while len(renewed) == count: signal.sigtimedwait((), 0.01)
    """
    subprocess.run([sys.executable, "-c", dedent(program)], check=True, timeout=SECONDS)


def test_grace_after_an_outage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where renewals alone go on failing, other workers' keys are left alone for a moment only, and not for ever."""
    monkeypatch.setattr(leases, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(leases, "RETRY_SECONDS", 0.01)
    failed = threading.Semaphore(0)

    def renew(_: Renew) -> frozenset[Hold]:
        failed.release()
        raise StoreUnavailable("It is away.")

    kept = Leases(renew)
    kept.add(Hold("alice", "key", 1, b"t" * 16), timedelta(seconds=0.03))
    failed.acquire()
    failed.acquire()
    assert kept.is_outage_recent()
    for _ in range(200):
        failed.acquire()
        if not kept.is_outage_recent():
            break
    else:
        pytest.fail("It never ends.")
    kept.close()

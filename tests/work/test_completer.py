"""The completer: what was accepted is run at once and once, several at a time; what fails is tried again, or parked."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from semel.core.commands import Again, Claim, Command, Complete, FindStuck, ReadRequest, Release, Save, TakeOver
from semel.core.message import Head, Request
from semel.core.record import Hold, Stuck
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.core.upkeep import FIRST_PAUSE, MAX_ATTEMPTS, pause_after
from semel.errors import StoreUnavailable
from semel.flows.finish import FinishReport, finish_abandoned
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore
from semel.stores.step import Step
from semel.work import AsyncBacklog, AsyncCompleter, AsyncWorkers, Backlog, Completer, Workers
from semel.work.completer import Finished
from tests.work.world import CREATED, DAY, LONG, OVER, World

REQUEST = Request(Head("POST", "/reports", b"", ()), b"{}", "alice")
NEVER = timedelta(days=1)
HANG_SECONDS = 60


def accept(world: World, store: Store, key: str, **settings: Any) -> None:
    scope = settings.pop("scope", world.scope)
    claim = Claim(scope, key, uuid4().bytes, b"f", LONG, DAY, request=REQUEST, is_accepted=True, **settings)
    assert isinstance(store.perform(claim), Hold)


class App:
    """Runs operations as a middleware's ``finish`` does, and does with each what the test says."""

    def __init__(self, world: World, store: Store, *, lease: timedelta = LONG) -> None:
        self.world = world
        self.store = store
        self.lease = lease
        self.runs: list[str] = []
        self.handler: Callable[[Hold], int | None] = self.complete

    def finish(self, stuck: Stuck) -> Finished:
        claim = Claim(stuck.hold.scope, stuck.hold.key, uuid4().bytes, b"", self.lease, DAY)
        hold = self.store.perform(TakeOver(claim, stuck.hold, is_abandoned=True))
        if isinstance(hold, Again):
            return hold
        self.runs.append(hold.key)
        return self.handler(hold)

    def complete(self, hold: Hold) -> int:
        self.store.perform(Complete(hold, Event.COMPLETE, CREATED))
        return 201

    def give_up(self, hold: Hold) -> None:
        self.store.perform(Release(hold))


@pytest.fixture
def app(world: World, store: Store) -> App:
    return App(world, store)


def test_accepted_ones_are_run_at_once_and_once(world: World, store: Store, app: App) -> None:
    """What was accepted is run by the next look, the oldest first, and never again."""
    for number in range(3):
        accept(world, store, f"key-{number}")
    completer = Completer(store, app.finish)
    assert completer.run_once() == FinishReport(finished=3)
    assert app.runs == ["key-0", "key-1", "key-2"]
    assert completer.run_once() == FinishReport()
    assert set(world.states(store).values()) == {State.COMPLETE}


def test_scopes_take_turns(world: World, store: Store, app: App) -> None:
    """One tenant's backlog does not keep another's operation waiting: after one of the first, it is run."""
    for number in range(20):
        accept(world, store, f"backlog-{number:02}")
    accept(world, store, "other", scope="another tenant")
    assert Completer(store, app.finish).run_once() == FinishReport(finished=21)
    assert app.runs[1] == "other"


def test_backlog_larger_than_a_look(world: World, store: Store, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one tenant has more to do than one look finds."""
    monkeypatch.setattr("semel.work.completer.finish_abandoned", partial(finish_abandoned, limit=3))
    for number in range(6):
        accept(world, store, f"backlog-{number:02}")
    accept(world, store, "other", scope="another tenant")
    Completer(store, app.finish).run_once()
    assert len(app.runs) == 3
    assert app.runs[1] == "other"


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_newcomer_does_not_wait_for_the_backlog(world: World, store: Store, app: App, colour: str) -> None:
    """What is accepted while a backlog is run is found by the next look, which is not put off to the backlog's end."""
    for number in range(20):
        accept(world, store, f"backlog-{number:02}")

    def complete(hold: Hold) -> int:
        if len(app.runs) == 4:
            accept(world, store, "newcomer", scope="another tenant")
        return app.complete(hold)

    async def finish(stuck: Stuck) -> Finished:
        return app.finish(stuck)

    app.handler = complete
    always = timedelta(microseconds=1)
    async with world.open_async() as opened:
        completer = Completer(store, app.finish, backlog=Backlog(always))
        on_a_loop = AsyncCompleter(opened, finish, backlog=AsyncBacklog(always))
        while "newcomer" not in app.runs:
            _ = completer.run_once() if colour == "sync" else await on_a_loop.run_once()
    assert app.runs.index("newcomer") <= 5


def test_a_pause_after_each_try_that_fails(world: World, store: Store, app: App) -> None:
    """One that ends in vain is tried again after 10 s, then 20, 40 and so on; after the last it is parked."""
    app.handler = app.give_up
    accept(world, store, "key")
    completer = Completer(store, app.finish, max_attempts=3)
    for tries in range(1, 4):
        assert completer.run_once() == FinishReport(failed=1)
        assert len(app.runs) == tries
        assert completer.run_once() == FinishReport()
        world.age(pause_after(tries - 1) - timedelta(seconds=1))
        assert completer.run_once() == FinishReport()
        world.age(timedelta(seconds=1))
    assert completer.run_once() == FinishReport(parked=1)
    assert world.states(store) == {"key": State.UNKNOWN}


def test_those_that_pause_hide_no_others(world: World, store: Store, app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many operations pause after a try in vain, one that is accepted meanwhile is run by the next look."""
    monkeypatch.setattr("semel.work.completer.finish_abandoned", partial(finish_abandoned, limit=3))
    app.handler = app.give_up
    for number in range(6):
        accept(world, store, f"pausing-{number}")
    completer = Completer(store, app.finish)
    assert completer.run_once() == FinishReport(failed=3)
    assert completer.run_once() == FinishReport(failed=3)
    app.handler = app.complete
    accept(world, store, "new")
    assert completer.run_once() == FinishReport(finished=1)
    assert app.runs[-1] == "new"


async def test_one_that_can_not_be_run_holds_up_no_others(
    world: World, store: Store, app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong with one operation is said, and those that came after it are run all the same."""
    accept(world, store, "poison")
    accept(world, store, "key")

    def finish(stuck: Stuck) -> Finished:
        if stuck.hold.key == "poison":
            raise ValueError("What was stored can't be read.")
        return app.finish(stuck)

    async def afinish(stuck: Stuck) -> Finished:
        return finish(stuck)

    assert Completer(store, finish).run_once() == FinishReport(finished=1, failed=1)
    assert "What was stored can't be read." in caplog.text
    accept(world, store, "key-2")
    async with world.open_async() as opened:
        assert await AsyncCompleter(opened, afinish).run_once() == FinishReport(finished=1, failed=1)


def test_a_dead_worker_is_replaced_when_its_lease_is_over(world: World, store: Store) -> None:
    """What a dead worker was at is taken over as soon as its lease is over, with the steps that it has taken."""
    dead = App(world, store, lease=OVER)
    seen: list[int] = []

    def dies(hold: Hold) -> None:
        store.perform(Save(hold, Progress((Done("phase", "one", 1),))))

    def goes_on(hold: Hold) -> int:
        seen.append(hold.attempt)
        return dead.complete(hold)

    dead.handler = dies
    accept(world, store, "key")
    completer = Completer(store, dead.finish)
    assert completer.run_once() == FinishReport(failed=1)
    dead.handler = goes_on
    assert completer.run_once() == FinishReport(finished=1)
    assert seen == [2]


def test_a_dead_worker_where_the_policy_refuses(world: World, store: Store) -> None:
    """With on_crash="refuse" what a dead worker was at is parked; what was never begun is run."""
    app = App(world, store, lease=OVER)
    app.handler = lambda _: None
    accept(world, store, "key", on_crash="refuse")
    completer = Completer(store, app.finish)
    assert completer.run_once() == FinishReport(failed=1)
    assert completer.run_once() == FinishReport(parked=1)
    assert len(app.runs) == 1


def test_one_whose_client_may_come_back_waits(world: World, store: Store, app: App) -> None:
    """An ordinary operation is left to its client for ten seconds, however many accepted ones are run meanwhile."""
    claim = Claim(world.scope, "ordinary", uuid4().bytes, b"", OVER, DAY, request=REQUEST)
    store.perform(claim)
    accept(world, store, "accepted")
    completer = Completer(store, app.finish)
    assert completer.run_once() == FinishReport(finished=1)
    world.age(FIRST_PAUSE)
    assert completer.run_once() == FinishReport(finished=1)
    assert app.runs == ["accepted", "ordinary"]


class Watched(Store):
    """A store that counts what it is asked."""

    def __init__(self, store: Store) -> None:
        self.inner = store
        self.asked: list[type[Command[Any]]] = []
        self.error: Exception | None = None

    def perform(self, command: Command[Any]) -> Any:
        self.asked.append(type(command))
        if self.error is not None:
            raise self.error
        return self.inner.perform(command)

    def open(self) -> None: ...

    def migrate(self) -> list[str]:
        return []

    def close(self) -> None: ...


class Jobs:
    """Handlers that wait, each until the test lets it go."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.let_go: dict[str, threading.Event] = {}
        app.handler = self.handle

    def handle(self, hold: Hold) -> int:
        go = self.let_go.setdefault(hold.key, threading.Event())
        self.begun.put(hold.key)
        assert go.wait(HANG_SECONDS)
        return self.app.complete(hold)

    def wait(self) -> str:
        return self.begun.get(timeout=HANG_SECONDS)

    def end(self, key: str) -> None:
        self.let_go.setdefault(key, threading.Event()).set()


@contextmanager
def at_work(store: Store, finish: Callable[[Stuck], Finished], backlog: Backlog, many: int) -> Iterator[Workers]:
    workers = Workers([Completer(store, finish, backlog=backlog) for _ in range(many)])
    workers.start()
    try:
        yield workers
    finally:
        workers.stop()


def test_several_at_once(world: World, store: Store, app: App) -> None:
    """A long one occupies one of them; the others go on, begin each operation once, and wake when they are told."""
    jobs, backlog = Jobs(app), Backlog(NEVER)
    with closing(world.open()) as other, at_work(other, app.finish, backlog, 2):
        accept(world, store, "long")
        backlog.wake()
        assert jobs.wait() == "long"
        for number in range(5):
            accept(world, store, f"short-{number}")
            jobs.end(f"short-{number}")
        backlog.wake()
        assert [jobs.wait() for _ in range(5)] == [f"short-{number}" for number in range(5)]
        jobs.end("long")
    assert set(world.states(store).values()) == {State.COMPLETE}
    assert sorted(app.runs) == ["long", *(f"short-{number}" for number in range(5))]


def test_told_while_all_are_busy(world: World, store: Store, app: App) -> None:
    """What is accepted while all of them are at work is begun when the first of them has ended, and not later."""
    jobs, backlog = Jobs(app), Backlog(NEVER)
    with at_work(store, app.finish, backlog, 1):
        accept(world, store, "first")
        backlog.wake()
        assert jobs.wait() == "first"
        accept(world, store, "second")
        backlog.wake()
        jobs.end("second")
        jobs.end("first")
        assert jobs.wait() == "second"


def test_stopping_begins_nothing_new(world: World, store: Store, app: App) -> None:
    """Workers that are stopped while one is under way wait for it. What is behind it in the list is
    refused by its entry point, and not counted.
    """
    jobs, backlog = Jobs(app), Backlog(NEVER)
    for key in ("first", "second"):
        accept(world, store, key)
    closed = threading.Event()

    def finish(stuck: Stuck) -> Finished:
        return Again.AGAIN if closed.is_set() else app.finish(stuck)

    with at_work(store, finish, backlog, 1) as workers:
        assert jobs.wait() == "first"
        closed.set()
        stopping = threading.Thread(target=workers.stop)
        stopping.start()
        jobs.end("first")
        stopping.join(HANG_SECONDS)
        assert not stopping.is_alive()
    assert world.states(store) == {"first": State.COMPLETE, "second": State.PENDING}


def test_one_look_for_all(world: World, store: Store, app: App) -> None:
    """However many there are, one of them asks the store, and the others share what it found."""
    watched, backlog = Watched(store), Backlog(NEVER)
    completers = [Completer(watched, app.finish, backlog=backlog) for _ in range(4)]
    assert [each.run_once() for each in completers] == [FinishReport()] * 4
    assert watched.asked == [FindStuck]
    accept(world, store, "key")
    assert completers[1].run_once() == FinishReport(), "Nobody has said that there is something new."
    backlog.wake()
    assert completers[1].run_once() == FinishReport(finished=1)
    assert completers[2].run_once() == FinishReport(), "What another has taken is not there any more."
    assert watched.asked == [FindStuck, FindStuck]
    assert completers[1].run_once() == FinishReport(), "Whoever has looked may look again."
    assert watched.asked == [FindStuck] * 3


def test_a_store_in_trouble(world: World, store: Store, app: App) -> None:
    """A look that fails is reported by whoever looked, and the others do not repeat it at once."""
    watched, backlog = Watched(store), Backlog(NEVER)
    watched.error = StoreUnavailable("gone")
    one, other = (Completer(watched, app.finish, backlog=backlog) for _ in range(2))
    assert one.run_once().error is watched.error
    assert other.run_once() == FinishReport()
    assert watched.asked == [FindStuck]


def test_the_next_look(world: World, store: Store, app: App) -> None:
    """The next look is an interval after the last, whoever looked; what took longer than that is followed at once."""
    backlog = Backlog(timedelta(seconds=1000))
    one, other = (Completer(store, app.finish, backlog=backlog) for _ in range(2))
    assert one.interval == timedelta(seconds=1000)
    one.run_once()
    assert timedelta(0) < other.interval < timedelta(seconds=1000)
    late = Completer(store, app.finish, backlog=Backlog(timedelta(microseconds=1)))
    late.run_once()
    assert late.interval == timedelta(0)


def test_hints_of_other_processes(world: World, store: Store, app: App) -> None:
    """A hint that something was accepted, in whatever process, ends the pause; other hints do not."""
    heard: list[Callable[[str], None]] = []
    jobs, backlog = Jobs(app), Backlog(NEVER, heard.append)
    jobs.end("key")
    with at_work(store, app.finish, backlog, 2):
        while not heard:
            backlog.wakeup.wait(0, 0.01)
        before = backlog.wakeup.count
        heard[0]("0123456789abcdef")
        assert backlog.wakeup.count == before
        accept(world, store, "key")
        heard[0]("accepted")
        assert jobs.wait() == "key"
    assert len(heard) == 1


class AsyncApp:
    """The same on an event loop."""

    def __init__(self, world: World, store: AsyncStore) -> None:
        self.world = world
        self.store = store
        self.runs: list[str] = []
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.let_go: dict[str, asyncio.Event] = {}

    async def finish(self, stuck: Stuck) -> Finished:
        if await self.store.perform(ReadRequest(stuck.hold)) is None:
            return Again.AGAIN
        claim = Claim(self.world.scope, stuck.hold.key, uuid4().bytes, b"", LONG, DAY)
        hold = await self.store.perform(TakeOver(claim, stuck.hold, is_abandoned=True))
        if isinstance(hold, Again):
            return hold
        self.runs.append(hold.key)
        self.begun.put_nowait(hold.key)
        await self.event(hold.key).wait()
        await self.store.perform(Complete(hold, Event.COMPLETE, CREATED))
        return 201

    def event(self, key: str) -> asyncio.Event:
        return self.let_go.setdefault(key, asyncio.Event())

    async def wait(self) -> str:
        return await asyncio.wait_for(self.begun.get(), HANG_SECONDS)


async def test_async_several_at_once(world: World, store: Store) -> None:
    """On an event loop, too, a long one occupies one of them, and the others go on."""
    async with world.open_async() as opened:
        app, backlog = AsyncApp(world, opened), AsyncBacklog(NEVER)
        workers = AsyncWorkers([AsyncCompleter(opened, app.finish, backlog=backlog) for _ in range(3)])
        workers.start()
        accept(world, store, "long")
        backlog.wake()
        assert await app.wait() == "long"
        for number in range(5):
            accept(world, store, f"short-{number}")
            app.event(f"short-{number}").set()
        backlog.wake()
        assert sorted([await app.wait() for _ in range(5)]) == [f"short-{number}" for number in range(5)]
        app.event("long").set()
        await asyncio.wait_for(workers.stop(), HANG_SECONDS)
        assert len(app.runs) == 6
    assert set(world.states(store).values()) == {State.COMPLETE}


class AsyncWatched(AsyncMemoryStore):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[type[Command[Any]]] = []

    def perform(self, command: Command[Any]) -> Step[Any]:
        self.asked.append(type(command))
        return super().perform(command)


async def test_async_one_look_for_all() -> None:
    """On an event loop, too, one of them asks the store, though all of them wake at once."""

    async def finish(_stuck: Stuck) -> Finished:
        raise AssertionError

    heard: list[Callable[[str], None]] = []
    store, backlog = AsyncWatched(), AsyncBacklog(NEVER, heard.append)
    completers = [AsyncCompleter(store, finish, backlog=backlog) for _ in range(4)]
    assert await asyncio.gather(*(each.run_once() for each in completers)) == [FinishReport()] * 4
    assert store.asked == [FindStuck]
    heard[0]("accepted")
    heard[0]("another name")
    assert backlog.wakeup.count == 1
    await asyncio.gather(*(each.run_once() for each in completers))
    assert store.asked == [FindStuck, FindStuck]
    assert len(heard) == 1
    assert completers[0].interval <= NEVER


def test_the_same_on_another_loop() -> None:
    """Workers that were stopped with their loop can be started on another."""

    async def finish(_stuck: Stuck) -> Finished:
        raise AssertionError

    store, backlog = AsyncWatched(), AsyncBacklog(NEVER)
    completers = [AsyncCompleter(store, finish, backlog=backlog) for _ in range(2)]

    async def all_of_them() -> None:
        assert await asyncio.gather(*(each.run_once() for each in completers)) == [FinishReport()] * 2

    for _ in range(2):
        asyncio.run(all_of_them())
    assert store.asked == [FindStuck, FindStuck]


def test_most_attempts() -> None:
    """With its pauses, eight tries are about twenty minutes; then a person is better than another try."""
    assert sum((pause_after(tries) for tries in range(MAX_ATTEMPTS - 1)), timedelta()) == timedelta(seconds=1270)

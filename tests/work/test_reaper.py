"""The reaper: what it clears away, when, what it never touches, and two of them at once."""

from datetime import timedelta

import psycopg
import pytest

from semel.core.commands import Command, Complete, FindStuck, Look, Note, Park, ReadTrail, Reap, Renew, Verdict
from semel.core.state import Event, State
from semel.core.trail import NO_KEY
from semel.errors import StoreUnavailable
from semel.flows.upkeep import ReapReport
from semel.stores import store as open_store
from semel.stores.base import Store
from semel.work import AsyncReaper, Reaper
from tests.work.world import CREATED, DAY, LONG, OVER, World, postgres_world, race

EACH = 60
MINUTE = timedelta(minutes=1)


def counts(report: ReapReport) -> tuple[int, int, int]:
    assert report.error is None
    return report.deleted, report.stripped, report.abandoned


def test_gate_6_the_reaper_runs_and_respects_retention(world: World, store: Store) -> None:
    """A record is kept for its whole retention and gone after it; what is in flight or parked stays, however old."""
    world.finish(store, "a day", retention=DAY)
    world.finish(store, "two days", retention=2 * DAY)
    running = world.claim(store, "in flight", lease=9 * DAY, retention=DAY)
    store.perform(Park(world.claim(store, "parked", retention=DAY)))
    reaper = Reaper(store)
    everything = set(world.records(store))

    world.age(DAY - MINUTE)
    assert counts(reaper.run_once()) == (0, 0, 0)
    assert set(world.records(store)) == everything

    world.age(MINUTE)
    assert counts(reaper.run_once()) == (1, 0, 0)
    assert set(world.records(store)) == everything - {"a day"}

    world.age(DAY)
    assert counts(reaper.run_once()) == (1, 0, 0)
    assert set(world.records(store)) == {"in flight", "parked"}
    assert store.perform(Complete(running, Event.COMPLETE, CREATED)) is Verdict.DONE


def test_abandoned_becomes_failed_first(world: World, store: Store) -> None:
    """What nobody ended within its retention is failed with 408 in one run, and deleted in the next."""
    hold = world.claim(store, "abandoned", lease=OVER, retention=OVER)
    reaper = Reaper(store)
    assert counts(reaper.run_once()) == (0, 0, 1)
    record = store.perform(Look(world.scope, "abandoned"))
    assert record is not None
    assert record.answer is not None
    assert (record.state, record.answer.status) == (State.FAILED, 408)
    assert b"operation-abandoned" in (record.answer.body or b"")
    assert store.perform(FindStuck(10)) == ()
    assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.FENCED
    assert counts(reaper.run_once()) == (1, 0, 0)
    assert world.records(store) == {}
    trail = [line.event for line in store.perform(ReadTrail(world.scope, "abandoned"))]
    assert trail == ["abandoned"]


def test_tombstone_stays(world: World, store: Store) -> None:
    """Where a late retry is to be refused, the answer goes and its status stays, and it is not touched again."""
    world.finish(store, "late", retention=OVER, after_retention="strip")
    assert counts(Reaper(store).run_once()) == (0, 1, 0)
    assert counts(Reaper(store).run_once()) == (0, 0, 0)
    record = world.records(store)["late"]
    assert record.answer is not None
    assert (record.state, record.answer.status, record.answer.is_tombstone) == (State.COMPLETE, 201, True)


def test_trail_has_its_own_retention(world: World, store: Store) -> None:
    """The audit trail outlives the record it is about, and goes when it is old itself, or never."""
    hold = world.claim(store, "key")
    store.perform(Note(hold, "fenced"))
    store.perform(Complete(hold, Event.COMPLETE, CREATED))
    world.age(30 * DAY)
    assert Reaper(store, audit_retention=None).run_once() == ReapReport(deleted=1)
    assert [line.event for line in store.perform(ReadTrail(world.scope, "key"))] == ["fenced"]
    # That line is a month old; the reaper's own, which names no key, is of this moment.
    assert Reaper(store, audit_retention=30 * DAY).run_once() == ReapReport(audit_lines=1)
    assert store.perform(ReadTrail(world.scope, "key")) == ()
    assert store.perform(ReadTrail(NO_KEY, NO_KEY))[-1].detail == "1 deleted"


def test_many_batches(world: World, store: Store) -> None:
    """One run goes on until nothing is left, however small its batches."""
    for number in range(EACH):
        world.finish(store, f"key-{number}", retention=OVER)
    assert counts(Reaper(store, batch=7).run_once()) == (EACH, 0, 0)
    assert world.records(store) == {}


async def test_on_an_event_loop(world: World, store: Store) -> None:
    """An event loop's reaper does the same."""
    world.finish(store, "old", retention=OVER)
    world.finish(store, "young")
    async with world.open_async() as opened:
        reaper = AsyncReaper(opened, audit_retention=None)
        assert await reaper.run_once() == ReapReport(deleted=1)
        assert await reaper.run_once() == ReapReport()
    assert set(world.records(store)) == {"young"}


def test_two_reapers_at_once(world: World, store: Store) -> None:
    """Two reapers clear away all that is old, count each record once between them, and touch nothing in flight."""
    for number in range(EACH):
        world.finish(store, f"old-{number}", retention=OVER)
        world.finish(store, f"late-{number}", retention=OVER, after_retention="strip")
        world.finish(store, f"young-{number}")
    alive = [world.claim(store, f"alive-{number}", retention=OVER) for number in range(EACH)]

    def reaped(rival: Store) -> ReapReport:
        return Reaper(rival, batch=5, audit_retention=None).run_once()

    reports = race(world, reaped, reaped)
    assert [sum(each) for each in zip(*map(counts, reports), strict=True)] == [EACH, EACH, 0]
    wanted = {f"{name}-{number}" for name in ("late", "young", "alive") for number in range(EACH)}
    assert set(world.records(store)) == wanted
    assert [store.perform(Complete(hold, Event.COMPLETE, CREATED)) for hold in alive] == [Verdict.DONE] * EACH


def test_two_reapers_and_the_abandoned(world: World, store: Store) -> None:
    """What nobody ended is failed once and deleted once, whichever of two reapers does it."""
    for number in range(EACH):
        world.claim(store, f"abandoned-{number}", lease=OVER, retention=OVER)
    runs = [race(world, *[lambda rival: Reaper(rival, batch=5).run_once()] * 2) for _ in range(2)]
    total = [sum(each) for each in zip(*[counts(report) for reports in runs for report in reports], strict=True)]
    assert total == [EACH, 0, EACH]
    assert world.records(store) == {}


def test_reaper_against_a_worker_that_lives(world: World, store: Store) -> None:
    """A worker that renews its lease past retention is never reaped, however often it is tried."""
    holds = [world.claim(store, f"alive-{number}", retention=OVER) for number in range(EACH)]
    leases = tuple((hold, LONG) for hold in holds)

    def reap(rival: Store) -> int:
        return sum(sum(counts(Reaper(rival, batch=5).run_once())) for _ in range(10))

    def renew(rival: Store) -> int:
        return sum(len(rival.perform(Renew(leases))) for _ in range(10))

    assert race(world, reap, renew) == [0, 0]
    assert [store.perform(Complete(hold, Event.COMPLETE, CREATED)) for hold in holds] == [Verdict.DONE] * EACH


class Weak(Store):
    """A store that a batch of more than *strength* records is too much for."""

    def __init__(self, store: Store, strength: int) -> None:
        self.store = store
        self.strength = strength
        self.tried: list[int] = []

    def perform(self, command: Command) -> object:  # type: ignore[type-arg, override]  # of any command
        if isinstance(command, Reap):
            self.tried.append(command.limit)
            if command.limit > self.strength:
                raise StoreUnavailable("statement timeout", was_sent=True)
        return self.store.perform(command)

    def open(self) -> None: ...
    def migrate(self) -> list[str]:
        return []

    def close(self) -> None: ...


def test_batch_is_remembered(world: World, store: Store) -> None:
    """A reaper that has found how large a batch the store bears begins with it the next time."""
    for number in range(EACH):
        world.finish(store, f"key-{number}", retention=OVER)
    weak = Weak(store, 30)
    reaper = Reaper(weak, batch=100, audit_retention=None)
    assert reaper.run_once().deleted == EACH
    assert weak.tried[:4] == [100, 50, 25, 31]
    weak.tried.clear()
    reaper.run_once()
    assert weak.tried[0] < 50


def test_locked_rows_hold_up_nobody(postgres_url: str) -> None:
    """On PostgreSQL a record that a transaction of somebody's has locked is passed over, and reaped the next time."""
    world = postgres_world(postgres_url)
    with open_store(postgres_url) as store, psycopg.connect(postgres_url) as somebody:
        for number in range(3):
            world.finish(store, f"key-{number}", retention=OVER)
        somebody.execute("SELECT FROM semel_keys WHERE key = 'key-1' FOR UPDATE")
        assert counts(Reaper(store).run_once()) == (2, 0, 0)
        somebody.rollback()
        assert counts(Reaper(store).run_once()) == (1, 0, 0)


@pytest.mark.parametrize("batch", [1, 2])
def test_smallest_batches(world: World, store: Store, batch: int) -> None:
    """One record at a time is slow, and works."""
    for number in range(3):
        world.finish(store, f"key-{number}", retention=OVER)
    assert counts(Reaper(store, batch=batch).run_once()) == (3, 0, 0)

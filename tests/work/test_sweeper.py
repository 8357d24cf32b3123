"""The sweeper: what it frees, what it parks, what it leaves alone, and two of them at once."""

import logging
from uuid import uuid4

import pytest

from semel.core.commands import Claim, Complete, Park, ReadTrail, Renew, TakeOver, Verdict
from semel.core.record import NO_TOKEN, Hold
from semel.core.recovery import Begun, Done
from semel.core.state import Event, State
from semel.errors import StoreUnavailable
from semel.flows.upkeep import SweepReport
from semel.stores.base import Store
from semel.work import AsyncSweeper, Sweeper
from tests.work.world import CREATED, DAY, LONG, OVER, World, race

EACH = 40


def swept(store: Store) -> SweepReport:
    return Sweeper(store).run_once()


def test_dead_workers_key_is_freed(world: World, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A key whose worker died is nobody's, the trail and the log say so, and its worker can store nothing any more."""
    hold = world.claim(store, "dead", lease=OVER)
    with caplog.at_level(logging.WARNING, "semel"):
        assert Sweeper(store).run_once() == SweepReport(freed=1)
    record = world.records(store)["dead"]
    assert (record.state, record.attempt, record.token) == (State.PROCESSING, 1, NO_TOKEN)
    assert [line.event for line in store.perform(ReadTrail(world.scope, "dead"))] == ["swept"]
    assert "The worker of this key died" in caplog.text
    assert "dead" not in caplog.text
    assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.FENCED
    assert Sweeper(store).run_once() == SweepReport()


def test_live_worker_is_left_alone(world: World, store: Store) -> None:
    """A worker under a lease is not touched, nor one that has ended, nor one that is parked."""
    hold = world.claim(store, "alive")
    world.finish(store, "ended")
    store.perform(Park(world.claim(store, "parked")))
    before = world.records(store)
    assert Sweeper(store).run_once() == SweepReport()
    after = world.records(store)
    assert {key: (each.state, each.token) for key, each in after.items()} == {
        key: (each.state, each.token) for key, each in before.items()
    }
    assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE


def test_worker_that_lives_while_the_store_is_away(world: World, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that ran out while the store was away may be a live worker's. The first run that finds the store again
    leaves it to be renewed; the next sweeps what is still stuck.
    """
    alive, _dead = (world.claim(store, key, lease=OVER) for key in ("alive", "dead"))
    sweeper = Sweeper(store)

    def be_away(_command: object) -> None:
        raise StoreUnavailable("It is away.")

    with monkeypatch.context() as away:
        away.setattr(store, "perform", be_away)
        reports = [sweeper.run_once() for _ in range(2)]
    assert all(isinstance(report.error, StoreUnavailable) for report in reports)
    assert sweeper.run_once() == SweepReport()
    store.perform(Renew(((alive, LONG),)))
    assert sweeper.run_once() == SweepReport(freed=1)
    assert store.perform(Complete(alive, Event.COMPLETE, CREATED)) is Verdict.DONE


def test_what_may_not_run_again_is_parked(world: World, store: Store) -> None:
    """Where the policy refuses a second run, the operation is parked; with a recovery point, it is free to go on."""
    world.claim(store, "opaque", lease=OVER, on_crash="refuse")
    resumable = world.claim(store, "resumable", on_crash="refuse")
    world.save(store, resumable, Done("phase", "ride_created", 7), Begun("charge_created"))
    store.perform(Renew(((resumable, OVER),)))
    assert Sweeper(store).run_once() == SweepReport(freed=1, parked=1)
    assert world.states(store) == {"opaque": State.UNKNOWN, "resumable": State.PROCESSING}
    assert world.records(store)["resumable"].recovery_point == "ride_created"


def test_lease_is_judged_by_the_stores_clock(world: World, store: Store) -> None:
    """A worker is dead when its lease is over by the store's clock, and not a moment before."""
    world.claim(store, "key", lease=LONG)
    world.age(LONG / 2)
    assert Sweeper(store).run_once().freed == 0
    world.age(LONG / 2)
    assert Sweeper(store).run_once().freed == 1


async def test_on_an_event_loop(world: World, store: Store) -> None:
    """An event loop's sweeper does the same."""
    world.claim(store, "dead", lease=OVER)
    world.claim(store, "opaque", lease=OVER, on_crash="refuse")
    async with world.open_async() as opened:
        assert await AsyncSweeper(opened).run_once() == SweepReport(freed=1, parked=1)
        assert await AsyncSweeper(opened).run_once() == SweepReport()


def test_two_sweepers_at_once(world: World, store: Store) -> None:
    """Two sweepers free all that is stuck, count each record once between them, and touch nothing in flight."""
    for number in range(EACH):
        world.claim(store, f"dead-{number}", lease=OVER)
        world.claim(store, f"opaque-{number}", lease=OVER, on_crash="refuse")
    alive = [world.claim(store, f"alive-{number}") for number in range(EACH)]
    reports = race(world, swept, swept)
    assert sum(report.freed for report in reports) == EACH
    assert sum(report.parked for report in reports) == EACH
    records = world.records(store)
    for number in range(EACH):
        assert records[f"dead-{number}"].token == NO_TOKEN
        assert records[f"opaque-{number}"].state is State.UNKNOWN
    assert [store.perform(Complete(hold, Event.COMPLETE, CREATED)) for hold in alive] == [Verdict.DONE] * EACH


def test_sweeper_against_take_overs(world: World, store: Store) -> None:
    """A retry that takes a dead worker's key over at the same time keeps it: one of the two wins, and never both."""
    dead = [world.claim(store, f"dead-{number}", lease=OVER) for number in range(EACH)]

    def take(rival: Store) -> int:
        # From the other end, so that they meet in the middle.
        claims = [(Claim(hold.scope, hold.key, uuid4().bytes, b"f", LONG, DAY), hold) for hold in reversed(dead)]
        return sum(isinstance(rival.perform(TakeOver(claim, seen)), Hold) for claim, seen in claims)

    freed, taken = race(world, lambda rival: swept(rival).freed, take)
    assert freed + taken == EACH
    records = world.records(store)
    assert freed == sum(records[hold.key].token == NO_TOKEN for hold in dead)
    assert taken == sum(records[hold.key].attempt == 2 for hold in dead)

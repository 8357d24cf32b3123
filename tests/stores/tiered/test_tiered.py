"""What a tiered store keeps in front of its durable store, and what it leaves to it. Both colours; no Redis here."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from semel import stores
from semel.core.commands import (
    Begin,
    Browse,
    Claim,
    Command,
    Commit,
    Complete,
    Erase,
    Finish,
    Look,
    Now,
    Open,
    Park,
    Release,
    Resolution,
    Save,
    TakeOver,
    Undo,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.recovery import written as written_progress
from semel.core.state import Event, State
from semel.errors import NoConnection, StoreUnavailable
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.step import Step
from semel.stores.tiered import Tiered
from semel.stores.tiered import memory as memory_module
from semel.stores.tiered.store import AsyncTieredStore, TieredStore
from semel.testing.conformance import Handle, handle

T = TypeVar("T")


class MovableClock:
    """The system's clock, put forward now and then."""

    def __init__(self) -> None:
        self.ahead = timedelta(0)

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead  # noqa: TID251 - the memory store has no other

    def move(self, duration: timedelta) -> None:
        self.ahead += duration


LEASE = timedelta(minutes=30)
RETENTION = timedelta(hours=24)
CREATED = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')
RIDE = Progress((Done("phase", "ride_created", {"id": 7}),))


def claim_on(key: str = "key", **more: Any) -> Claim:
    return Claim("scope", key, uuid4().bytes, b"print", LEASE, more.pop("retention", RETENTION), **more)


class Counted(MemoryStore):
    """A durable store that says what it was asked."""

    def __init__(self) -> None:
        self.clock = MovableClock()
        super().__init__(clock=self.clock)
        self.asked: Counter[str] = Counter()
        self.begun = 0
        self.fails: Exception | None = None

    def act(self, command: Command[T], actor: str | None) -> T:
        self.asked[type(command).__name__] += 1
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return super().act(command, actor)

    def lock(self, claim: Claim) -> bytes | None:
        self.begun += 1
        return super().lock(claim)


class Failing(AsyncMemoryStore):
    """Raises as stores for an event loop do: to whoever waits."""

    def perform(self, command: Command[T]) -> Step[T]:
        try:
            return super().perform(command)
        except StoreUnavailable as error:
            step = Step[T](loop=asyncio.get_running_loop())
            step.settle(error)
            return step


class World:
    """A durable store, and any number of processes that keep answers in front of it."""

    def __init__(self, colour: str) -> None:
        self.durable = Counted()
        self._colour = colour
        self._handles: list[Handle] = []

    def process(self, memory: int = 1_000_000) -> Handle:
        store: Store | AsyncStore
        if self._colour == "threads":
            store = stores.store(Tiered(self.durable, memory=memory))
        else:
            store = stores.async_store(Tiered(Failing(memory=self.durable), memory=memory))
        self._handles.append(handle(store))
        return self._handles[-1]

    def asks(self, question: Callable[[], Any]) -> dict[str, int]:
        """Say what the durable store is asked meanwhile."""
        before = self.durable.asked.copy()
        question()
        return dict(self.durable.asked - before)

    def close(self) -> None:
        for each in self._handles:
            each.close()


@pytest.fixture(params=["threads", "loop"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


def held(store: Handle, claim: Claim) -> Hold:
    hold = store.perform(claim)
    assert isinstance(hold, Hold)
    return hold


def completed(store: Handle, key: str = "key", answer: Answer = CREATED) -> Hold:
    hold = held(store, claim_on(key))
    assert store.perform(Complete(hold, Event.COMPLETE, answer)) is Verdict.DONE
    return hold


def found(store: Handle, key: str = "key") -> Found:
    got = store.perform(claim_on(key))
    assert isinstance(got, Found)
    return got


class TestKept:
    """What is kept, and when."""

    def test_what_was_completed_here(self, world: World) -> None:
        """A process gives the answer that it has completed without asking the durable store, as that one would."""
        process = world.process()
        hold = completed(process)
        assert world.asks(lambda: found(process)) == {}
        kept = found(process)
        true = world.durable.perform(claim_on())
        assert isinstance(true, Found)
        assert replace(kept, retention_left=None) == replace(true, retention_left=None)
        assert kept.token == hold.token
        assert kept.retention_left is not None
        assert true.retention_left is not None
        assert timedelta(0) < kept.retention_left <= true.retention_left

    def test_what_was_found(self, world: World) -> None:
        """Another process asks the durable store once."""
        completed(world.process())
        other = world.process()
        assert world.asks(lambda: found(other)) == {"Claim": 1}
        assert world.asks(lambda: found(other)) == {}
        assert found(other).answer == CREATED

    @pytest.mark.parametrize("answer", [Answer(204), Answer(200, (), None)], ids=["empty", "tombstone"])
    def test_odd_answers(self, world: World, answer: Answer) -> None:
        """An empty answer and a tombstone are kept as what they are."""
        process = world.process()
        completed(process, answer=answer)
        assert world.asks(lambda: found(process)) == {}
        assert found(process).answer == answer

    def test_failures(self, world: World) -> None:
        """An operation that has failed has an answer, too."""
        process = world.process()
        hold = held(process, claim_on())
        process.perform(Complete(hold, Event.FAIL, Answer(500)))
        assert world.asks(lambda: found(process)) == {}
        assert found(process).state is State.FAILED

    def test_steps(self, world: World) -> None:
        """The steps that were taken are found with the answer, whichever way they were stored: once in the durable
        store, and kept from then on.
        """
        process = world.process()
        for key in ("saved", "committed"):
            hold = held(process, claim_on(key))
            if key == "saved":
                assert process.perform(Save(hold, RIDE)) is Verdict.DONE
            else:
                lent = process.transaction()
                lent.perform(Open())
                assert lent.perform(Commit(hold, RIDE)) is Verdict.DONE
            process.perform(Complete(hold, Event.COMPLETE, CREATED))
            assert world.asks(lambda key=key: found(process, key)) == {"Claim": 1}  # type: ignore[misc]
            assert world.asks(lambda key=key: found(process, key)) == {}  # type: ignore[misc]
            assert found(process, key).steps == written_progress(RIDE)

    def test_the_first_of_two_answers(self, world: World) -> None:
        """Of two answers under one hold the durable store keeps the first, and so does the process."""
        process = world.process()
        hold = completed(process)
        assert process.perform(Complete(hold, Event.COMPLETE, Answer(500))) is Verdict.DONE
        assert found(process).answer == CREATED

    def test_a_reply_that_was_lost(self, world: World) -> None:
        """An answer of which it was not known at first whether it was stored is kept when it is found."""
        process = world.process()
        hold = held(process, claim_on())
        world.durable.fails = StoreUnavailable("lost", was_sent=True)
        with pytest.raises(StoreUnavailable):
            process.perform(Complete(hold, Event.COMPLETE, Answer(500)))
        process.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        assert world.asks(lambda: found(process)) == {}
        assert found(process).answer == CREATED

    def test_a_key_of_another_scope(self, world: World) -> None:
        """The same key of somebody else is another key."""
        process = world.process()
        completed(process)
        assert isinstance(process.perform(replace(claim_on(), scope="another")), Hold)


class TestNotKept:
    """What is left to the durable store."""

    def test_what_has_not_ended(self, world: World) -> None:
        """An operation in progress, or parked, is the durable store's to judge each time."""
        process = world.process()
        hold = held(process, claim_on())
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        process.perform(Park(hold))
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        assert world.durable.perform(Resolution(hold, CREATED)) is Verdict.DONE
        assert found(process).answer == CREATED

    def test_what_was_fenced(self, world: World) -> None:
        """The answer of a worker that was taken over from is kept nowhere."""
        process, other = world.process(), world.process()
        zombie = held(process, claim_on())
        world.durable.clock.move(LEASE)
        heir = other.perform(TakeOver(claim_on(), zombie))
        assert isinstance(heir, Hold)
        assert process.perform(Complete(zombie, Event.COMPLETE, Answer(500))) is Verdict.FENCED
        assert found(process).state is State.PROCESSING
        other.perform(Complete(heir, Event.COMPLETE, CREATED))
        assert found(process).answer == CREATED

    def test_what_was_freed(self, world: World) -> None:
        """A key that was freed is free for the next."""
        process = world.process()
        hold = held(process, claim_on())
        assert process.perform(Release(hold)) is Verdict.DONE
        assert isinstance(process.perform(claim_on()), Hold)

    def test_whose_time_is_not_known(self, world: World) -> None:
        """After a take-over only the first claim knows when the record expires: its answer is kept when it is found."""
        process = world.process()
        dead = held(world.process(), claim_on())
        world.durable.clock.move(LEASE)
        heir = process.perform(TakeOver(claim_on(retention=9 * RETENTION), dead))
        assert isinstance(heir, Hold)
        process.perform(Complete(heir, Event.COMPLETE, CREATED))
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        left = found(process).retention_left
        assert left is not None
        assert left < RETENTION

    def test_a_record_in_place_of_one_that_expired(self, world: World) -> None:
        """The answer of a record that a take-over has made anew is kept when it is found."""
        process = world.process()
        old = completed(world.process())
        world.durable.clock.move(RETENTION)
        assert found(process).is_expired
        new = process.perform(TakeOver(claim_on(), old))
        assert isinstance(new, Hold)
        process.perform(Complete(new, Event.COMPLETE, Answer(200)))
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        assert world.asks(lambda: found(process)) == {}
        assert found(process).answer == Answer(200)

    def test_what_has_expired(self, world: World) -> None:
        """A record that is past its retention is found so, each time: it may be gone any moment."""
        completed(world.process())
        world.durable.clock.move(RETENTION)
        process = world.process()
        for _ in range(2):
            assert world.asks(lambda: found(process)) == {"Claim": 1}
            assert found(process).is_expired

    def test_what_is_accepted(self, world: World) -> None:
        """An operation that was accepted is in nobody's hands: its answer is kept when it is found."""
        process = world.process()
        claim = claim_on(is_accepted=True)
        seen = process.perform(claim)
        assert isinstance(seen, Hold)
        hold = process.perform(TakeOver(claim_on(), seen, is_abandoned=True))
        assert isinstance(hold, Hold)
        process.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        assert found(process).is_accepted
        assert world.asks(lambda: found(process)) == {}

    def test_other_questions(self, world: World) -> None:
        """Whoever looks, browses or asks for the time asks the durable store."""
        process = world.process()
        completed(process)
        questions: list[Command[Any]] = [Look("scope", "key"), Browse(9), Now()]
        asked = world.asks(lambda: [process.perform(each) for each in questions])
        assert asked == {"Look": 1, "Browse": 1, "Now": 1}

    def test_too_many_under_way(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of very many operations under way, the answers of the oldest are kept when they are found."""
        monkeypatch.setattr(memory_module, "MAX_IN_FLIGHT", 2)
        process = world.process()
        holds = [held(process, claim_on(str(number))) for number in range(3)]
        for hold in holds:
            process.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert world.asks(lambda: [found(process, str(number)) for number in range(3)]) == {"Claim": 1}

    def test_a_claim_that_fails(self, world: World) -> None:
        """A durable store that can't be reached says so."""
        process = world.process()
        world.durable.fails = StoreUnavailable("away", was_sent=False)
        with pytest.raises(StoreUnavailable, match="away"):
            process.perform(claim_on())


class TestTransactions:
    """Atomic mode."""

    def test_a_replay_opens_no_transaction(self, world: World) -> None:
        """A key whose answer is kept is found without a transaction; there is nothing to undo, and no connection."""
        process = world.process()
        completed(process)
        lent = process.transaction()
        got = lent.perform(Begin(claim_on()))
        assert isinstance(got, Found)
        assert got.answer == CREATED
        lent.perform(Undo())
        assert world.durable.begun == 0

    def test_what_was_finished_is_kept(self, world: World) -> None:
        """An answer that was committed with the handler's writes is kept, and found by claims, too."""
        process = world.process()
        lent, claim = process.transaction(), claim_on()
        hold = lent.perform(Begin(claim))
        assert isinstance(hold, Hold)
        assert lent.perform(Finish(claim, hold, None, Event.COMPLETE, CREATED)) is Verdict.DONE
        lent.perform(Undo())
        assert world.asks(lambda: found(process)) == {}
        assert world.asks(lambda: process.transaction().perform(Begin(claim_on()))) == {}
        assert found(process).answer == CREATED

    def test_what_was_found_is_kept(self, world: World) -> None:
        """An answer that a transaction has found is kept; the transaction is open until it is undone."""
        completed(world.process())
        process = world.process()
        lent = process.transaction()
        assert isinstance(lent.perform(Begin(claim_on())), Found)
        lent.perform(Undo())
        assert world.durable.begun == 1
        assert isinstance(process.transaction().perform(Begin(claim_on())), Found)
        assert world.durable.begun == 1

    def test_in_place_of_the_dead(self, world: World) -> None:
        """What took a dead worker's place has that one's time and fingerprint: it is kept when it is found."""
        dead = held(world.process(), claim_on())
        world.durable.clock.move(LEASE)
        process = world.process()
        lent, claim = process.transaction(), replace(claim_on(), fingerprint=b"another")
        lent.perform(Begin(claim))
        hold = Hold("scope", "key", 2, claim.token)
        assert lent.perform(Finish(claim, hold, dead, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert world.asks(lambda: found(process)) == {"Claim": 1}
        assert found(process).fingerprint == b"print"

    def test_undone(self, world: World) -> None:
        """What was undone is kept nowhere."""
        process = world.process()
        lent = process.transaction()
        assert isinstance(lent.perform(Begin(claim_on())), Hold)
        lent.perform(Undo())
        assert isinstance(process.perform(claim_on()), Hold)


def test_no_connection_without_a_transaction() -> None:
    """Where no transaction was opened, there is no connection to be had, and nothing to finish."""
    store = stores.store(Tiered(MemoryStore()))
    lent = store.transaction()
    with pytest.raises(NoConnection):
        _ = lent.connection
    lent.perform(Open())
    assert "memory://" in repr(lent.connection)


async def test_no_connection_without_a_transaction_on_a_loop() -> None:
    """The same on an event loop."""
    store = stores.async_store(Tiered(AsyncMemoryStore()))
    lent = store.transaction()
    with pytest.raises(NoConnection):
        _ = lent.connection
    await lent.perform(Open())
    assert "memory://" in repr(lent.connection)


@pytest.mark.parametrize("kind, ours", [(Store, TieredStore), (AsyncStore, AsyncTieredStore)])
def test_nothing_is_left_out(kind: type, ours: type) -> None:
    """Whatever a store can do, a tiered one does by itself or has the durable store do; what is new, too."""
    known = {name for name in vars(kind) if not name.startswith("_")}
    assert {name for name in known if getattr(ours, name) is getattr(kind, name)} == set()


def test_passes_on(sqlite_url: str) -> None:
    """Who acts, whether replays are noted, migrations, hints and the end are the durable store's."""
    store = stores.store(Tiered(f"{sqlite_url}?audit=replays"))
    assert isinstance(store, TieredStore)
    heard: list[Any] = []
    vars(store.durable).update(listen=heard.append, watch=heard.append)
    assert store.notes_replays
    store.actor = "somebody"
    assert store.durable.actor == store.actor == "somebody"
    assert store.migrate() != []
    assert store.migrate() == []
    with store:
        store.listen(heard.append)
        store.watch(heard.clear)
    assert heard == [heard.append, heard.clear]


async def test_cancelled_while_the_store_is_asked(sqlite_url: str) -> None:
    """A claim goes on behind a caller that is cancelled, and its outcome is there for whoever sees to the end."""
    async with stores.async_store(Tiered(sqlite_url)) as store:
        step = store.perform(claim_on())
        step.cancel()
        assert step.heir is not None
        assert isinstance(await step.heir, Hold)


def test_erased(world: World) -> None:
    """An erasure drops the answers of this process; a preview does not, and another process keeps its own copies."""
    here, there = world.process(), world.process()
    completed(here)
    found_by(here), found_by(there)
    here.perform(Erase("scope", 10, is_preview=True))
    assert found_by(here).answer == CREATED
    assert here.perform(Erase("scope", 10)).count == 1
    assert found_by(here).answer == Answer(201, (), None)
    assert found_by(there).answer == CREATED
    assert there.perform(Erase("scope", 10)).count == 0
    assert found_by(there).answer == Answer(201, (), None)


def test_an_erasure_that_fails(world: World) -> None:
    """An erasure that the durable store does not carry out is an error, and can be repeated."""
    here = world.process()
    completed(here)
    world.durable.fails = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        here.perform(Erase("scope", 10))
    assert here.perform(Erase("scope", 10)).count == 1


def found_by(store: Handle) -> Found:
    found = store.perform(claim_on())
    assert isinstance(found, Found)
    return found

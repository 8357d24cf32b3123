"""The relay's flow: what it claims, sends and writes back, and what a crash at any point leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import pytest

from semel.core.outbox import (
    Claimed,
    Delivered,
    Ending,
    Failed,
    Message,
    Rejected,
    Schedule,
    Unreachable,
    Verdict,
)
from semel.errors import CommitUnknown, StoreReadOnly, StoreUnavailable
from semel.flows.relay import MAX_RETRY_AFTER, SETTLE_PAUSES, RelayReport, relay
from semel.guard.running import run

HOUR = timedelta(hours=1)


class Died(BaseException):
    """The process is no more."""


def message(number: int, key: str | None = None, attempts: int = 0) -> Message:
    return Message(id=str(number), type="t", to="events", payload=b"", key=key, attempts=attempts)


class World:
    """A table, a broker, and the ports between them. A port may be where the process dies."""

    schedule = Schedule((HOUR, 2 * HOUR), jitter=0)

    def __init__(self, *messages: Message, dies_at: int | None = None, when: str = "before") -> None:
        self.table = {each.id: each for each in messages}
        self.taken: list[Message] = []
        self.arrived: list[str] = []
        self.written: list[Ending] = []
        self.reached: list[str | None] = []
        self.paused: list[timedelta] = []
        self.calls: list[str] = []
        self.answer: Callable[[Message], Verdict] = lambda _: Delivered()
        self.settle_errors: list[Exception] = []
        self.claim_error: Exception | None = None
        self.claims: list[Claimed] = []
        self.is_stopping = False
        self.keeps = True
        self.stops_after: int | None = None
        self.batch = 10
        self._dies_at, self._when = dies_at, when
        self._count = 0

    def _at(self, call: str, when: str) -> None:
        if when == "before":
            self.calls.append(call)
        if self._dies_at == len(self.calls) - 1 and self._when == when:
            raise Died

    async def claim(self, limit: int, *, aside: bool) -> Claimed:
        self._at(f"claim{' aside' if aside else ''}", "before")
        if self.claim_error is not None:
            raise self.claim_error
        if self.claims:
            claimed = self.claims.pop(0)
        else:
            found = tuple(self.table.values())[:limit]
            claimed = Claimed(found, None, len(found), 0)
        self.taken = list(claimed.messages)
        self._at("claim", "after")
        return claimed

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        self._at("publish", "before")
        verdicts = [self.answer(each) for each in messages]
        self.arrived += [each.id for each, verdict in zip(messages, verdicts, strict=True) if verdict == Delivered()]
        self._count += 1
        if self.stops_after == self._count:
            self.is_stopping = True
        self._at("publish", "after")
        return verdicts

    async def keep(self) -> bool:
        return self.keeps

    async def settle(self, endings: Sequence[Ending]) -> int:
        self._at("settle", "before")
        if self.settle_errors:
            raise self.settle_errors.pop(0)
        held = [each for each in endings if each.id in self.table]
        self.written += held
        for each in held:
            if each.ending != "released":
                self.table.pop(each.id)
        self._at("settle", "after")
        return len(held)

    async def free(self) -> None:
        self._at("free", "before")

    async def pause(self, duration: timedelta) -> None:
        self.paused.append(duration)

    def chance(self) -> float:
        return 0.5

    def note_reached(self, reason: str | None) -> None:
        self.reached.append(reason)
        if reason is not None:
            self.batch = 0

    def run(self) -> RelayReport:
        return run(relay, self, "events")


def endings(world: World) -> dict[str, str]:
    return {each.id: each.ending for each in world.written}


def test_all_is_sent() -> None:
    """Batch after batch, until nothing is left."""
    world = World(*(message(number) for number in range(25)))
    assert world.run() == RelayReport("events", sent=25)
    assert world.arrived == [str(number) for number in range(25)]
    assert world.reached == [None, None, None]


def test_nothing_to_do() -> None:
    """One look, and no word of it."""
    world = World()
    report = world.run()
    assert report.is_idle
    assert world.calls == ["free", "claim"]
    assert str(report) == "relayed to events: 0 sent, 0 to be tried again, 0 dead"


def test_a_crash_anywhere_loses_nothing() -> None:
    """Wherever the process dies, the next run sends all that was not written back: at least once, and none is lost."""
    whole = World(message(1, "k"), message(2, "k"), message(3))
    whole.run()
    assert len(whole.calls) == 6
    for step in range(len(whole.calls)):
        for when in ("before", "after"):
            world = World(message(1, "k"), message(2, "k"), message(3), dies_at=step, when=when)
            with suppress(Died):
                world.run()
            again = World(*world.table.values())
            again.run()
            arrived = world.arrived + again.arrived
            assert set(arrived) == {"1", "2", "3"}
            assert arrived.index("1") < arrived.index("2")
            assert again.table == {}


class TestVerdicts:
    def test_each_has_its_own(self) -> None:
        """One message of many that is rejected, or fails, does not touch the others."""
        verdicts: dict[str, Verdict] = {
            "1": Rejected("never"),
            "2": Failed("later"),
            "3": Failed("much later", 30 * HOUR),
        }
        world = World(*(message(number) for number in range(5)))
        world.answer = lambda each: verdicts.get(each.id, Delivered())
        report = world.run()
        assert (report.sent, report.dead, report.retried) == (2, 1, 2)
        assert endings(world) == {"0": "delivered", "1": "dead", "2": "failed", "3": "failed", "4": "delivered"}
        assert [each.pause for each in world.written] == [None, None, HOUR, MAX_RETRY_AFTER, None]
        assert [each.error for each in world.written] == [None, "never", "later", "much later", None]
        assert str(report) == "relayed to events: 2 sent, 2 to be tried again, 1 dead"

    def test_the_last_try(self) -> None:
        """After as many tries as the schedule has pauses, and one, it is dead."""
        world = World(message(1, attempts=1), message(2, attempts=2))
        world.answer = lambda _: Failed("full")
        world.run()
        assert endings(world) == {"1": "failed", "2": "dead"}
        assert world.written[0].pause == 2 * HOUR

    @pytest.mark.parametrize("verdict", [Rejected("no"), Failed("no"), Unreachable("no")])
    def test_it_stops_its_key(self, verdict: Verdict) -> None:
        """What comes after it under the same key is not sent, and handed back."""
        world = World(message(1, "k"), message(2, "k"), message(3, "k"), message(4, "other"))
        world.answer = lambda each: verdict if each.id == "2" else Delivered()
        world.batch = 4
        world.claims = [Claimed(tuple(world.table.values()), None, 4, 0), Claimed((), None, 0, 0)]
        world.run()
        assert world.arrived == ["1", "4"]
        assert endings(world)["3"] == "released"


class TestUnreachable:
    def test_it_ends_the_run(self) -> None:
        """The rest is handed back, no try is counted, and the destination is left alone."""
        world = World(message(1, "a"), message(2, "a"), message(3))
        world.answer = lambda _: Unreachable("down")
        report = world.run()
        assert report.unreachable == "down"
        assert set(endings(world).values()) == {"released"}
        assert world.reached == ["down"]
        assert world.calls.count("claim") == 1
        assert not report.is_idle
        assert str(report).endswith("it can't be reached: down")

    def test_one_that_has_confirmed_some(self) -> None:
        """What was confirmed is settled, and a destination that confirmed something is not left alone."""
        world = World(message(1), message(2))
        world.answer = lambda each: Delivered() if each.id == "1" else Unreachable("slow")
        world.claims = [Claimed(tuple(world.table.values()), None, 2, 0), Claimed((), None, 0, 0)]
        assert world.run().unreachable is None
        assert endings(world) == {"1": "delivered", "2": "released"}

    def test_left_alone(self) -> None:
        """While it is left alone, nothing is claimed."""
        world = World(message(1))
        world.batch = 0
        assert world.run().is_idle
        assert world.calls == ["free"]


class TestOthersOfTheKey:
    def test_set_aside(self) -> None:
        """Where all that was looked at waits for others, it is set aside, and the walk goes on."""
        world = World()
        world.batch = 2
        world.claims = [
            Claimed((), None, 2, 0),
            Claimed((), None, 2, 2),
            Claimed((message(3),), None, 1, 0),
            Claimed((), None, 0, 0),
        ]
        world.table = {"3": message(3)}
        assert world.run().sent == 1
        assert [each for each in world.calls if each.startswith("claim")] == [
            "claim",
            "claim aside",
            "claim aside",
            "claim",
        ]

    def test_all_in_flight(self) -> None:
        """Where none of it can be set aside, since other relays have it, the run ends."""
        world = World()
        world.batch = 2
        world.claims = [Claimed((), None, 2, 0), Claimed((), None, 2, 0)]
        assert world.run().is_idle


class TestStopping:
    def test_between_waves(self) -> None:
        """What is under way ends; what has not begun is handed back."""
        world = World(message(1, "k"), message(2, "k"))
        world.stops_after = 1
        report = world.run()
        assert (report.sent, report.released) == (1, 1)

    def test_the_lease_is_lost(self) -> None:
        """What another relay has taken meanwhile is that one's to send: the first wave was sent, and no other is."""
        world = World(message(1, "k"), message(2, "k"), message(3, "k"))
        world.keeps = False
        world.table = {}
        world.claims = [Claimed((message(1, "k"), message(2, "k"), message(3, "k")), None, 3, 0)]
        assert world.run() == RelayReport("events", sent=1, released=2, fenced=3)
        assert world.arrived == ["1"]

    def test_before_the_first(self) -> None:
        """Nothing is begun."""
        world = World(message(1))
        world.is_stopping = True
        assert world.run().is_idle
        assert "claim" not in world.calls

    def test_right_after_the_claim(self) -> None:
        """What was taken and not begun is handed back, and says nothing about the destination."""
        world = World(message(1))

        async def claim(limit: int, *, aside: bool) -> Claimed:
            world.is_stopping = True
            return await World.claim(world, limit, aside=aside)

        world.claim = claim  # type: ignore[method-assign]  # for this one
        report = world.run()
        assert report.released == 1
        assert world.reached == []


class TestStore:
    def test_down_before(self) -> None:
        """A store that can't be asked ends the run, which says why."""
        world = World(message(1))
        world.claim_error = StoreUnavailable("down")
        report = world.run()
        assert isinstance(report.error, StoreUnavailable)
        assert str(report).endswith("; down")
        assert not report.is_idle

    def test_down_after_sending(self) -> None:
        """What was sent is written back as soon as the store is there again."""
        world = World(message(1))
        world.settle_errors = [StoreUnavailable("down"), CommitUnknown("lost")]
        report = world.run()
        assert (report.sent, report.fenced, report.error) == (1, 0, None)
        assert world.paused == list(SETTLE_PAUSES[:2])

    def test_down_for_long(self) -> None:
        """The last try decides; whether another has the messages can't be known then."""
        world = World(message(1))
        world.settle_errors = [StoreUnavailable("down")] * 3
        assert world.run().sent == 1
        world = World(message(1))
        world.settle_errors = [StoreUnavailable("down")] * 4
        assert isinstance(world.run().error, StoreUnavailable)

    def test_read_only(self) -> None:
        """A store that can't be written is not tried again and again."""
        world = World(message(1))
        world.settle_errors = [StoreReadOnly("replica")]
        assert isinstance(world.run().error, StoreReadOnly)
        assert world.paused == []

    def test_fenced(self) -> None:
        """Messages that another relay has taken meanwhile are counted."""
        world = World(message(1), message(2))
        world.claims = [Claimed((message(1), message(2), message(9)), None, 3, 0)]
        report = world.run()
        assert report.fenced == 1
        assert "1 fenced" in str(report)

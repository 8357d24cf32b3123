"""The process dies before and after every step of a request. Then the client comes back: effects are counted."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from semel.core.commands import Command, Complete, Look, Note, ReadTrail
from semel.core.events import Fenced
from semel.core.handler import Answered, RunHandler, Streaming
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import OnCrash
from semel.core.replay import MARKER
from semel.flows.reply import PassOn, Reply, Send
from semel.flows.serve import serve
from tests.flows.shops import Shop
from tests.kit.crash import Crash, every_crash, stop
from tests.kit.ports import PORTS, Flow, NameScope, ReadBody, Tell
from tests.kit.ports import drive as run

LEASE = timedelta(seconds=30)
RETENTION = timedelta(hours=24)

#: What comes before it is nobody's business but this process's.
CLAIM_STEP = 2


class World:
    """One client with one key, the store, and a handler whose effects are counted."""

    def __init__(self, shop: Shop, policy: Policy, *, streams: bool = False) -> None:
        self.shop = shop
        self.policy = policy
        self.streams = streams
        self.effects: list[int] = []
        self.is_stored = False
        self.key = uuid4().hex

    def flow(self) -> Flow[Reply]:
        """A request of the client's, in a process that knows nothing of those before."""
        head = Head("POST", "/charges", b"", ((b"idempotency-key", self.key.encode()),))
        return serve(PORTS, head, self.policy, uuid4().bytes)

    def age(self, duration: timedelta) -> None:
        """Let time pass."""
        self.shop.age(self.key, duration)

    def request(self) -> Reply:
        return run(self.flow(), self.perform)

    def perform(self, command: Command[Any]) -> Any:
        match command:
            case NameScope():
                return "alice"
            case ReadBody():
                return b"{}"
            case Tell():
                return None
            case RunHandler():
                self.effects.append(command.hold.attempt)
                headers = ((b"content-type", b"text/plain"),)
                if self.streams:
                    return Streaming(200, headers)
                return Answered(Answer(201, headers, b"charge %d \xff" % len(self.effects)))
            case Complete():
                self.is_stored = True
            case _:
                pass
        return self.shop.store.perform(command)

    @property
    def is_half_way(self) -> bool:
        """Whether a handler ran, and nobody knows what came of it."""
        return bool(self.effects) and not self.is_stored


def status(reply: Reply) -> int:
    assert isinstance(reply, Send)
    return reply.answer.status


def assert_replayed(world: World, wanted: Reply) -> None:
    """From now on the answer is the same, byte for byte, and nothing runs."""
    effects = list(world.effects)
    assert isinstance(wanted, Send)
    for _ in range(2):
        reply = world.request()
        assert isinstance(reply, Send)
        headers = tuple(pair for pair in reply.answer.headers if pair != MARKER)
        assert Answer(reply.answer.status, headers, reply.answer.body) == Answer(
            wanted.answer.status, tuple(pair for pair in wanted.answer.headers if pair != MARKER), wanted.answer.body
        )
    assert world.effects == effects


def has_claimed(crash: Crash[World]) -> bool:
    """Whether the store knows of the request."""
    return crash.step > CLAIM_STEP or (crash.step == CLAIM_STEP and crash.when == "after")


def test_rerun(shop: Shop) -> None:
    """A crash anywhere costs no answer: one effect, or two where the handler had run and nobody could know."""
    policy = Policy(lease=LEASE)
    crashes = list(every_crash(lambda: World(shop, policy)))
    assert [type(crash.command).__name__ for crash in crashes[::2]] == [
        "NameScope",
        "ReadBody",
        "Claim",
        "RunHandler",
        "Complete",
    ]
    twice = []
    for crash in crashes:
        world = crash.world
        if world.is_half_way:
            twice.append(str(crash))
        wanted = 2 if world.is_half_way else 1
        world.age(LEASE)
        reply = world.request()
        assert status(reply) == 201, crash
        assert len(world.effects) == wanted, crash
        assert_replayed(world, reply)
    assert twice == ["died after RunHandler (step 3)", "died before Complete (step 4)"]


def test_refuse(shop: Shop) -> None:
    """With on_crash="refuse" no crash costs a second effect: what can't be known is refused, until it expires."""
    policy = Policy(lease=LEASE, retention=RETENTION, on_crash="refuse")
    for crash in every_crash(lambda: World(shop, policy)):
        world = crash.world
        before = len(world.effects)
        is_unknown = has_claimed(crash) and not world.is_stored
        world.age(LEASE)
        reply = world.request()
        assert status(reply) == (409 if is_unknown else 201), crash
        assert isinstance(reply, Send)
        assert (b"outcome-unknown" in (reply.answer.body or b"")) is is_unknown, crash
        assert len(world.effects) == (before if is_unknown else 1), crash
        assert_replayed(world, reply)
        # Nothing is stuck for ever: past its retention the key is as new.
        world.age(RETENTION)
        assert status(world.request()) == 201, crash


@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
def test_live_lease_is_waited_for(shop: Shop, on_crash: OnCrash) -> None:
    """Until a dead worker's lease is over, a retry is told to wait, and runs nothing."""
    policy = Policy(lease=LEASE, on_crash=on_crash)
    for crash in every_crash(lambda: World(shop, policy)):
        world = crash.world
        before = len(world.effects)
        is_running = has_claimed(crash) and not world.is_stored
        assert status(world.request()) == (409 if is_running else 201), crash
        assert len(world.effects) == (before if is_running else 1), crash


def test_stream(shop: Shop) -> None:
    """The same for an answer that can't be kept: its tombstone is stored before any of it leaves."""
    policy = Policy(lease=LEASE)
    for crash in every_crash(lambda: World(shop, policy, streams=True)):
        world = crash.world
        wanted, is_stored = (2 if world.is_half_way else 1), world.is_stored
        world.age(LEASE)
        reply = world.request()
        assert reply == PassOn() if not is_stored else status(reply) == 409, crash
        assert len(world.effects) == wanted, crash
        assert status(world.request()) == 409, crash
        assert len(world.effects) == wanted, crash


def test_crash_during_recovery(shop: Shop) -> None:
    """The retry dies too, at every step of its own: every handler that ran is accounted for, and one answer stays."""
    policy = Policy(lease=LEASE)
    seen = 0
    for crash in every_crash(lambda: World(shop, policy)):
        if crash.world.is_stored or not has_claimed(crash):
            continue
        for again in every_crash(lambda crash=crash: recovering(shop, policy, crash)):  # type: ignore[misc]
            world = again.world
            wanted = len(world.effects) + (0 if world.is_stored else 1)
            world.age(LEASE)
            reply = world.request()
            assert status(reply) == 201, (crash, again)
            assert len(world.effects) == wanted, (crash, again)
            assert_replayed(world, reply)
            seen += 1
    assert seen == 4 * 2 * len(["NameScope", "ReadBody", "Claim", "TakeOver", "Look", "RunHandler", "Complete"])


def recovering(shop: Shop, policy: Policy, crash: Crash[World]) -> World:
    """A world in which the first request has died at *crash*, a lease ago."""
    world = World(shop, policy)
    stop(world.flow(), world.perform, crash.step, crash.when)
    world.age(LEASE)
    return world


def test_zombie(shop: Shop) -> None:
    """A worker that was only asleep wakes up after its heir is done: it stores nothing, and says so."""
    world = World(shop, Policy(lease=LEASE))
    zombie = world.flow()
    command = zombie.send(None)
    while not isinstance(command, Complete):
        command = zombie.send(world.perform(command))
    world.age(LEASE)
    answer = world.request()
    PORTS.take_said()
    command = zombie.send(world.perform(command))
    assert isinstance(command, Look)
    command = zombie.send(world.perform(command))
    assert [type(said.happening) for said in PORTS.take_said()] == [Fenced]
    assert isinstance(command, Note)
    with pytest.raises(StopIteration) as end:
        zombie.send(world.perform(command))
    assert status(end.value.value) == 409
    assert world.effects == [1, 2]
    trail = [entry.event for entry in shop.store.perform(ReadTrail("alice", world.key))]
    assert trail == ["taken over", "fenced"]
    assert_replayed(world, answer)

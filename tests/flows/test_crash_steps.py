"""An operation of three steps: the process dies before and after everything it does, and again while it recovers."""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import count
from typing import Any

import pytest

from semel.core.commands import Command, Commit, Look, Open, ReadTrail, Unpark, Verdict
from semel.core.events import ParkedUnknown
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Hold, Record
from semel.core.recovery import Done, Progress, read_back
from semel.core.state import TERMINAL, State
from semel.errors import RecoveryPointLost
from semel.flows.reply import Reraise, Send
from semel.flows.steps import OnUnknown
from semel.operation import Operation
from semel.stores.sqlite import SQLiteStore
from tests.flows.shops import Shop
from tests.flows.world import LEASE, Handler, Provider, World, created
from tests.kit.crash import Death, Process, When, die, every_death

POLICY = Policy(lease=LEASE)
#: What is known of the steps is enough to go on, whatever the policy says of crashes; before the first, nothing is.
REFUSES = Policy(lease=LEASE, on_crash="refuse")

#: The commands of the whole operation, in their order.
BEFORE = ["NameScope", "ReadBody", "Claim"]
PHASE = ["Open", "CallInside", "Commit"]
EFFECT = ["Save", "CallOutside", "Save"]
INSIDE = [*PHASE, *EFFECT, *PHASE]
#: What comes before the claim is nobody's business but that process's.
CLAIMED = 2 * len(BEFORE) - 1


def on(choice: OnUnknown, *, last: str = "phase") -> Handler:
    """A handler of three steps: an order is written, it is charged, and a receipt is written or a mail is paid for."""

    def handler(world: World, operation: Operation) -> Answer:
        verify = world.provider.look_up if choice == "verify" else None

        def write(connection: object, entry: str) -> str:
            world.enter(connection, entry)
            return f"{entry} by attempt {operation.attempt}"

        order = operation.phase("order", write, "order")
        charge = operation.effect("charge", world.provider.charge, "card", verify=verify, on_unknown=choice)
        if last == "phase":
            end = operation.phase("receipt", write, "receipt")
        else:
            end = operation.effect("mail", world.provider.charge, "mail", verify=verify, on_unknown=choice)
        return created(order=order, charge=charge, end=end)

    return handler


def record_of(world: World) -> Record | None:
    return world.shop.store.perform(Look("alice", world.key))


def assert_ended(world: World, answer: Answer, where: object, *, last: str = "phase") -> None:
    """The operation is done, once; and from now on its answer is the same, and nothing runs."""
    assert answer.status == HTTPStatus.CREATED, (answer, where)
    calls = world.provider.calls
    assert [world.request() for _ in range(2)] == [answer] * 2, where
    assert world.provider.calls == calls, where
    assert world.entries == (["order", "receipt"] if last == "phase" else ["order"]), where
    assert world.provider.charged == (["card"] if last == "phase" else ["card", "mail"]), where
    record = record_of(world)
    assert record is not None
    assert record.state in TERMINAL, where


def never_twice(world: World, where: object) -> None:
    """At no time is there more of anything than one."""
    assert len(set(world.entries)) == len(world.entries), where
    assert all(len(made) <= 1 for made in world.provider.charges.values()), where


def boundaries(inside: list[str]) -> list[str]:
    """Every boundary of the operation, in the order they are passed."""
    names = [f"{when} {name}" for name in BEFORE for when in ("before", "after")]
    names += ["before RunHandler", *(f"{when} {name}" for name in inside for when in ("before", "after"))]
    return [*names, "after RunHandler", "before Complete", "after Complete"]


def dying(make: Callable[[], World], *, times: int) -> Iterator[tuple[str, Death[World]]]:
    """Die at every boundary; and again at every boundary of the recovery, a lease later.

    To die after one command leaves the same world as to die before the next. In memory both are tried in every pair; on
    a real database the first is enough.
    """
    for death in every_death(make):
        if times == 1:
            yield str(death), death
        elif counts(death):

            def once_dead(boundary: int = death.boundary) -> World:
                world = make()
                assert die(world, boundary)
                world.age()
                return world

            for again in every_death(once_dead):
                if counts(again):
                    yield f"{death}, then {again}", again


def counts(death: Death[World]) -> bool:
    """Whether a death is one of a pair. Before its claim a process changes nothing: it leaves what it found."""
    return death.boundary >= CLAIMED and (death.world.shop.is_quick or death.place.startswith("after"))


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("last", ["phase", "effect"])
def test_provider_that_honours_keys(shop: Shop, times: int, last: str) -> None:
    """With a provider that knows its keys every step takes effect exactly once, wherever the process dies."""
    called_twice = set()
    seen = 0
    for where, death in dying(lambda: World(shop, POLICY, on("retry", last=last)), times=times):
        world = death.world
        never_twice(world, where)
        world.age()
        assert_ended(world, world.request(), where, last=last)
        if world.provider.calls > len(world.provider.charged):
            called_twice.add(death.place)
        seen += 1
    # The provider was called again where nobody could know: the key it was called with is what kept that harmless.
    assert "after CallOutside" in called_twice
    if times == 1:
        assert seen == len(boundaries([*PHASE, *EFFECT, *(PHASE if last == "phase" else EFFECT)]))


def test_every_boundary_is_reached(shop: Shop) -> None:
    """The process dies before and after every command, of the request and of each of its steps."""
    places = [death.place for death in every_death(lambda: World(shop, POLICY, on("retry")))]
    assert places == boundaries(INSIDE)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_provider_that_can_be_asked(shop: Shop, times: int) -> None:
    """A provider that knows no keys but can be asked is never called for what it has done: exactly once again."""
    for where, death in dying(lambda: World(shop, POLICY, on("verify"), Provider(honours_keys=False)), times=times):
        world = death.world
        never_twice(world, where)
        world.age()
        assert_ended(world, world.request(), where)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_provider_that_can_not_be_asked(shop: Shop, times: int) -> None:
    """Of a provider that can't be asked nobody knows: the operation is parked and told of, never charged twice."""
    parked = set()
    for where, death in dying(lambda: World(shop, POLICY, on("park"), Provider(honours_keys=False)), times=times):
        world = death.world
        world.age()
        answer = world.request()
        never_twice(world, where)
        if answer.status == HTTPStatus.CONFLICT:
            parked.add(death.place)
            assert_parked(world, answer, where)
            resolve(world)
            answer = world.request()
        assert_ended(world, answer, where)
    if times == 1:
        assert parked == {"after Save", "before CallOutside", "after CallOutside", "before Save"}
    else:
        # The second process died when it had parked the operation, and before it had said so.
        assert parked >= {"after Park", "after Tell"}


def assert_parked(world: World, answer: Answer, where: object) -> None:
    """The operation waits for an operator, who was told; a retry changes nothing."""
    calls = world.provider.calls
    assert b"outcome-unknown" in (answer.body or b""), where
    assert world.request() == answer, where
    assert world.provider.calls == calls, where
    record = record_of(world)
    assert record is not None
    assert (record.state, record.recovery_point) == (State.UNKNOWN, "order"), where
    trail = [entry.event for entry in world.shop.store.perform(ReadTrail("alice", world.key))]
    assert trail.count("parked") == 1, where
    told = [each for each in world.told if isinstance(each, ParkedUnknown)]
    # A process that dies right after it has parked tells nobody; the record and its trail do.
    assert told or "Park" in str(where) or "before Tell" in str(where), where


def resolve(world: World) -> None:
    """The operator asks the provider on the telephone, and says what it did."""
    record = record_of(world)
    assert record is not None
    progress = read_back(record.steps)
    charged = world.provider.charged
    known = progress.plus(Done("effect", "charge", "card charged 1")) if charged else progress.without_unknown()
    hold = Hold("alice", world.key, record.attempt, record.token)
    assert world.shop.store.perform(Unpark(hold, known)) is Verdict.DONE


def test_refuse_goes_on_from_a_recovery_point(shop: Shop) -> None:
    """With on_crash="refuse" an operation is refused before its first step; from then on it is known, and goes on."""
    refused = []
    for death in every_death(lambda: World(shop, REFUSES, on("retry"))):
        world = death.world
        world.age()
        answer = world.request()
        if answer.status == HTTPStatus.CONFLICT:
            refused.append(death.place)
            assert b"outcome-unknown" in (answer.body or b"")
            assert (world.entries, world.provider.calls) == ([], 0), death
        else:
            assert_ended(world, answer, death)
    assert (refused[0], refused[-1]) == ("after Claim", "before Commit")


def test_lease_that_is_not_over_is_waited_for(shop: Shop) -> None:
    """Until the dead worker's lease is over, a retry runs no step of it."""
    for death in every_death(lambda: World(shop, POLICY, on("retry"))):
        world = death.world
        is_running = death.boundary >= CLAIMED and death.place != "after Complete"
        before = world.entries, world.provider.calls
        answer = world.request()
        if is_running:
            assert answer.status == HTTPStatus.CONFLICT, death
            assert (world.entries, world.provider.calls) == before, death
        else:
            assert_ended(world, answer, death)


def test_new_code_meets_old_steps(shop: Shop) -> None:
    """Code that takes other steps than the record holds is a loud error that runs nothing; the old code goes on."""
    old = on("retry")

    def new(world: World, operation: Operation) -> Answer:
        operation.phase("invoice", lambda connection: world.enter(connection, "invoice"))
        return created()

    for death in every_death(lambda: World(shop, POLICY, old)):
        world = death.world
        record = record_of(world)
        if record is None or record.steps is None or record.state in TERMINAL:
            continue
        world.age()
        world.handler = new
        reply = world.live(Process())
        assert isinstance(reply, Reraise), death
        assert isinstance(reply.error, RecoveryPointLost), death
        assert "invoice" not in world.entries
        world.handler = old
        assert_ended(world, world.request(), death)


# A worker that was only asleep


class SleepingProcess(Process):
    """A process that does not die at a boundary, but sleeps there while others go on."""

    def __init__(self, place: str | int, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._place = place
        self._meanwhile = meanwhile
        self._passed = count()
        self.has_slept = False

    def _pass(self, when: When, command: Command[Any]) -> None:
        here = {next(self._passed), f"{when} {type(command).__name__}"}
        if self._place in here and not self.has_slept:
            self.has_slept = True
            self._meanwhile()


def is_in_a_phase(boundary: int) -> bool:
    """Whether a transaction of a phase is open here."""
    return boundaries(INSIDE)[boundary] in {"after Open", "before CallInside", "after CallInside", "before Commit"}


def test_zombie(shop: Shop) -> None:
    """A worker that wakes up after its heir is done commits no step and no answer, wherever it had fallen asleep."""
    for boundary in range(CLAIMED, len(boundaries(INSIDE)) - 1):
        # There is one writer at a time in SQLite. If that is the one who sleeps, nobody can be its heir meanwhile.
        if not (isinstance(shop.store, SQLiteStore) and is_in_a_phase(boundary)):
            fall_asleep(World(shop, POLICY, on("retry")), boundary)


def fall_asleep(world: World, boundary: int) -> None:
    """A worker sleeps at *boundary* until its heir is done."""

    def finish() -> None:
        world.age()
        assert world.request().status == HTTPStatus.CREATED, boundary

    process = SleepingProcess(boundary, finish)
    reply = world.live(process)
    assert process.has_slept, boundary
    assert isinstance(reply, Send), boundary
    assert reply.answer.status == HTTPStatus.CONFLICT, boundary
    assert b"in-progress" in (reply.answer.body or b""), boundary
    trail = [entry.event for entry in world.shop.store.perform(ReadTrail("alice", world.key))]
    assert trail[-1] in {"stopped", "fenced"}, boundary
    # Both have called the provider only where the intent was stored and the result was not: the first refused write
    # stops the one who slept.
    places = boundaries(INSIDE)
    intent = places.index("after Save")
    result = places.index("after Save", intent + 1)
    assert world.provider.calls == (2 if intent <= boundary < result else 1), boundary
    assert_ended(world, world.request(), boundary)


def test_last_step_of_a_slow_worker(shop: Shop) -> None:
    """A step that a slow worker commits between its heir's look and the take-over is not taken a second time."""
    world = World(shop, POLICY, on("retry"))
    assert die(world, CLAIMED)
    world.age()
    record = record_of(world)
    assert record is not None
    hold = Hold("alice", world.key, record.attempt, record.token)

    def commit() -> None:
        transaction = shop.store.transaction()
        transaction.perform(Open())
        world.enter(transaction.connection, "order")
        done = Done("phase", "order", "order by the slow one")
        assert transaction.perform(Commit(hold, Progress((done,)))) is Verdict.DONE

    heir = SleepingProcess("before TakeOver", commit)
    reply = world.live(heir)
    assert heir.has_slept
    assert isinstance(reply, Send)
    assert b"order by the slow one" in (reply.answer.body or b"")
    assert_ended(world, reply.answer, "slow")

"""An accepted operation: whoever accepts it dies anywhere, and so does every worker. It is run all the same."""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import pytest

from semel.core.commands import Again, Command, FindStuck, Look, ReadRequest
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Stuck
from semel.core.replay import MARKER
from semel.core.state import TERMINAL, State
from semel.core.status import name_below
from semel.flows.finish import finish, finish_abandoned
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from semel.flows.status import status
from semel.operation import Operation
from tests.flows.shops import Shop
from tests.flows.world import LEASE, Entry, World, created
from tests.kit.crash import Death, Process, die, every_death
from tests.kit.ports import PORTS, FinishOne, Tell
from tests.kit.ports import drive as run

POLICY = Policy(lease=LEASE, in_progress="accept")
PATH = "/operations"

ACCEPTING = ["NameScope", "ReadBody", "Claim", "Look"]
PHASE = ["Open", "CallInside", "Commit"]
EFFECT = ["Save", "CallOutside", "Save"]


def order(world: World, operation: Operation) -> Answer:
    """Write an order, charge for it, and write a receipt."""

    def write(connection: object, entry: str) -> str:
        world.enter(connection, entry)
        return entry

    operation.phase("order", write, "order")
    operation.effect("charge", world.provider.charge, "card")
    operation.phase("receipt", write, "receipt")
    return created(order="order")


class Accepting(World):
    """One client with one key, whose requests are accepted, and the workers that run them."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop, POLICY, order)

    def live(self, process: Process) -> Reply:
        """One request, in a process that knows nothing of those before."""
        head = Head("POST", "/orders", b"", ((b"idempotency-key", self.key.encode()),))
        flow = serve(PORTS, head, self.policy, uuid4().bytes, status_path=PATH)
        return run(flow, process.performing(Entry(self, process).perform))

    def work(self, process: Process) -> None:
        """One round of a worker."""

        def finish_one(stuck: Stuck) -> int | Again | None:
            if self.shop.store.perform(ReadRequest(stuck.hold)) is None:
                return Again.AGAIN
            reply = run(
                finish(PORTS, stuck, self.policy, uuid4().bytes), process.performing(Entry(self, process).perform)
            )
            return reply.answer.status if isinstance(reply, Send) else Again.AGAIN

        def perform(command: Command[Any]) -> Any:
            match command:
                case FindStuck():
                    # What other worlds in the same store have left is no business of this one's.
                    return tuple(each for each in self.shop.store.perform(command) if each.hold.key == self.key)
                case FinishOne(stuck):
                    return finish_one(stuck)
                case Tell(happening):
                    return self.told.append(happening)
                case _:
                    return self.shop.store.perform(command)

        run(finish_abandoned(PORTS), process.performing(perform))

    def state(self, where: str) -> Answer:
        """What the client gets at the address that it was given."""
        name = name_below(PATH, where)
        assert name is not None
        flow = status(PORTS, Head("GET", where, b"", ()), name, self.policy, PATH)
        return run(flow, Entry(self, Process()).perform).answer


class Working(Accepting):
    """The same, when its request was accepted, and a worker is what dies."""

    def __init__(self, shop: Shop) -> None:
        super().__init__(shop)
        self.accepted = self.request()

    def live(self, process: Process) -> Any:
        return self.work(process) if hasattr(self, "accepted") else super().live(process)

    def request(self) -> Answer:
        """A request in a process that does not die."""
        reply = Accepting.live(self, Process())
        assert isinstance(reply, Send)
        headers = tuple(pair for pair in reply.answer.headers if pair != MARKER)
        return Answer(reply.answer.status, headers, reply.answer.body)


def location(answer: Answer) -> str:
    return dict(answer.headers)[b"location"].decode()


def assert_run_once(world: Accepting, where: object) -> None:
    """Each of its steps was taken once, and whoever asks, by whatever address, gets the one answer."""
    answer = world.request()
    assert answer.status == HTTPStatus.CREATED, where
    assert world.entries == ["order", "receipt"], where
    assert world.provider.charged == ["card"], where
    world.work(Process())
    assert world.request() == answer, where
    assert world.entries == ["order", "receipt"], where


def test_accepting(shop: Shop) -> None:
    """Wherever the process dies that accepts it: a retry is told the same address, and a worker runs it, once."""
    places = []
    for death in every_death(lambda: Accepting(shop)):
        world = death.world
        places.append(death.place)
        # What was stored is promised; what was not, nobody was told of.
        is_stored = world.shop.store.perform(Look("alice", world.key)) is not None
        assert is_stored == (len(places) > 2 * ACCEPTING.index("Claim") + 1), death
        told = world.request()
        assert told.status == HTTPStatus.ACCEPTED, death
        assert world.request() == told, death
        assert world.entries == [], death
        world.work(Process())
        assert_run_once(world, death)
        assert world.state(location(told)).body == world.request().body, death
    assert places == [f"{when} {name}" for name in ACCEPTING for when in ("before", "after")]


def test_nobody_comes_back(shop: Shop) -> None:
    """Once it is stored it is run, though its client was never told, and asks no more."""
    for death in every_death(lambda: Accepting(shop)):
        world = death.world
        is_stored = world.shop.store.perform(Look("alice", world.key)) is not None
        world.work(Process())
        assert world.entries == (["order", "receipt"] if is_stored else []), death


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_working(shop: Shop, times: int) -> None:
    """Wherever a worker dies, and the next one too: another takes over after the lease, and repeats no step."""
    places = set()
    for where, death in dying(shop, times):
        world = death.world
        places.add(death.place)
        # Time passes in a database when its records are made older, and with that their addresses change.
        has_address = shop.is_quick or times == 1
        record = world.shop.store.perform(Look("alice", world.key))
        assert record is not None, where
        assert record.is_accepted, where
        if record.state not in TERMINAL:
            if has_address:  # Whatever its workers do, its client is told the same.
                assert location(world.request()) == location(world.accepted), where
                assert world.state(location(world.accepted)).status == HTTPStatus.ACCEPTED, where
            world.age()
            has_address = shop.is_quick
            world.work(Process())
        assert_run_once(world, where)
        if has_address:
            assert world.state(location(world.accepted)).status == HTTPStatus.CREATED, where
    names = {"FindStuck", "FinishOne", "TakeOver", "RunHandler", *PHASE, *EFFECT, "Complete", "Tell"}
    if times == 1:
        assert places == {f"{when} {name}" for name in names for when in ("before", "after")}
    else:
        assert {"after TakeOver", "after Commit", "after CallOutside", "after Complete"} <= places


def test_lease_of_a_dead_worker_is_waited_for(shop: Shop) -> None:
    """Until it is over no other begins; and a pending one has none to wait for."""
    for death in every_death(lambda: Working(shop)):
        world = death.world
        record = world.shop.store.perform(Look("alice", world.key))
        assert record is not None
        before = world.entries
        world.work(Process())
        if record.state is State.PENDING:
            assert_run_once(world, death)
        else:
            assert world.entries == before, death


def dying(shop: Shop, times: int) -> Iterator[tuple[str, Death[Working]]]:
    """Let workers die at every boundary; and those that take over, a lease later, at every boundary of theirs."""
    for death in every_death(lambda: Working(shop)):
        if times == 1:
            yield str(death), death
        elif shop.is_quick or death.place in {"after TakeOver", "after Commit", "after CallOutside"}:

            def once_dead(boundary: int = death.boundary) -> Working:
                world = Working(shop)
                assert die(world, boundary)
                world.age()
                return world

            for again in every_death(once_dead):
                if shop.is_quick or again.place.startswith("after"):
                    yield f"{death}, then {again}", again

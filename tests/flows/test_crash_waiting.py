"""A duplicate that waits dies anywhere: it held nothing, so nothing is lost and nothing is run twice by it."""

from http import HTTPStatus
from typing import Any
from uuid import uuid4

import pytest

from semel.core.commands import Again, Command, Complete
from semel.core.handler import Wait
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.replay import MARKER
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from semel.operation import Operation
from tests.flows.shops import Shop
from tests.flows.world import LEASE, Entry, World, created
from tests.kit.crash import Process, every_death
from tests.kit.ports import PORTS, Announce
from tests.kit.ports import drive as run

POLICY = Policy(lease=LEASE, in_progress="wait")

WAITING = ["NameScope", "ReadBody", "Claim", "Wait", "Claim"]


def order(world: World, operation: Operation) -> Answer:
    """Write an order, in one phase."""
    operation.phase("order", world.enter, "order")
    return created(order="order")


class Waiting(World):
    """A client whose first request is under way when it sends the second; which ends meanwhile, or dies."""

    def __init__(self, shop: Shop, *, first_dies: bool) -> None:
        super().__init__(shop, POLICY, order)
        self._first_dies = first_dies
        head = Head("POST", "/orders", b"", ((b"idempotency-key", self.key.encode()),))
        self._entry = Entry(self, Process())
        self._first = serve(PORTS, head, self.policy, uuid4().bytes)
        command = self._first.send(None)
        while not isinstance(command, Complete):
            command = self._first.send(self._entry.perform(command))
        self._storing: Complete | None = command

    def live(self, process: Process) -> Reply:
        """Another request, in a process that knows nothing of those before."""
        head = Head("POST", "/orders", b"", ((b"idempotency-key", self.key.encode()),))
        return run(
            serve(PORTS, head, self.policy, uuid4().bytes), process.performing(self._patient(Entry(self, process)))
        )

    def _patient(self, entry: Entry) -> Any:
        def perform(command: Command[Any]) -> Any:
            match command:
                case Wait():
                    self.pass_time()
                    return Again.AGAIN
                case Announce():
                    return None
                case _:
                    return entry.perform(command)

        return perform

    def pass_time(self) -> None:
        """Let the first end, or its lease."""
        storing, self._storing = self._storing, None
        if self._first_dies:
            self.age()
        elif storing is not None:
            with pytest.raises(StopIteration):
                self._first.send(self._entry.perform(storing))


def test_every_boundary_is_reached(shop: Shop) -> None:
    """It dies before and after everything that it asks for, its waiting too."""
    ended = [death.place for death in every_death(lambda: Waiting(shop, first_dies=False))]
    assert ended == [f"{when} {name}" for name in [*WAITING, "Announce"] for when in ("before", "after")]


@pytest.mark.parametrize("first_dies", [True, False], ids=["the first dies too", "the first ends"])
def test_one_answer(shop: Shop, first_dies: bool) -> None:
    """Whoever of them dies, and wherever: the next gets the one answer, and the order is written once."""
    for death in every_death(lambda: Waiting(shop, first_dies=first_dies)):
        world = death.world
        world.pass_time()
        answer = world.request()
        assert answer.status == HTTPStatus.CREATED, death
        assert world.request() == answer, death
        assert world.entries == ["order"], death


def test_waiter_gets_the_firsts_answer(shop: Shop) -> None:
    """One that does not die is given what the first has answered, marked as a replay."""
    world = Waiting(shop, first_dies=False)
    reply = world.live(Process())
    assert isinstance(reply, Send)
    assert MARKER in reply.answer.headers
    assert world.entries == ["order"]

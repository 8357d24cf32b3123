"""In atomic mode the process dies before and after every step of a request: business row and answer, or neither."""

from http import HTTPStatus

import pytest

from semel.core.commands import Look
from semel.core.message import Answer
from semel.core.policy import Policy
from semel.core.record import Record
from semel.core.state import TERMINAL
from semel.operation import Operation
from tests.flows.shops import Shop
from tests.flows.world import World, created
from tests.kit.crash import die, every_death

ATOMIC = Policy(mode="atomic")
KEEPS = Policy(mode="atomic", server_errors="keep")


def order(world: World, operation: Operation) -> Answer:
    """Write an order and say so."""
    world.enter(operation.connection, "order")
    return created(attempt=operation.attempt)


def declined(world: World, operation: Operation) -> Answer:
    """Write down a card that was declined."""
    world.enter(operation.connection, "declined")
    return Answer(HTTPStatus.PAYMENT_REQUIRED, (), b"declined")


def broken(world: World, operation: Operation) -> Answer:
    """Fail half-way."""
    world.enter(operation.connection, "half an order")
    raise RuntimeError("half-way")


def broken_politely(world: World, operation: Operation) -> Answer:
    """Fail half-way, with an answer."""
    world.enter(operation.connection, "half an order")
    return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, (), b"sorry")


def record_of(world: World) -> Record | None:
    return world.shop.store.perform(Look("alice", world.key))


@pytest.mark.parametrize(
    "handler, policy, status, entries",
    [
        (order, ATOMIC, 201, ["order"]),
        (declined, ATOMIC, 402, ["declined"]),
        (broken_politely, KEEPS, 500, []),
    ],
    ids=["created", "declined", "a server error that is kept"],
)  # fmt: skip - a table
def test_both_or_neither(shop: Shop, handler: object, policy: Policy, status: int, entries: list[str]) -> None:
    """A crash anywhere leaves both or neither, and the retry need not wait: it gets the one answer, for good."""
    places = []
    for death in every_death(lambda: World(shop, policy, handler)):  # type: ignore[arg-type]  # from a table
        world = death.world
        places.append(death.place)
        there = record_of(world)
        assert (there is not None) is (death.place == "after Finish"), death
        assert there is None or there.state in TERMINAL
        assert world.entries == (entries if there else []), death
        answer = world.request()
        assert answer.status == status, death
        assert [world.request() for _ in range(2)] == [answer] * 2, death
        assert world.entries == entries, death
    kept_error = ["Undo", "Begin"] if status == 500 else []
    flow = ["NameScope", "ReadBody", "Begin", "RunHandler", *kept_error, "Finish"]
    assert places == [f"{when} {command}" for command in flow for when in ("before", "after")]


def test_server_error_leaves_nothing(shop: Shop) -> None:
    """A handler that fails leaves neither row nor record, wherever it dies; a retry of a mended one succeeds."""
    for death in every_death(lambda: World(shop, ATOMIC, broken)):
        world = death.world
        assert (world.entries, record_of(world)) == ([], None), death
        world.handler = order
        assert world.request().status == 201, death
        assert world.entries == ["order"], death


def test_crash_during_recovery(shop: Shop) -> None:
    """The retry dies too, at every boundary of its own, and a third process finds both or neither all the same."""
    firsts = [death.boundary for death in every_death(lambda: World(shop, ATOMIC, order))]

    def once_dead(boundary: int) -> World:
        world = World(shop, ATOMIC, order)
        assert die(world, boundary)
        return world

    seen = 0
    for first in firsts:
        for again in every_death(lambda first=first: once_dead(first)):  # type: ignore[misc]
            world = again.world
            assert len(world.entries) == (record_of(world) is not None), (first, again)
            answer = world.request()
            assert answer.status == 201, (first, again)
            assert world.request() == answer
            assert world.entries == ["order"], (first, again)
            seen += 1
    # Ten boundaries; and for a retry that finds the answer eight, for it has nothing to run and no record to write.
    assert seen == (len(firsts) - 1) * len(firsts) + 8


def test_dead_guard_worker_is_taken_over(shop: Shop) -> None:
    """What a worker of guard mode left behind is taken over by atomic mode, wherever that one dies."""

    def left_behind() -> World:
        world = World(shop, Policy(), lambda *_: created())
        assert die(world, 5)
        world.age(world.policy.lease)
        world.policy, world.handler = ATOMIC, order
        return world

    for death in every_death(left_behind):
        world = death.world
        answer = world.request()
        assert (answer.status, answer.body) == (201, b'{"attempt": 2}'), death
        assert world.request() == answer, death
        assert world.entries == ["order"], death

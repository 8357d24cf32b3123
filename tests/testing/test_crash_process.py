"""A process dies at every boundary of every flow it runs, flows inside of flows included."""

from typing import Any

import pytest

from semel.core.commands import Command, Look, Now, Release
from semel.core.record import Hold
from tests.kit.crash import Died, Process, die, every_death
from tests.kit.ports import PORTS, NameScope, drive


class World:
    """An outer flow, in the middle of which an inner one runs."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def live(self, process: Process) -> None:
        self.process = process
        process.owns(lambda: self.done.append("let go"))
        drive(self.outer(), process.performing(self.perform))

    async def outer(self) -> None:
        try:
            await PORTS.principal()
        except Exception:
            # What a flow says last when its caller goes away.
            await PORTS.ask(Release(Hold("alice", "key", 0, b"")))
            raise

    async def inner(self) -> None:
        await PORTS.ask(Now())

    def perform(self, command: Command[Any]) -> None:
        if isinstance(command, NameScope):
            self.done.append("begun")
            drive(self.inner(), self.process.performing(self.perform))
        self.done.append(type(command).__name__)


def test_every_boundary_once() -> None:
    """The boundaries of an inner flow are between those of the command around it, and the dead do nothing more."""
    deaths = [(str(death), death.world.done) for death in every_death(World)]
    assert deaths == [
        ("died before NameScope (boundary 0)", ["let go"]),
        ("died before Now (boundary 1)", ["begun", "let go"]),
        ("died after Now (boundary 2)", ["begun", "Now", "let go"]),
        ("died after NameScope (boundary 3)", ["begun", "Now", "NameScope", "let go"]),
    ]


def test_who_does_not_die_lives() -> None:
    """A process without a fatal boundary comes to its end, and keeps what it owns."""
    world = World()
    world.live(Process())
    assert world.done == ["begun", "Now", "NameScope"]
    assert die(World(), 4) is None


def test_failure_is_a_boundary_too() -> None:
    """A command that fails may have been carried out: the process can die before it learns of the failure."""

    def perform(_command: Command[Any]) -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - it has nothing to say
        Process(2).performing(perform)(Look("alice", "key"))
    with pytest.raises(Died, match="after Look"):
        Process(1).performing(perform)(Look("alice", "key"))

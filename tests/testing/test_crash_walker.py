"""The walker stops a flow at every boundary, once before and once after each step."""

from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import Command
from tests.kit.crash import every_crash, stop
from tests.kit.ports import PORTS, Pause, ReadBody


class World:
    """Writes down what was carried out."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def flow(self) -> None:
        await PORTS.principal()
        try:
            await PORTS.read_body(1)
        except OSError:
            await PORTS.pause(timedelta(0))

    def perform(self, command: Command[Any]) -> None:
        self.done.append(type(command).__name__)
        if isinstance(command, ReadBody):
            raise OSError


class SoundWorld(World):
    def perform(self, command: Command[Any]) -> None:
        self.done.append(type(command).__name__)


def test_every_boundary_once() -> None:
    """Every step is died before and after, each time in a new world, and the walk ends with the flow."""
    crashes = [(str(crash), crash.world.done) for crash in every_crash(SoundWorld)]
    assert crashes == [
        ("died before NameScope (step 0)", []),
        ("died after NameScope (step 0)", ["NameScope"]),
        ("died before ReadBody (step 1)", ["NameScope"]),
        ("died after ReadBody (step 1)", ["NameScope", "ReadBody"]),
    ]


def test_failed_commands_are_the_flows_affair() -> None:
    """A command that fails on the way is raised into the flow, which goes on as it sees fit."""
    world = World()
    assert stop(world.flow(), world.perform, 2, "before") == Pause(timedelta(0))
    assert world.done == ["NameScope", "ReadBody"]


def test_the_dead_do_not_speak() -> None:
    """A flow that wants to do something as it dies is found out."""

    async def flow() -> None:
        try:
            await PORTS.principal()
        finally:
            await PORTS.principal()

    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        stop(flow(), SoundWorld().perform, 0, "before")

"""Stops a flow at every boundary, as if the process had died there, and lets you look. It judges nothing: you do.

Each step of a flow has two boundaries: the command was not carried out, or it was and nobody learned its answer. ::

    for crash in every_crash(World):          # a new World each time: .flow() and .perform(command)
        crash.world.come_back_later()
        assert crash.world.effects == 1, crash
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar

from semel.core.commands import Command, Flow
from semel.drivers import Perform

When = Literal["before", "after"]


class World(Protocol):
    """What a flow runs in: a store, a handler, and whatever else counts."""

    def flow(self) -> Flow[Any]:
        """Start the flow."""

    def perform(self, command: Command[Any]) -> Any:
        """Carry out one command of it."""


W = TypeVar("W", bound=World)


@dataclass(frozen=True, slots=True)
class Crash(Generic[W]):
    """Where a flow was stopped, and the world it left behind."""

    world: W
    #: Counts from 0.
    step: int
    when: When
    command: Command[Any]

    def __str__(self) -> str:
        """Say where."""
        return f"died {self.when} {type(self.command).__name__} (step {self.step})"


def every_crash(make_world: Callable[[], W]) -> Iterator[Crash[W]]:
    """Crash once at each boundary of the flow, each time in a new world, until the flow ends before the next one."""
    for step in count():
        for when in ("before", "after"):
            world = make_world()
            command = stop(world.flow(), world.perform, step, when)
            if command is None:
                return
            yield Crash(world, step, when, command)


def stop(flow: Flow[Any], perform: Perform, step: int, when: When) -> Command[Any] | None:
    """Run *flow* up to one boundary of its step number *step* and drop it there; None if it has ended before."""
    try:
        command = next(flow)
        for _ in range(step):
            try:
                answer = perform(command)
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration:
        return None
    if when == "after":
        perform(command)
    # A dead process says nothing more; a flow that tried to would fail here.
    flow.close()
    return command

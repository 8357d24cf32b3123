"""Stops a flow at every boundary, as if the process had died there, and lets you look. It judges nothing: you do.

Each step of a flow has two boundaries: the command was not carried out, or it was and nobody learned its answer. ::

    for crash in every_crash(World):          # a new World each time: .flow() and .perform(command)
        crash.world.come_back_later()
        assert crash.world.effects == 1, crash

A handler that takes steps drives flows of its own inside the one around it. Their boundaries are counted together when
all of them run in one ``Process``::

    for death in every_death(World):          # a new World each time: .live(process)
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar

from tests.kit.ports import PORTS, Flow, Perform, say

When = Literal["before", "after"]


class World(Protocol):
    """What a flow runs in: a store, a handler, and whatever else counts."""

    def flow(self) -> Flow[Any]:
        """Start the flow."""

    def perform(self, command: Any) -> Any:
        """Carry out one command of it."""


W = TypeVar("W", bound=World)


@dataclass(frozen=True, slots=True)
class Crash(Generic[W]):
    """Where a flow was stopped, and the world it left behind."""

    world: W
    #: Counts from 0.
    step: int
    when: When
    command: Any

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


def stop(flow: Flow[Any], perform: Perform, step: int, when: When) -> Any | None:
    """Run *flow* up to one boundary of its step number *step* and drop it there; None if it has ended before."""
    PORTS.take_said()
    try:
        command = flow.send(None)
        for _ in range(step):
            say(perform)
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


class Died(BaseException):
    """The process is dead. No handler catches this, and whoever asks for anything more gets it again."""


class Process:
    """A process with any number of flows in it, which dies at one boundary, counted over all of them from 0."""

    def __init__(self, dies_at: int | None = None) -> None:
        """Die at that boundary; None is not to die."""
        self._left = dies_at
        self._possessions: list[Callable[[], object]] = []
        #: Where it died.
        self.place: str | None = None

    def owns(self, let_go: Callable[[], object]) -> None:
        """Call *let_go* when the process dies, as the operating system does: it closes connections, for example."""
        self._possessions.append(let_go)

    def performing(self, perform: Perform) -> Perform:
        """Return *perform* as this process does it: once before each command it may die, and once after."""

        def perform_while_alive(command: Any) -> Any:
            self._pass("before", command)
            try:
                answer = perform(command)
            except Exception:
                self._pass("after", command)
                raise
            self._pass("after", command)
            return answer

        return perform_while_alive

    def _pass(self, when: When, command: Any) -> None:
        """Pass a boundary alive, or don't."""
        if self.place is None and self._left == 0:
            self.place = f"{when} {type(command).__name__}"
            for let_go in reversed(self._possessions):
                let_go()
        if self.place is not None:
            raise Died(self.place)
        if self._left is not None:
            self._left -= 1


class Life(Protocol):
    """What a process lives in: a store, a client, and whatever else counts."""

    def live(self, process: Process) -> Any:
        """Run what is to be stopped, every flow of it by ``process.performing``."""


L = TypeVar("L", bound=Life)


@dataclass(frozen=True, slots=True)
class Death(Generic[L]):
    """Where a process died, and the world it left behind."""

    world: L
    boundary: int
    place: str

    def __str__(self) -> str:
        """Say where."""
        return f"died {self.place} (boundary {self.boundary})"


def every_death(make_world: Callable[[], L]) -> Iterator[Death[L]]:
    """Die once at each boundary, each time in a new world, until a process lives to its end."""
    for boundary in count():
        world = make_world()
        death = die(world, boundary)
        if death is None:
            return
        yield death


def die(world: L, boundary: int) -> Death[L] | None:
    """Let a process die in *world* at *boundary*; None if it came to its end before."""
    process = Process(boundary)
    try:
        world.live(process)
    except Died:
        return Death(world, boundary, str(process.place))
    return None

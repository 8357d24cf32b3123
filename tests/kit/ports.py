"""Ports that ask for a command with each call: a flow over them is played, driven or stopped, one command at a time.

What a flow asks of its store are commands already. For the rest there is one here, for each call that a port has.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from semel.core.commands import Begin, Claim, Command, Commit, Finish, Open, TakeOver, Undo
from semel.core.events import Happening
from semel.core.handler import RunHandler, Wait
from semel.core.record import Found, Hold, Stuck

T = TypeVar("T")
Flow = Coroutine[Any, Any, T]
Perform = Callable[[Any], Any]


@dataclass(frozen=True)
class NameScope(Command[Any]):
    """Ask the application for the user of a request."""


@dataclass(frozen=True)
class ReadBody(Command[Any]):
    limit: int


@dataclass(frozen=True)
class RunUnguarded(Command[Any]):
    hold: Hold | None = None
    lease: timedelta | None = None


@dataclass(frozen=True)
class FinishOne(Command[Any]):
    stuck: Stuck


@dataclass(frozen=True)
class Announce(Command[Any]):
    scope: str
    key: str
    found: Found


@dataclass(frozen=True)
class Pause(Command[Any]):
    duration: timedelta


@dataclass(frozen=True)
class Keep(Command[Any]):
    """Keep what the store does not take."""

    hold: Hold
    commands: tuple[Command[Any], ...]
    lease: timedelta


@dataclass(frozen=True)
class Tell(Command[Any]):
    happening: Happening


@dataclass(frozen=True)
class CallInside(Command[Any]):
    """Call the function of a phase."""


@dataclass(frozen=True)
class CallOutside(Command[Any]):
    key: str


@dataclass(frozen=True)
class AskOutside(Command[Any]):
    key: str


@dataclass(frozen=True)
class Renewal(Command[Any]):
    hold: Hold


class Asked:
    """What a port returns: awaited, it leaves the flow with its command."""

    def __init__(self, command: Any) -> None:
        self._command = command

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self._command)


#: Carried out in a transaction, or with more than the store: these have ports of their own.
NOT_ASKED = (Begin, Claim, Commit, Finish, Open, RunHandler, TakeOver, Undo, Wait)


class CommandPorts:
    """The ports."""

    is_interruptible = True

    def __init__(self) -> None:
        #: How often it is not sure yet that a lease has not run out.
        self.doubts = 0
        #: What was asked for without an answer to wait for, since it was last looked at.
        self.said: list[Any] = []

    def take_said(self) -> list[Any]:
        said, self.said = self.said, []
        return said

    def ask(self, command: Any) -> Any:
        assert not isinstance(command, NOT_ASKED), f"There is a port for {command}."
        return Asked(command)

    def _call(self, command: Any) -> Any:
        return Asked(command)

    claim = take_over = begin = finish = run_handler = wait = commit = find_stuck = _call

    def tell(self, happening: Happening) -> None:
        self.said.append(Tell(happening))

    def endpoint(self) -> str | None:
        return None

    def announce(self, scope: str, key: str, found: Found) -> None:
        self.said.append(Announce(scope, key, found))

    def principal(self) -> Any:
        return Asked(NameScope())

    def read_body(self, limit: int) -> Any:
        return Asked(ReadBody(limit))

    def undo(self) -> Any:
        return Asked(Undo())

    def open(self) -> Any:
        return Asked(Open())

    def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        return Asked(RunUnguarded(hold, lease))

    def pause(self, duration: timedelta) -> Any:
        return Asked(Pause(duration))

    def call_inside(self) -> Any:
        return Asked(CallInside())

    def call_outside(self, key: str) -> Any:
        return Asked(CallOutside(key))

    def verify(self, key: str) -> Any:
        return Asked(AskOutside(key))

    def keep(self, hold: Hold, commands: tuple[Command[Any], ...], lease: timedelta) -> None:
        self.said.append(Keep(hold, commands, lease))

    def saw_outage(self) -> None:
        """Nothing is kept here either."""

    def is_kept(self, hold: Hold) -> bool:
        return False

    def is_sure(self, hold: Hold) -> bool:
        if self.doubts:
            self.doubts -= 1
            return False
        return True

    def renew(self, hold: Hold) -> Any:
        return Asked(Renewal(hold))

    def finish_one(self, stuck: Stuck) -> Any:
        return Asked(FinishOne(stuck))

    def route_policy(self) -> None:
        return None


#: Flows are driven one after the other in a test, so they may share these.
PORTS = CommandPorts()


def drive(flow: Flow[T], perform: Perform) -> T:
    """Run *flow*, whose ports are ``PORTS``, to its end: carry out by *perform* whatever it asks for."""
    try:
        command = flow.send(None)
        while True:
            say(perform)
            try:
                answer = perform(command)
            except Exception as error:  # noqa: BLE001 - it is the flow's to judge
                command = flow.throw(error)
            else:
                command = flow.send(answer)
    except StopIteration as end:
        say(perform)
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
    except BaseException:
        say(perform)
        raise


def say(perform: Perform) -> None:
    """Carry out what was asked for without waiting for an answer."""
    for command in PORTS.take_said():
        perform(command)


def carry_out(ports: Any, command: Any) -> Any:
    """Have *ports* of a thread carry out one *command* of a step."""
    match command:
        case Open():
            call = ports.open()
        case Commit():
            call = ports.commit(command)
        case Undo():
            call = ports.undo()
        case CallInside():
            call = ports.call_inside()
        case CallOutside(key):
            call = ports.call_outside(key)
        case AskOutside(key):
            call = ports.verify(key)
        case Pause(duration):
            call = ports.pause(duration)
        case _:
            call = ports.ask(command)
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError(command)

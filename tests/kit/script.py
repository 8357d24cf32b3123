"""Plays a flow against a script: what it asks for, in order, and what the world answers. Nothing is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tests.kit.ports import PORTS, Flow

T = TypeVar("T")

#: The kind of command that is expected, and its answer. An exception is thrown into the flow.
Line = tuple[type[Any], object]


@dataclass(frozen=True, slots=True)
class Played(Generic[T]):
    """A flow that ended: what it asked for, and what it returned."""

    commands: tuple[Any, ...]
    result: T


class OffScript(AssertionError):
    """The flow asked for something that the script does not hold at this place."""


def play(flow: Flow[T], script: Sequence[Line]) -> Played[T]:
    """Run *flow* to its end. It has to ask for exactly what *script* says, in this order."""
    asked: list[Any] = []
    lines = iter(script)

    def expect(command: Any) -> object:
        asked.append(command)
        kind, answer = next(lines, (None, None))
        if kind is None:
            raise OffScript(f"The script is over, and the flow asks for {command}.")
        if type(command) is not kind:
            raise OffScript(f"Step {len(asked)} is {command}, and the script says {kind.__name__}.")
        return answer

    PORTS.take_said()
    try:
        command = flow.send(None)
        while True:
            for said in PORTS.take_said():
                expect(said)
            answer = expect(command)
            command = flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
    except StopIteration as end:
        for said in PORTS.take_said():
            expect(said)
        if next(lines, None) is not None:
            raise OffScript(f"The flow ended after step {len(asked)}, and the script goes on.") from None
        return Played(tuple(asked), end.value)

"""What a flow may ask for, and how it asks."""

from datetime import timedelta

import pytest

from semel.core import commands
from semel.core.commands import Command, Flow, NameScope, Pause
from semel.testing.script import play

KINDS = [kind for kind in vars(commands).values() if isinstance(kind, type) and Command in kind.__bases__]


def test_yield_from_is_the_answer() -> None:
    """``yield from command`` hands the command out and the answer in."""

    def flow() -> Flow[str | None]:
        return (yield from NameScope())

    played = play(flow(), [(NameScope, "alice")])
    assert (played.commands, played.result) == ((NameScope(),), "alice")


def test_failure_comes_in_at_the_command() -> None:
    """What goes wrong with a command is raised where it was asked for."""

    def flow() -> Flow[str]:
        try:
            yield from Pause(timedelta(0))
        except OSError as error:
            return str(error)
        return "nothing"

    assert play(flow(), [(Pause, OSError("broken"))]).result == "broken"


@pytest.mark.parametrize("kind", KINDS)
def test_until_the_handler_runs_a_flow_can_be_interrupted(kind: type[Command[object]]) -> None:
    """Only what comes before the handler can be interrupted; from then on a flow goes to its end."""
    before = {"Claim", "TakeOver", "Now", "NameScope", "ReadBody"}
    assert kind.interruptible is (kind.__name__ in before)


def test_commands_are_values() -> None:
    """Two commands that ask for the same are equal, and can be keys."""
    assert {Pause(timedelta(1)), Pause(timedelta(1))} == {Pause(timedelta(1))}

"""What a flow may ask for, and how it asks."""

from datetime import timedelta

import pytest

from semel.core import commands
from semel.core.commands import Command
from tests.kit.ports import Flow, NameScope, Pause
from tests.kit.script import play

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


#: What can be given up when its caller goes: whatever runs before a handler; a step of a handler, which is cancelled
#: with it; the end of the handler's own transaction, which leaves all of it or nothing; and all of report mode.
INTERRUPTIBLE = {
    "before the handler": {"NameScope", "ReadBody", "Claim", "TakeOver", "Now", "Look", "Begin", "Wait"},
    "a step": {"Open", "CallInside", "Commit", "Save", "CallOutside", "AskOutside", "Park", "Settle", "Mark"},
    "the end of its transaction": {"Finish"},
    "a handler that is only watched": {"RunUnguarded"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_interrupted(kind: type[Command[object]]) -> None:
    """A guarded handler is never interrupted, nor the storing of its answer, the freeing of its key or a roll-back."""
    assert kind.interruptible is any(kind.__name__ in names for names in INTERRUPTIBLE.values())


def test_every_command_is_exported() -> None:
    """Whoever carries out commands finds all of them in one place."""
    assert {kind.__name__ for kind in KINDS} <= set(commands.__all__)


def test_commands_are_values() -> None:
    """Two commands that ask for the same are equal, and can be keys."""
    assert {Pause(timedelta(1)), Pause(timedelta(1))} == {Pause(timedelta(1))}

"""What a store may be asked for."""

from semel.core import commands
from semel.core.commands import Command, Look

KINDS = [kind for kind in vars(commands).values() if isinstance(kind, type) and Command in kind.__bases__]


def test_every_command_is_exported() -> None:
    """A store finds every command that it may be asked in one place."""
    assert {kind.__name__ for kind in KINDS} <= set(commands.__all__)


def test_commands_are_values() -> None:
    """Two commands that ask for the same are equal, and can be keys."""
    assert {Look("alice", "key"), Look("alice", "key")} == {Look("alice", "key")}

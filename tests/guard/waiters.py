"""Who waits in these tests, and for what."""

from collections.abc import Callable
from datetime import timedelta

from semel.core.handler import Wait
from semel.core.hint import hint_of
from semel.core.message import Answer
from semel.core.record import Found
from semel.core.state import State

SCOPE = "alice"
#: Nothing here takes a second; what takes this long hangs.
HANG_SECONDS = 60
NEVER = timedelta(hours=1)
SOON = timedelta(milliseconds=20)

FOUND = Found(State.COMPLETE, 1, b"t" * 16, b"", Answer(201, (), b"done"), lease_is_over=True, is_expired=False)


def wait_for(
    key: str = "a", *, patience: timedelta = NEVER, max_waiters: int | None = None, max_waiters_per_key: int = 10_000
) -> Wait:
    return Wait(SCOPE, key, patience, max_waiters, max_waiters_per_key)


def end_of(key: str = "a") -> tuple[str, str, Found]:
    return SCOPE, key, FOUND


def name_of(key: str = "a") -> str:
    return hint_of(SCOPE, key)


class Ears:
    """A store that has hints to give."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[str], None]] = []

    def listen(self, on_end: Callable[[str], None]) -> None:
        self.listeners.append(on_end)


def deaf(_on_end: object) -> None:
    """A store that has none."""

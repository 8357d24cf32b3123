"""Turns at a SQLite file, among the threads of one process."""

from datetime import timedelta
from pathlib import Path

import pytest

from semel.errors import StoreUnavailable
from semel.stores.django import turns
from semel.stores.sqlite.file import Place
from semel.stores.statement import Names

PLACE = Place(Path("shop.db"), Names())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "BUSY_TIMEOUT", timedelta(milliseconds=50))


def test_who_keeps_it_too_long_is_named() -> None:
    """Whoever waits in vain for one and the same is told for whom."""
    turn = turns.Turns()
    turn.take("that of key abc", PLACE)
    with pytest.raises(StoreUnavailable, match="key abc"):
        turn.take("another", PLACE)


def test_a_crowd_that_moves_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits longer than one may keep it, while it goes from hand to hand, is not refused for it."""
    turn = turns.Turns()
    turn.take("the first", PLACE)
    waits = iter((False, False, True))

    class Passing:
        """A turn that somebody else gets twice before us."""

        def acquire(self, timeout: float) -> bool:
            turn._given += 1
            return next(waits)

        def release(self) -> None: ...

    monkeypatch.setattr(turn, "_turn", Passing())
    turn.take("the last", PLACE)
    assert turn._holder == "the last"

"""Erasing one owner: what is asked for, in what order, until when, and what is counted."""

from typing import Any

import pytest

from semel.core.commands import Erase, Erased, EraseTrail, Left
from semel.core.key import digest_of
from semel.core.place import written_place
from semel.core.scope import reported
from semel.core.state import State
from semel.core.upkeep import MAX_BATCH
from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.flows.erase import MAX_WALKS, EraseReport, erase
from semel.stores.transaction import at_once
from tests.kit.ports import PORTS
from tests.kit.script import Line, play

LEFT = Left("alice", "key-1", State.PROCESSING)
PLACE = written_place(0, "alice", "key-9")
CUT_SHORT = StoreUnavailable("time-out", was_sent=True)
AWAY = StoreUnavailable("away")
#: There is nothing of report mode.
NO_REPORTED: list[Line] = [(Erase, Erased()), (EraseTrail, Erased())]


def test_nothing_to_erase() -> None:
    """Records and lines are looked for, of the owner and of report mode, and that is all."""
    played = play(erase(PORTS, "alice"), [(Erase, Erased()), (EraseTrail, Erased()), *NO_REPORTED])
    other = reported("alice")
    assert played.commands == (
        Erase("alice", MAX_BATCH),
        EraseTrail("alice", MAX_BATCH),
        Erase(other, MAX_BATCH),
        EraseTrail(other, MAX_BATCH),
    )
    assert played.result == EraseReport()
    assert played.result.is_idle
    assert str(played.result) == "erased: 0 operations, 0 audit lines deleted, 0 left"


def test_until_nothing_is_left_to_erase() -> None:
    """Each walk goes on part by part; another follows until one has erased nothing, and that one tells what is left."""
    script: list[Line] = [
        (Erase, Erased(2, left=(LEFT, Left("alice", "key-2", State.COMPLETE)), further=PLACE)),
        (Erase, Erased(1)),
        (Erase, Erased(0, left=(LEFT,))),
        (EraseTrail, Erased(3, further=PLACE)),
        (EraseTrail, Erased(1)),
        *NO_REPORTED,
    ]
    played = play(erase(PORTS, "alice", reason="why"), script)
    assert played.commands[:2] == (
        Erase("alice", MAX_BATCH, reason="why"),
        Erase("alice", MAX_BATCH, PLACE, reason="why"),
    )
    assert played.commands[4] == EraseTrail("alice", MAX_BATCH, PLACE, reason="why")
    assert played.result == EraseReport(3, 4, (LEFT,))
    assert played.result.facts == {
        "erased": 3,
        "audit_lines": 4,
        "left": [{"digest": digest_of("key-1"), "state": "processing"}],
        "error": None,
        "copies": None,
    }


def test_a_run_ends() -> None:
    """Where operations end as fast as they are erased, a run ends all the same."""
    played = play(erase(PORTS, "alice"), [*[(Erase, Erased(1))] * MAX_WALKS, (EraseTrail, Erased()), *NO_REPORTED])
    assert played.result == EraseReport(MAX_WALKS)


def test_preview() -> None:
    """A preview walks once, and every command says that it is one."""
    script: list[Line] = [(Erase, Erased(1)), (EraseTrail, Erased(2)), (Erase, Erased(1)), (EraseTrail, Erased())]
    played = play(erase(PORTS, "alice", is_preview=True), script)
    assert all(command.is_preview for command in played.commands)
    assert played.result == EraseReport(2, 2)


def test_a_part_that_takes_too_long() -> None:
    """A part that is too much for the store is asked for again, in half its size, from the same place."""
    script: list[Line] = [
        (Erase, Erased(0, further=PLACE)),
        (Erase, CUT_SHORT),
        (Erase, Erased(0)),
        (EraseTrail, Erased()),
        *NO_REPORTED,
    ]
    played = play(erase(PORTS, "alice"), script)
    assert played.commands[2] == Erase("alice", MAX_BATCH // 2, PLACE)
    assert played.result.error is None


@pytest.mark.parametrize("error", [AWAY, StoreNotReady("no table")])
def test_cut_short(error: StoreError) -> None:
    """A store that objects ends the run, which says why, and what was done before."""
    played = play(erase(PORTS, "alice"), [(Erase, Erased(1, left=(LEFT,), further=PLACE)), (Erase, error)])
    assert played.result == EraseReport(1, 0, (LEFT,), error)
    assert str(played.result).endswith(f"; then it ended: {error}")
    assert played.result.facts["error"] == str(error)
    trail: list[Line] = [(Erase, Erased()), (EraseTrail, error)]
    assert play(erase(PORTS, "alice"), trail).result == EraseReport(error=error)


class Away:
    """Ports of a store that can't be reached."""

    async def ask(self, _: object) -> object:
        raise AWAY


def test_away_from_the_start() -> None:
    """A store that is away is asked once, and not for what report mode has, too."""
    ports: Any = Away()
    assert at_once(erase(ports, "alice")) == EraseReport(error=AWAY)

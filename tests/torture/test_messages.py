"""The short variant of the messages of ``make torture``; and their checker, which sees each thing that must not be."""

import ast
from pathlib import Path

import pytest

from torture import message_checker
from torture.lines import STORES
from torture.message_checker import Sent, check_messages
from torture.messages import MessageLines, Messages, duel
from torture.messaging import BUGS
from torture.scenario import Plan, Worlds

SEED = 9
FIRST, SECOND = "pay-000001-a", "pay-000002-a"


def silent(_line: str) -> None:
    pass


def test_the_checker_imports_nothing_of_what_it_judges() -> None:
    """It needs the standard library and the other checker only: a library can't be its own witness."""
    tree = ast.parse(Path(message_checker.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "collections", "collections.abc", "dataclasses", "itertools", "torture.checker"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


def test_a_message_may_be_sent_again_under_its_id() -> None:
    """Sent twice, and a later one of the same key in between: the first deliveries are in order, and that is right."""
    assert check_messages([FIRST, SECOND], [Sent("1", FIRST), Sent("2", SECOND), Sent("1", FIRST)]) == []


@pytest.mark.parametrize(
    "sent, left, kind",
    [
        pytest.param([Sent("1", FIRST)], [], "lost", id="one never came"),
        pytest.param([Sent("1", FIRST), Sent("2", SECOND), Sent("3", FIRST)], [], "doubled", id="another id"),
        pytest.param([Sent("1", FIRST), Sent("2", SECOND), Sent("3", "pay-3-a")], [], "doubled", id="no such order"),
        pytest.param([Sent("2", SECOND), Sent("1", FIRST)], [], "disordered", id="overtaken"),
        pytest.param([Sent("1", FIRST), Sent("2", SECOND)], ["2"], "stuck", id="left in the outbox"),
    ],
)
def test_each_violation_is_found(sent: list[Sent], left: list[str], kind: str) -> None:
    """Evidence of what must not be is a violation of its kind, and of no other."""
    assert {violation.kind for violation in check_messages([FIRST, SECOND], sent, left)} == {kind}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(worlds: Worlds, bug: str) -> None:
    """Killed between any two of its lines, a relay or consumer with the bug loses or doubles; a sound one never."""
    with worlds.postgres() as world:
        sound, spoilt = duel(world.part("sound"), bug, "sound"), duel(world.part("spoilt"), bug, "spoilt")
    assert sound.violations == ()
    assert sound.reached > 5
    assert {violation.kind for violation in spoilt.violations} & {BUGS[bug]}


@pytest.mark.slow
def test_killed_everywhere_each_order_has_one_parcel(worlds: Worlds) -> None:
    """API, relays, consumer and broker are killed at random: each order has one parcel, and messages are in order."""
    outcome = Messages().run(worlds, Plan(SEED, stride=6, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached >= 10


@pytest.mark.slow
def test_kill_9_at_a_line_of_a_relay_or_an_inbox(worlds: Worlds) -> None:
    """Each message arrives at least once under one id, and takes effect once."""
    outcome = MessageLines().run(worlds, Plan(SEED, stride=60, tell=silent))
    assert outcome.violations == ()
    places = {f"relay ({store}, {entry})" for store in STORES for entry in ("wsgi", "asgi")}
    assert {part for part, number in outcome.parts.items() if number} == places | {
        f"consume ({each})" for each in STORES
    }

"""The torture is put to the test: eleven bugs are planted, and each must be found."""

from collections.abc import Iterator

import pytest

from torture.duels import DUELS
from torture.planted import BUGS
from torture.scenario import World, Worlds


@pytest.fixture(scope="module")
def world(worlds: Worlds) -> Iterator[World]:
    with worlds.postgres() as world:
        yield world


def test_every_bug_has_a_duel() -> None:
    """There are eleven bugs, and for each a scenario that must find it."""
    assert list(BUGS) == list(DUELS)
    assert len(BUGS) == 11


@pytest.mark.slow
@pytest.mark.parametrize("bug", DUELS)
def test_a_planted_bug_is_found(world: World, bug: str) -> None:
    """The checker finds the bug from outside, and without it the same scenario finds nothing."""
    name = bug.replace(" ", "_")
    sound, spoilt = world.part(f"sound_{name}"), world.part(f"spoilt_{name}")
    assert DUELS[bug](sound) > 0
    assert sound.verdict().violations == ()
    DUELS[bug](spoilt, planted=bug)
    assert {violation.kind for violation in spoilt.verdict().violations} & {"doubled", "lost"}

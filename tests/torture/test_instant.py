"""The short variant of instant take-over in ``make torture``."""

import pytest

from torture.instant import InstantTakeOver
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow

SEED = 5


def test_the_dead_are_taken_over_at_once_and_the_living_are_fenced(worlds: Worlds) -> None:
    """With leases of an hour, workers that are killed, or whose lock is cut, are taken over without waiting for any;
    those that live after all are fenced, and everybody gets the same answer.
    """
    outcome = InstantTakeOver().run(worlds, Plan(SEED, stride=8, tell=lambda _: None))
    assert outcome.violations == ()
    assert outcome.reached > 8
    assert outcome.seen["take-over"]

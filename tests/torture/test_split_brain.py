"""The short variant of the split brain of ``make torture``."""

import pytest

from torture.scenario import Plan, Worlds
from torture.split_brain import SplitBrain

pytestmark = pytest.mark.slow

SEED = 7


def silent(_line: str) -> None:
    pass


def test_a_cache_that_falls_in_two_doubles_nothing(worlds: Worlds) -> None:
    """Two masters of one Redis both give answers, while PostgreSQL has the keys: every payment is made once."""
    outcome = SplitBrain().run(worlds, Plan(SEED, stride=10, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached == 1
    assert outcome.seen["answer of the old master"] > 0
    assert outcome.seen["answer of the new master"] > 0

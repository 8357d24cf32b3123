"""The short variant of the zombies of ``make torture``."""

import pytest

from torture.scenario import Plan, Worlds
from torture.zombies import Zombies

pytestmark = pytest.mark.slow

SEED = 4


def silent(_line: str) -> None:
    pass


def test_a_worker_that_wakes_past_its_lease_is_fenced(worlds: Worlds) -> None:
    """Workers are stopped past their lease, and their work is done by others: what they do afterwards counts for
    nothing, their clients are told to ask again, and everybody gets the same answer.
    """
    outcome = Zombies().run(worlds, Plan(SEED, stride=6, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached > 8
    assert outcome.seen["duplicate told to wait"] == 2

"""The short variant of the workers of ``make torture``."""

import pytest

from torture.accepted import Accepted
from torture.lines import ENTRIES, STORES
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow

SEED = 8


def silent(_line: str) -> None:
    pass


def test_what_was_accepted_ends_whoever_dies(worlds: Worlds) -> None:
    """Workers are killed in the middle of what was accepted, and others resume it: each step is taken once, and every
    client who asks is given the same answer.
    """
    outcome = Accepted().run(worlds, Plan(SEED, stride=20, tell=silent))
    assert outcome.violations == ()
    reached = {part.partition(" ")[2] for part, number in outcome.parts.items() if number}
    assert reached == {f"({store}, {entry})" for store in STORES for entry in ENTRIES}
    assert outcome.reached > 8

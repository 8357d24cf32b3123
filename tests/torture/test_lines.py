"""The short variant of ``make torture``: kill -9 at a sample of the executed lines, chosen by a seed."""

import pytest

from torture.duels import TEN_YEARS_SECONDS, Rivals
from torture.lines import OPERATIONS, STORES, KillAtLines
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow

SEED = 20


def silent(_line: str) -> None:
    pass


def test_kill_9_at_a_line_doubles_and_loses_nothing(worlds: Worlds) -> None:
    """Every operation is killed, on both stores and by both entry points: nothing is done twice, lost or stuck."""
    outcome = KillAtLines().run(worlds, Plan(SEED, stride=180, tell=silent))
    assert outcome.violations == ()
    reached = {part.partition(", ")[0] for part, number in outcome.parts.items() if number}
    assert reached == {f"{operation} ({store}" for operation in OPERATIONS for store in STORES}


@pytest.mark.parametrize("seconds", [TEN_YEARS_SECONDS, -TEN_YEARS_SECONDS], ids=["ahead", "behind"])
def test_a_clock_that_is_off_by_ten_years_changes_nothing(worlds: Worlds, seconds: float) -> None:
    """Only the database's clock decides: a worker whose own is wrong is killed and recovered like any other."""
    kills = KillAtLines(("guard", "phase", "sweep", "reap"), ("wsgi",), clock_seconds=seconds)
    outcome = kills.run(worlds, Plan(SEED, stride=450, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached > 5


def test_a_rival_at_a_line_finds_one_worker_at_work(worlds: Worlds) -> None:
    """While a worker is stopped at a line, another that is asked for the same payment does not do it a second time."""
    outcome = Rivals().run(worlds, Plan(SEED, stride=40, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached > 5

"""The short variant of the restarts of ``make torture``."""

from torture.restarts import Restarts
from torture.scenario import Plan, Worlds

SEED = 6


def silent(_line: str) -> None:
    pass


def test_a_restart_of_postgresql_loses_and_doubles_nothing(worlds: Worlds) -> None:
    """PostgreSQL is stopped in an instant under load and recovers: every payment is made once, or, where a plain
    handler's answer could not be stored, said to be unknown.
    """
    outcome = Restarts().run(worlds, Plan(SEED, stride=10, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached == 1

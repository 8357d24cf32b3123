"""The short variant of the restarts of ``make torture``."""

import pytest

from torture.restarts import RedisRestarts, Restarts
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow

SEED = 6


def silent(_line: str) -> None:
    pass


def test_a_restart_of_postgresql_loses_and_doubles_nothing(worlds: Worlds) -> None:
    """PostgreSQL is stopped in an instant under load, stays away for longer than the leases, and recovers: every
    payment is made once, since live workers keep the answers that could not be stored.
    """
    outcome = Restarts().run(worlds, Plan(SEED, stride=10, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached == 1


def test_a_killed_redis_that_keeps_its_log_loses_and_doubles_nothing(worlds: Worlds) -> None:
    """Redis, with every write on its disk before it is acknowledged, is killed under load: every payment is made once,
    since live workers keep the answers that could not be stored.
    """
    outcome = RedisRestarts().run(worlds, Plan(SEED, stride=15, tell=silent))
    assert outcome.violations == ()
    assert outcome.reached == 2

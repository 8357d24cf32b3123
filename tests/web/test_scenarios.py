"""Every scenario, through every entry point, on every store."""

import pytest

from tests.web.harness import Api, AsgiWorld, WsgiWorld
from tests.web.scenarios import SCENARIOS, Scenario


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_scenario(world: AsgiWorld | WsgiWorld, scenario: Scenario) -> None:
    """What a client sees does not depend on the entry point, nor on the store."""
    if scenario.policy.mode == "atomic" and "Redis" in type(world.store).__name__:
        pytest.skip("Redis has no transactions to share.")
    scenario.check(Api(world, scenario.policy))

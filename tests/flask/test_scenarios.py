"""Every scenario, through the decorator, on every durable store."""

import pytest

from tests.flask.world import FlaskWorld
from tests.web.harness import Api
from tests.web.scenarios import SCENARIOS, Scenario


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_scenario(world: FlaskWorld, scenario: Scenario) -> None:
    """What a client sees does not depend on the entry point, nor on the store."""
    scenario.check(Api(world, scenario.policy))

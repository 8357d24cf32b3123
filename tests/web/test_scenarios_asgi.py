"""Every scenario again, in the ASGI frameworks."""

from collections.abc import Iterator

import pytest

from semel import stores
from tests.web.conftest import store_url
from tests.web.harness import Api
from tests.web.scenarios import SCENARIOS, Scenario
from tests.web.worlds_asgi import FastapiWorld, LitestarWorld

WORLDS: dict[str, type[FastapiWorld | LitestarWorld]] = {"fastapi": FastapiWorld, "litestar": LitestarWorld}

#: What Litestar can't show; ``test_litestar.py`` has what it does instead.
NOT_IN_LITESTAR = {
    "d3 safe methods with a key pass through, without a look-up": "Litestar serves no TRACE and no QUERY.",
    "d3 an exception is kept as a 500, and still reaches whoever reports errors": "Litestar answers for it by itself.",
    "d3 an exception frees the key where the policy says so": "Litestar answers for it by itself.",
}


@pytest.fixture(scope="session", params=[f"{name}-{store}" for name in WORLDS for store in ("sqlite", "postgres")])
def framework(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FastapiWorld | LitestarWorld]:
    """One framework on one store."""
    name, store = request.param.split("-")
    url = store_url(request, store, tmp_path_factory.mktemp("web"))
    opened = WORLDS[name](lambda: stores.async_store(url))
    yield opened
    opened.close()


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_scenario(framework: FastapiWorld | LitestarWorld, scenario: Scenario) -> None:
    """What a client sees does not depend on the framework."""
    if isinstance(framework, LitestarWorld) and scenario.name in NOT_IN_LITESTAR:
        pytest.skip(NOT_IN_LITESTAR[scenario.name])
    scenario.check(Api(framework, scenario.policy))

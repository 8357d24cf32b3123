"""Every scenario once more, through the proxy."""

from collections.abc import Iterator

import pytest

from semel import stores
from tests.proxy.world import ProxyWorld
from tests.web.conftest import store_url
from tests.web.harness import Api
from tests.web.scenarios import SCENARIOS, Scenario

_ELSEWHERE = "The handler is in another process, and does not say this to the guard."
_UTF8 = "The proxy refuses a header that is not UTF-8, whichever it is."

#: What the proxy can't show, or shows otherwise.
NOT_IN_PROXY = {
    "d1 Latin-1 (strict)": _UTF8,
    "d1 Latin-1 (lenient)": _UTF8,
    "d3 500 with no_effect() frees the key": _ELSEWHERE,
    "d3 NoEffect is a 503 that frees the key": _ELSEWHERE,
    "d3 an exception is kept as a 500, and still reaches whoever reports errors": _ELSEWHERE,
    "d3 an exception frees the key where the policy says so": _ELSEWHERE,
    "d3 a handler with steps that raises says that a retry goes on, and the error is still reported": _ELSEWHERE,
    "d3 a stream that takes steps is held back until they are taken": _ELSEWHERE,
    "d3 lines that are all there are kept, whatever their type": "This app sends two lengths: its answer is not read.",
    "d3 Set-Cookie and Date are the first answer's own": "The proxy is a server, and dates what it replays.",
    "d4 a provider's key is derived: the same on a retry, another for each tenant, never the client's own": _ELSEWHERE,
    "waiting: when the first frees its key, one who waits runs, and others get that answer": _ELSEWHERE,
    "waiting: a wish that says nothing is no wish, and no mistake": _UTF8,
}


@pytest.fixture(scope="session", params=["proxy-sqlite", "proxy-postgres"])
def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyWorld]:
    """The proxy on one store."""
    url = store_url(request, request.param.partition("-")[2], tmp_path_factory.mktemp("proxy"))
    opened = ProxyWorld(lambda: stores.async_store(url))
    yield opened
    opened.close()


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_scenario(proxy: ProxyWorld, scenario: Scenario) -> None:
    """What a client sees does not depend on where the handler runs."""
    if scenario.name in NOT_IN_PROXY or scenario.policy.mode == "atomic":
        pytest.skip(NOT_IN_PROXY.get(scenario.name, _ELSEWHERE))
    scenario.check(Api(proxy, scenario.policy))

"""The short variant of the killed proxies of ``make torture``."""

import pytest

from torture.forwarded import KilledProxies
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow


def test_a_killed_proxy_or_upstream_doubles_nothing(worlds: Worlds) -> None:
    """A proxy, its upstream, or both are killed under load: every payment is made once, or said to be unknown."""
    outcome = KilledProxies().run(worlds, Plan(3, stride=10, tell=lambda _: None))
    assert [each for each in outcome.violations if each.kind != "idle"] == []
    assert outcome.reached >= 2


def test_a_proxy_that_sends_again_is_found(worlds: Worlds) -> None:
    """The check sees what it is for: with on_crash="rerun" a request is sent again, and its effect is doubled."""
    outcome = KilledProxies('on_crash = "rerun"').run(worlds, Plan(3, stride=5, tell=lambda _: None))
    assert outcome.count("doubled") > 0

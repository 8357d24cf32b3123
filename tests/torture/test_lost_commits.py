"""The short variant of the lost replies of ``make torture``."""

import pytest

from torture import lost_commits
from torture.lost_commits import Cutter, late_saves, pay_until, swallowed
from torture.proxy import Proxy
from torture.scenario import Plan, Worlds

pytestmark = pytest.mark.slow

SEED = 5


def test_a_lost_reply_to_commit_is_found_out(worlds: Worlds) -> None:
    """Connections are cut before, at and after each kind of statement: a client is told that it has paid only where it
    has, and no payment is made twice.
    """
    cutter = Cutter(Plan(SEED).chance())
    with Proxy(worlds.server.url, cutter.choose, cutter.tell) as proxy, worlds.postgres(proxy.address) as world:
        cutter.world = world
        pay_until(world, proxy, cutter, 15)
        verdict = world.verdict(("resolved unknown", "replay"))
        assert swallowed(proxy) >= 15
        assert cutter.missing == []
    assert verdict.violations == ()


def test_a_save_that_arrives_late_sets_nothing_back(worlds: Worlds) -> None:
    """A save whose worker was cut off and has sent it again arrives when later steps are stored: those stay done."""
    assert late_saves(worlds).violations == ()


def test_a_cut_that_is_never_made_is_a_failure(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which a kind of statement was never cut fails, and says which: it has proven less than it says."""
    monkeypatch.setattr(lost_commits, "PATIENCE_SECONDS", 0)
    cutter = Cutter(Plan(SEED).chance())
    with (
        Proxy(worlds.server.url, lambda _sql, _marks: None, cutter.tell) as proxy,
        worlds.postgres(proxy.address) as world,
        pytest.raises(AssertionError, match=r"never cut: COMMIT before the server had it, .*claim after"),
    ):
        pay_until(world, proxy, cutter, 0)

"""When a process has the operations that it runs listed, as ones to look at: beside other calls, and not at once."""

import pytest

from semel.stores.redis.due import TICK, DueList, Listing
from semel.stores.redis.protocol import Call

NAME = b"semel:0123456789abcdef"
#: Seconds.
LEASE = 30.0


@pytest.fixture
def begun() -> DueList:
    """Has begun one operation, at zero by its clock."""
    due = DueList("semel")
    due.began([(NAME, LEASE)])
    return due


def delays(calls: list[Call]) -> dict[bytes, float]:
    """Return what is listed, and after how many seconds to be looked at."""
    listings = [each for each in calls if isinstance(each, Listing)]
    return {name: delay / 1_000_000 for each in listings for name, delay in each.delays.items()}


def test_what_ends_soon_is_never_listed(begun: DueList) -> None:
    """Most operations end at once, and cost the list nothing."""
    assert begun.calls(TICK / 2) == []
    begun.ended([(NAME, None)])
    assert begun.calls(2 * TICK) == begun.calls(4 * TICK) == []


def test_what_runs_on_is_listed_under_the_end_of_its_lease(begun: DueList) -> None:
    """The second time that there is something to send, it is sent along."""
    assert begun.calls(1.0) == []
    assert delays(begun.calls(2.0)) == {NAME: 28.0}


def test_a_lease_that_is_over_meanwhile_is_due(begun: DueList) -> None:
    """Where nothing was sent for long, what was left to its lease is to be looked at now, not one lease later."""
    assert begun.calls(40.0) == []
    assert delays(begun.calls(60.0)) == {NAME: 0.0}


def test_what_could_not_be_listed_is_tried_again(begun: DueList) -> None:
    """A list that can't be written loses no operation, and the time that went by counts."""
    begun.calls(1.0)
    calls = begun.calls(2.0)
    begun.listed(calls, [ConnectionError()] * len(calls))
    assert delays(begun.calls(3.0)) == {NAME: 27.0}


def test_all_that_runs_is_listed_at_once_where_it_is_asked_for(begun: DueList) -> None:
    """A service that looks for stuck operations, and a store that is closed, leave nothing out."""
    assert delays(begun.rest()) == {NAME: 0.0}
    assert begun.rest() == []

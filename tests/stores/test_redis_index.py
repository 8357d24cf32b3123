"""When a process has the operations that it runs listed, as ones to look at: beside other calls, and not at once."""

from datetime import timedelta

import pytest

from semel.stores.redis.index import TICK, Errand, Index

NAME = b"semel:0123456789abcdef"
LEASE = timedelta(seconds=30)


@pytest.fixture
def begun() -> Index:
    """Has begun one operation, at zero by its clock."""
    index = Index("semel")
    index.began(NAME, LEASE, 0.0)
    return index


def delays(errands: list[Errand]) -> dict[bytes, float]:
    """Return who is listed, and after how many seconds to be looked at."""
    return {name: delay / 1_000_000 for errand in errands for name, delay in errand.delays.items()}


def test_what_ends_soon_is_never_listed(begun: Index) -> None:
    """Most operations end at once, and cost the list nothing."""
    assert begun.errands(TICK / 2) == []
    begun.ended(NAME)
    assert begun.errands(2 * TICK) == begun.errands(4 * TICK) == []


def test_what_runs_on_is_listed_under_the_end_of_its_lease(begun: Index) -> None:
    """The second time that there is something to send, it is sent along."""
    assert begun.errands(1.0) == []
    assert delays(begun.errands(2.0)) == {NAME: 28.0}


def test_a_lease_that_is_over_meanwhile_is_due(begun: Index) -> None:
    """Where nothing was sent for long, what was left to its lease is to be looked at now, not one lease later."""
    assert begun.errands(40.0) == []
    assert delays(begun.errands(60.0)) == {NAME: 0.0}


def test_what_could_not_be_listed_is_tried_again(begun: Index) -> None:
    """A list that can't be written loses nobody, and the time that went by counts."""
    begun.errands(1.0)
    errands = begun.errands(2.0)
    begun.done(errands, [ConnectionError()] * len(errands))
    assert delays(begun.errands(3.0)) == {NAME: 27.0}


def test_all_that_runs_is_listed_at_once_where_it_is_asked_for(begun: Index) -> None:
    """Whoever looks for stuck operations, or ends, leaves nothing out."""
    assert delays(begun.rest()) == {NAME: 0.0}
    assert begun.rest() == []

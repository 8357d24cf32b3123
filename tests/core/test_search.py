"""Which records fit a filter, pages of them, and how many there are of each kind."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest

from semel.core.commands import Filter, Search, Survey
from semel.core.events import StoreSurveyed
from semel.core.message import Answer
from semel.core.place import read_place, written_place
from semel.core.record import Record
from semel.core.search import fits, page, surveyed, walk_of
from semel.core.state import State
from semel.errors import ConfigurationError

NOW = datetime(2026, 11, 18, 9, tzinfo=UTC)
HOUR = timedelta(hours=1)
RECORD = Record(
    scope="acct",
    key="abc",
    state=State.COMPLETE,
    attempt=1,
    token=bytes(16),
    fingerprint=b"",
    recovery_point=None,
    steps=None,
    answer=Answer(201),
    created_at=NOW - HOUR,
    lease_expires_at=None,
    completed_at=NOW - HOUR,
    expires_at=NOW + HOUR,
    lease_left=None,
    retention_left=HOUR,
    request_line="POST /payments",
)
BUSY = replace(
    RECORD, key="busy", state=State.PROCESSING, answer=None, completed_at=None, lease_expires_at=NOW, lease_left=-HOUR
)


def no_trail(_record: Record) -> list[str | None]:
    return []


@pytest.mark.parametrize(
    "wanted, is_wanted",
    [
        (Filter(), True),
        (Filter(scope="acct", key="abc", state=State.COMPLETE, endpoint="/pay", status=(200, 299)), True),
        (Filter(scope="other"), False),
        (Filter(key="abd"), False),
        (Filter(state=State.FAILED), False),
        (Filter(is_stuck=True), False),
        (Filter(endpoint="/refunds"), False),
        (Filter(newer_than=2 * HOUR), True),
        (Filter(newer_than=HOUR / 2), False),
        (Filter(older_than=HOUR / 2), True),
        (Filter(older_than=2 * HOUR), False),
        (Filter(status=(400, 499)), False),
        (Filter(digest=sha256(b"abc").hexdigest()[:12]), True),
        (Filter(digest="0" * 12), False),
        (Filter(reason="x"), False),
    ],
)
def test_filters(wanted: Filter, is_wanted: bool) -> None:
    """A record is wanted if it fits all that is given."""
    assert fits(wanted, RECORD, no_trail) is is_wanted


def test_reasons() -> None:
    """A reason is looked for in every line of the audit trail, and a line may have none."""
    assert fits(Filter(reason="gone"), RECORD, lambda _: [None, "the worker is gone"])
    assert not fits(Filter(status=(200, 299)), BUSY, no_trail)
    assert fits(Filter(is_stuck=True), BUSY, no_trail)


def test_pages_follow_each_other() -> None:
    """A page says where the next one begins, and a walk that ended at its limit says so."""
    records = [replace(RECORD, key=f"key-{number}", created_at=NOW - number * HOUR) for number in range(5)]
    first = page(Search(Filter(), 2, 100), records, no_trail)
    assert [each.key for each in first.records] == ["key-0", "key-1"]
    second = page(Search(Filter(), 2, 100, first.further), records, no_trail)
    last = page(Search(Filter(), 2, 100, second.further), records, no_trail)
    assert ([each.key for each in last.records], last.further) == (["key-4"], None)
    cut = page(Search(Filter(key="key-4"), 2, 3), records, no_trail)
    assert (cut.records, cut.walked, cut.is_cut) == ((), 3, True)
    rest = page(Search(Filter(key="key-4"), 2, 3, cut.further), records, no_trail)
    assert ([each.key for each in rest.records], rest.is_cut) == (["key-4"], False)


def test_a_walk_along_what_has_not_ended() -> None:
    """A search for what has not ended does not walk past what has."""
    assert page(Search(Filter(is_stuck=True), 2, 100), [RECORD, BUSY], no_trail).walked == 1


def test_counting() -> None:
    """Kinds are counted up to the limit; the oldest in flight is named, and what was given back is told from what is
    stuck.
    """
    alive = replace(BUSY, key="alive", lease_left=HOUR)
    held = replace(BUSY, key="held", token=b"t" * 16)
    counts = surveyed(Survey(10, 10, NOW - 2 * HOUR), [RECORD, BUSY, alive, held], NOW, 3)
    assert counts.gauges == StoreSurveyed(1, 1, 0, 0, 3, 3600.0, 0.0)
    assert (counts.total, counts.free, counts.lapsed, counts.complete) == (4, 1, 2, 1)
    assert (counts.oldest, counts.made) == (("acct", "alive", NOW - HOUR), 4)
    none = surveyed(Survey(10, 10), [], NOW, 0)
    assert (none.oldest, none.newest_since, none.made) == (None, None, 0)


def test_places() -> None:
    """A place is one word, and is read back as it was, whatever a key is made of."""
    for number, first, second in ((0, "", ""), (2**61, "a\0b", "\u202e/?&#"), (7, "\ud800", "é")):
        assert read_place(written_place(number, first, second)) == (number, first, second)


@pytest.mark.parametrize(
    "word", ["", "x", "????", "a b", written_place(2**62), written_place(-1), "WzFd", "W10", "e30", "é", "bm8="]
)
def test_broken_places(word: str) -> None:
    """Anything else is refused in words."""
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_place(word)
    with pytest.raises(ConfigurationError, match="can't be read"):
        Search(Filter(), 1, 1, word)


def test_a_walk_is_no_longer_than_it_has_to_be() -> None:
    """Without a filter a page and a bit is walked past; with one, what was allowed."""
    assert walk_of(Search(Filter(), 50, 5000)) == 52
    assert walk_of(Search(Filter(), 50, 10)) == 10
    assert walk_of(Search(Filter(scope="a"), 50, 5000)) == 5000

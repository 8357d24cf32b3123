"""What people search for, page by page, and what is counted."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest

from semel.core.commands import AddCounts, Complete, Filter, Note, Now, Park, ReadCounts, Release, Search, Survey
from semel.core.state import Event, State
from semel.errors import ConfigurationError
from semel.testing.conformance.base import (
    CREATED,
    LEASE,
    RETENTION,
    Age,
    Suite,
    accepted_on,
    claim_on,
    completed,
    held,
    parked,
    reap_everything,
    saved,
)
from semel.testing.conformance.handles import Handle

MINUTE = timedelta(minutes=1)
#: More than any test makes.
ALL = 100_000
CAP = 1000


class Searching(Suite):
    """Search and count."""

    def test_every_filter(self, store: Handle, scope: str, age: Age) -> None:
        """Records are found by state, key, digest, request line, age, status and reason, and by all of them at once."""
        _make_history(store, scope, age)
        for wanted, keys in (
            ({}, ["waiting", "failed", "ended", "parked", "running"]),
            ({"state": State.COMPLETE}, ["ended"]),
            ({"state": State.FAILED}, ["failed"]),
            ({"state": State.PENDING}, ["waiting"]),
            ({"state": State.PROCESSING}, ["running"]),
            ({"state": State.UNKNOWN}, ["parked"]),
            ({"is_stuck": True}, ["running"]),
            ({"is_stuck": True, "state": State.PENDING}, []),
            ({"key": "ended"}, ["ended"]),
            ({"key": "ended", "state": State.FAILED}, []),
            ({"digest": sha256(b"ended").hexdigest()[:12]}, ["ended"]),
            ({"digest": sha256(b"running").hexdigest(), "state": State.PROCESSING}, ["running"]),
            ({"endpoint": "/refunds"}, ["failed"]),
            ({"endpoint": "POST"}, ["failed", "ended"]),
            ({"endpoint": "%"}, []),
            ({"newer_than": 90 * MINUTE}, ["waiting", "failed", "ended", "parked"]),
            ({"older_than": 90 * MINUTE}, ["running"]),
            ({"older_than": 30 * MINUTE, "newer_than": 90 * MINUTE}, ["parked"]),
            ({"status": (400, 499)}, ["failed"]),
            ({"status": (200, 299)}, ["ended"]),
            ({"reason": "provider was"}, ["parked"]),
            ({"reason": "provider was", "state": State.UNKNOWN, "older_than": MINUTE}, ["parked"]),
            ({"reason": "_provider"}, []),
        ):
            assert _keys_of(store, scope, **wanted) == keys, wanted

    def test_without_a_scope(self, store: Handle, scope: str, age: Age) -> None:
        """Records of all scopes are found, the newest first."""
        _make_history(store, scope, age)
        completed(store, claim_on(f"{scope} other", "ended"))
        page = store.perform(Search(Filter(key="ended"), 2, ALL))
        assert [each.scope for each in page.records] == [f"{scope} other", scope]
        page = store.perform(Search(Filter(is_stuck=True), ALL, ALL))
        assert (scope, "running") in {(each.scope, each.key) for each in page.records}

    def test_pages(self, store: Handle, scope: str, age: Age) -> None:
        """Each page begins where the one before it ended, in any order of ages, and the last one says so."""
        keys = []
        for number in range(7):
            completed(store, claim_on(scope, f"key-{number}"))
            keys.append(f"key-{number}")
            if number % 3:
                age(MINUTE)
        seen: list[str] = []
        after = None
        while True:
            page = store.perform(Search(Filter(scope=scope), 2, ALL, after))
            assert len(page.records) <= 2
            seen += [each.key for each in page.records]
            after = page.further
            if after is None:
                break
        assert sorted(seen) == keys
        assert seen[0] == "key-6"

    @pytest.mark.parametrize("wanted", [{}, {"state": State.PENDING}], ids=["all", "unfinished"])
    def test_bounded_walks(self, store: Handle, scope: str, wanted: dict[str, Any]) -> None:
        """A walk ends at its limit, says so, and can go on further back until everything was seen."""
        for number in range(6):
            held(store, accepted_on(scope, f"key-{number}"))
        seen: set[str] = set()
        after, scan, rounds = None, 2, 0
        while True:
            page = store.perform(Search(Filter(scope=scope, endpoint=None, **wanted), 1, scan, after))
            seen |= {each.key for each in page.records}
            if page.further is None:
                break
            after, rounds = page.further, rounds + 1
            if page.is_cut:
                scan *= 4
            assert rounds < 50
        assert seen == {f"key-{number}" for number in range(6)}

    def test_a_search_leaves_bodies_behind(self, store: Handle, scope: str) -> None:
        """A search reads status and headers, and no bodies."""
        completed(store, claim_on(scope))
        (seen,) = store.perform(Search(Filter(scope=scope), 9, ALL)).records
        assert seen.answer == replace(CREATED, body=b"")

    @pytest.mark.parametrize("place", ["", "x", "%%%", "W10", "WyJhIiwiYiIsImMiXQ", "\x00", "LTE"])
    def test_broken_places(self, store: Handle, scope: str, place: str) -> None:
        """A place that the store did not make is refused in words."""
        with pytest.raises(ConfigurationError, match="can't be read"):
            store.perform(Search(Filter(scope=scope), 9, ALL, place))

    def test_survey(self, store: Handle, scope: str, age: Age) -> None:
        """A survey counts what has not ended and what is past retention, each up to its limit; or leaves it out."""
        reap_everything(store, age)
        before = store.perform(Survey(CAP, CAP))
        since = store.perform(Now())
        for number in range(3):
            held(store, claim_on(scope, f"dead {number}"))
        age(LEASE)
        held(store, claim_on(scope, "alive", lease=9 * LEASE))
        held(store, accepted_on(scope, "accepted"))
        completed(store, claim_on(scope, "ended"))
        hold = held(store, claim_on(scope, "failed"))
        store.perform(Complete(hold, Event.FAIL, replace(CREATED, status=409)))
        store.perform(Release(saved(store, held(store, claim_on(scope, "given back")))))
        parked(store, claim_on(scope, "parked"))
        age(timedelta(seconds=1))
        after, limited = store.perform(Survey(CAP, CAP, since - 3 * LEASE)), store.perform(Survey(2, CAP))
        alone = store.perform(Survey(CAP, with_messages=True))
        for name, number in {"in_flight": 1, "stuck": 3, "parked": 1, "accepted": 1, "expired": 0}.items():
            seen = [getattr(each.gauges, name) for each in (before, after, limited, alone)]
            assert seen[1] - seen[0] == number, name
            assert seen[2] <= 2, name
            assert seen[3] in {None, seen[1]}, name
        assert (after.free - before.free, after.lapsed - before.lapsed) == (1, 4)
        assert (after.complete, after.failed) == (before.complete + 1, before.failed + 1)
        for seconds in (after.gauges.oldest_in_flight, after.gauges.oldest_accepted):
            assert seconds is not None
            assert seconds >= 1
        assert after.oldest is not None
        assert after.made >= 8
        assert store.perform(Survey(CAP, CAP)).made == 0
        assert after.newest_since is not None
        assert after.newest_since <= after.now
        age(RETENTION)
        if before.gauges.expired is not None:
            assert store.perform(Survey(CAP, CAP)).gauges.expired >= 4  # type: ignore[operator]  # as above
            assert store.perform(Survey(2, CAP)).gauges.expired == 2

    def test_counts_by_minute(self, store: Handle, rival: Handle) -> None:
        """What processes have counted is summed up by minute."""
        before, after = Counter[str](), Counter[str]()
        for _, outcome, number in store.perform(ReadCounts(60)).counts:
            before[outcome] += number
        store.perform(AddCounts({"ran": 2, "added": 1}))
        rival.perform(AddCounts({"ran": 3, "conflict": 1}))
        read = store.perform(ReadCounts(60))
        for minute, outcome, number in read.counts:
            assert minute <= read.now
            assert minute.second == 0
            after[outcome] += number
        assert {each: after[each] - before[each] for each in ("ran", "added", "conflict")} == {
            "ran": 5,
            "added": 1,
            "conflict": 1,
        }


def _make_history(store: Handle, scope: str, age: Age) -> None:
    """Make one record of each kind, a while after the other."""
    held(store, claim_on(scope, "running"))
    age(60 * MINUTE)
    hold = held(store, claim_on(scope, "parked"))
    store.perform(Park(hold))
    store.perform(Note(hold, "said", "the provider was not reached"))
    age(60 * MINUTE)
    completed(store, replace(claim_on(scope, "ended"), request_line="POST /payments"))
    age(timedelta(seconds=1))
    hold = held(store, replace(claim_on(scope, "failed"), request_line="POST /refunds"))
    store.perform(Complete(hold, Event.FAIL, replace(CREATED, status=409)))
    age(timedelta(seconds=1))
    held(store, accepted_on(scope, "waiting"))
    assert LEASE < 60 * MINUTE


def _keys_of(store: Handle, scope: str, **wanted: Any) -> list[str]:
    page = store.perform(Search(Filter(scope=scope, **wanted), 10, ALL))
    assert page.further is None
    return [each.key for each in page.records]

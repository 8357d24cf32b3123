"""What people search for, page by page, and what is counted."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import pytest

from semel.core.commands import Complete, Count, Filter, Note, Now, Park, Search
from semel.core.state import Event, State
from semel.errors import ConfigurationError
from semel.testing.conformance.base import CREATED, LEASE, Age, Suite, accepted_on, claim_on, completed, held
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
            assert len(page.records) <= 2  # noqa: PLR2004 - as many as asked for
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
            assert rounds < 50  # noqa: PLR2004 - it comes to an end
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

    def test_counts(self, store: Handle, scope: str, age: Age) -> None:
        """Each kind of record is counted, up to a cap, and the oldest in progress is named."""
        before = store.perform(Count(CAP, CAP))
        since = store.perform(Now())
        _make_history(store, scope, age)
        after = store.perform(Count(CAP, CAP, since - 3 * 60 * MINUTE))
        assert after.pending == before.pending + 1
        assert after.unknown == before.unknown + 1
        assert after.stuck > before.stuck
        assert (after.complete, after.failed) == (before.complete + 1, before.failed + 1)
        assert after.oldest is not None
        assert after.made >= 5  # noqa: PLR2004 - those of this test
        assert after.newest_since is not None
        assert after.newest_since <= after.now
        capped = store.perform(Count(1, 1))
        assert max(capped.pending, capped.processing, capped.stuck, capped.unknown, capped.expired) == 1
        assert store.perform(Count(CAP, CAP)).made == 0


def _make_history(store: Handle, scope: str, age: Age) -> None:
    """Make one record of each kind, a while after the other."""
    held(store, claim_on(scope, "running"))
    age(60 * MINUTE)
    parked = held(store, claim_on(scope, "parked"))
    store.perform(Park(parked))
    store.perform(Note(parked, "said", "the provider was not reached"))
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

"""What operators see: one record, the newest ones, and the store's clock (guarantee 5)."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from uuid import uuid4

from semel.core.commands import Browse, Complete, Look, Now
from semel.core.record import Record
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    CREATED,
    FINGERPRINT,
    LEASE,
    RETENTION,
    Age,
    Suite,
    claim_on,
    completed,
    found,
    held,
    record,
    taken_over,
)
from semel.testing.conformance.handles import Handle

MOMENT = timedelta(minutes=1)


class Reading(Suite):
    """Look, browse and the clock."""

    def test_absent_record(self, store: Handle, scope: str) -> None:
        """A key that was never sent has no record."""
        assert store.perform(Look(scope, "key")) is None

    def test_request_line(self, store: Handle, scope: str, age: Age) -> None:
        """Method and path of the request that made a record are shown with it, until another takes its place."""
        dead = held(store, replace(claim_on(scope), request_line="POST /payments"))
        held(store, claim_on(scope, "none"))
        assert (record(store, scope).request_line, record(store, scope, "none").request_line) == ("POST /payments", "")
        age(LEASE)
        other = replace(claim_on(scope), request_line="POST /refunds")
        hold = taken_over(store, other, dead)
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert record(store, scope).request_line == "POST /payments"
        age(RETENTION)
        taken_over(store, replace(other, token=uuid4().bytes), hold)
        assert record(store, scope).request_line == "POST /refunds"

    def test_odd_request_lines(self, store: Handle, scope: str) -> None:
        """A line that is not plain text, or too long, is escaped or cut, and causes no error."""
        held(store, replace(claim_on(scope), request_line="PUT /caf\u00e9/\ud800\x00" + "x" * 500))
        seen = record(store, scope).request_line
        assert seen.startswith("PUT /caf\\xe9/\\ud800\\x00x")
        assert len(seen) == 200  # noqa: PLR2004 - the most there is

    def test_trace(self, store: Handle, scope: str, age: Age) -> None:
        """The trace of the attempt that has the key is stored with it, and found by every later claim."""
        first, second = (f"00-{uuid4().hex}-{uuid4().hex[:16]}-01" for _ in range(2))
        dead = held(store, replace(claim_on(scope), traceparent=first))
        held(store, claim_on(scope, "none"))
        assert (found(store, scope).traceparent, found(store, scope, "none").traceparent) == (first, None)
        assert (record(store, scope).traceparent, record(store, scope, "none").traceparent) == (first, None)
        age(LEASE)
        hold = taken_over(store, replace(claim_on(scope), traceparent=second), dead)
        assert found(store, scope).traceparent == second
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        # The second time, a store may answer from its cache.
        assert [found(store, scope).traceparent for _ in range(2)] == [second, second]
        assert record(store, scope).traceparent == second
        completed(store, replace(claim_on(scope, "at once"), traceparent=first))
        assert [found(store, scope, "at once").traceparent for _ in range(2)] == [first, first]

    def test_trace_of_a_later_attempt(self, store: Handle, scope: str, age: Age) -> None:
        """An attempt that is not traced leaves the trace of the one before; a new operation does not."""
        trace = f"00-{uuid4().hex}-{uuid4().hex[:16]}-01"
        dead = held(store, replace(claim_on(scope), traceparent=trace))
        age(LEASE)
        hold = taken_over(store, claim_on(scope), dead)
        assert found(store, scope).traceparent == trace
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        age(RETENTION)
        taken_over(store, claim_on(scope), hold)
        assert found(store, scope).traceparent is None

    def test_record_in_progress(self, store: Handle, scope: str) -> None:
        """A record in progress shows its holder, since when and for how long, by the store's clock."""
        before = store.perform(Now())
        hold = held(store, claim_on(scope))
        seen = record(store, scope)
        assert (seen.scope, seen.key) == (scope, "key")
        assert (seen.state, seen.attempt, seen.token) == (State.PROCESSING, 1, hold.token)
        assert (seen.fingerprint, seen.answer, seen.completed_at) == (FINGERPRINT, None, None)
        assert before <= seen.created_at <= store.perform(Now())
        assert seen.lease_expires_at is not None
        assert seen.lease_left is not None
        # A store may read its clock once for each of these.
        assert abs(seen.lease_expires_at - seen.created_at - LEASE) < MOMENT
        assert abs(seen.expires_at - seen.created_at - RETENTION) < MOMENT
        assert LEASE - MOMENT < seen.lease_left <= LEASE
        assert RETENTION - MOMENT < seen.retention_left <= RETENTION

    def test_every_time_has_a_zone(self, store: Handle, scope: str) -> None:
        """Times know their zone."""
        hold = held(store, claim_on(scope))
        times = [record(store, scope).lease_expires_at]
        store.perform(Complete(hold, Event.FAIL, CREATED))
        seen = record(store, scope)
        times += [seen.created_at, seen.completed_at, seen.expires_at]
        assert all(isinstance(time, datetime) and time.utcoffset() is not None for time in times)

    def test_stuck_record(self, store: Handle, scope: str, age: Age) -> None:
        """A record with a lease that ran out an hour ago is shown as stuck."""
        held(store, claim_on(scope))
        age(LEASE + timedelta(hours=1))
        seen = record(store, scope)
        assert seen.is_stuck
        assert seen.lease_left is not None
        assert -timedelta(hours=1) - MOMENT < seen.lease_left <= -timedelta(hours=1)

    def test_ended_record_is_not_stuck(self, store: Handle, scope: str, age: Age) -> None:
        """A record that has ended has no lease, and expires in its time."""
        completed(store, claim_on(scope))
        age(RETENTION - MOMENT)
        assert (record(store, scope).is_stuck, record(store, scope).is_expired) == (False, False)
        age(MOMENT)
        assert (record(store, scope).is_stuck, record(store, scope).is_expired) == (False, True)

    def test_newest_first(self, store: Handle, scope: str, age: Age) -> None:
        """Browsing shows the newest records first, and no more than asked for."""
        self._history(store, scope, age)
        assert self._keys(store, Browse(10, scope=scope)) == ["failed", "ended", "running"]
        assert self._keys(store, Browse(2, scope=scope)) == ["failed", "ended"]
        assert self._keys(store, Browse(1)) == ["failed"]

    def test_filters(self, store: Handle, scope: str, age: Age) -> None:
        """Browsing can be filtered by scope, by key and by state, and by all of them."""
        self._history(store, scope, age)
        completed(store, claim_on(f"{scope} other", "ended"))
        for state, key in ((State.PROCESSING, "running"), (State.COMPLETE, "ended"), (State.FAILED, "failed")):
            assert self._keys(store, Browse(10, scope=scope, state=state)) == [key]
            assert self._keys(store, Browse(10, scope=scope, state=state, key=key)) == [key]
        assert self._keys(store, Browse(10, scope=scope, state=State.COMPLETE, key="running")) == []
        assert self._keys(store, Browse(10, scope=scope, state=State.PENDING)) == []
        assert self._keys(store, Browse(10, scope=f"{scope} other")) == ["ended"]
        found = store.perform(Browse(2, key="ended"))
        assert [each.scope for each in found] == [f"{scope} other", scope]

    def test_digests(self, store: Handle, scope: str) -> None:
        """A key is found by its digest, as logs show it or whole, with the other filters or without."""
        held(store, claim_on(scope, "abc"))
        held(store, claim_on(f"{scope} other", "abc"))
        completed(store, claim_on(scope, "def"))
        digest = sha256(b"abc").hexdigest()
        for beginning in (digest[:12], digest):
            assert self._keys(store, Browse(10, scope=scope, digest=beginning)) == ["abc"]
        assert self._keys(store, Browse(10, key="abc", scope=scope, digest=digest)) == ["abc"]
        assert {each.scope for each in store.perform(Browse(10, digest=digest))} >= {scope, f"{scope} other"}
        assert len(store.perform(Browse(1, digest=digest))) == 1
        for missing in (
            Browse(10, scope=scope, digest=digest[1:13]),
            Browse(10, scope=scope, digest=digest, key="def"),
            Browse(10, scope=scope, digest=digest, state=State.COMPLETE),
            Browse(10, scope=f"{scope} third", digest=digest),
        ):
            assert store.perform(missing) == ()

    def test_filters_are_no_patterns(self, store: Handle, scope: str) -> None:
        """A filter is the text itself: neither % nor _ nor * stands for anything."""
        held(store, claim_on(scope, "abc"))
        for key in ("a%", "a_c", "a*", "ABC", "ab"):
            assert store.perform(Browse(10, scope=scope, key=key)) == ()

    def test_bodies_stay_behind(self, store: Handle, scope: str) -> None:
        """Browsing shows status and headers of an answer, but does not read bodies."""
        completed(store, claim_on(scope))
        (seen,) = store.perform(Browse(10, scope=scope))
        assert seen.answer is not None
        assert (seen.answer.status, seen.answer.headers) == (CREATED.status, CREATED.headers)
        assert not seen.answer.body

    def test_browsing_nothing(self, store: Handle, scope: str) -> None:
        """A scope without records shows none."""
        assert store.perform(Browse(10, scope=scope)) == ()

    def test_clock(self, store: Handle, rival: Handle) -> None:
        """The clock knows its zone, never goes back, and is the same for every handle."""
        times = [each.perform(Now()) for each in (store, rival, store, rival)]
        assert all(time.utcoffset() is not None for time in times)
        assert times == sorted(times)
        assert times[-1] - times[0] < MOMENT

    def test_clock_advances(self, store: Handle, scope: str) -> None:
        """The clock advances by itself, and every statement reads it."""
        first = store.perform(Now())
        while (now := store.perform(Now())) == first:
            pass
        held(store, claim_on(scope))
        assert first < now <= record(store, scope).created_at

    @staticmethod
    def _history(store: Handle, scope: str, age: Age) -> None:
        held(store, claim_on(scope, "running"))
        age(timedelta(minutes=1))
        completed(store, claim_on(scope, "ended"))
        age(timedelta(minutes=1))
        store.perform(Complete(held(store, claim_on(scope, "failed")), Event.FAIL, CREATED))

    @staticmethod
    def _keys(store: Handle, browse: Browse) -> list[str]:
        found = store.perform(browse)
        assert all(isinstance(each, Record) for each in found)
        return [each.key for each in found]

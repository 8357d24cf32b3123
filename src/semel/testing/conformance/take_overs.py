"""Guarantees 2, 4 and 5: which claim takes a record over, when by the store's clock, and what of it stays."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

from semel.core.commands import Again, Complete, Look, Release, Renew, TakeOver, Verdict
from semel.core.record import Found, Hold
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
    held,
    record,
    taken_over,
)
from semel.testing.conformance.handles import Handle, race

CROWD = 20
#: Two readings of a store's clock in one test are no further apart than this.
MOMENT = timedelta(minutes=1)


class TakeOvers(Suite):
    """Take-overs."""

    def test_live_lease_stays(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A record with a minute left of its lease can't be taken over."""
        hold = held(store, claim_on(scope))
        age(LEASE - timedelta(minutes=1))
        assert rival.perform(TakeOver(claim_on(scope), hold)) is Again.AGAIN
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE

    def test_dead_lease_is_taken_over(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """When the lease has run out the next attempt gets the record, under its own token and a lease of its own."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        claim = claim_on(scope)
        assert rival.perform(TakeOver(claim, hold)) == Hold(scope, "key", 2, claim.token)
        assert rival.perform(TakeOver(claim_on(scope), Hold(scope, "key", 2, claim.token))) is Again.AGAIN

    def test_dead_lease_keeps_what_it_was(self, store: Handle, scope: str, age: Age) -> None:
        """It is still the same operation: creation time, retention and fingerprint stay as they are."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        before = record(store, scope)
        taken_over(store, claim_on(scope, fingerprint=b"another", lease=2 * LEASE, retention=9 * RETENTION), hold)
        after = record(store, scope)
        assert (after.created_at, after.expires_at) == (before.created_at, before.expires_at)
        assert after.fingerprint == FINGERPRINT
        assert (after.state, after.attempt, after.answer) == (State.PROCESSING, 2, None)
        assert after.lease_left is not None
        assert 2 * LEASE - MOMENT < after.lease_left <= 2 * LEASE

    def test_expired_record_starts_anew(self, store: Handle, scope: str, age: Age) -> None:
        """A record past its retention becomes a new operation: attempt 1, other fingerprint and times, no answer."""
        hold = completed(store, claim_on(scope))
        age(RETENTION)
        before = record(store, scope)
        new = taken_over(store, claim_on(scope, fingerprint=b"another"), hold)
        after = record(store, scope)
        assert new.attempt == 1
        assert (after.state, after.fingerprint) == (State.PROCESSING, b"another")
        assert (after.answer, after.completed_at) == (None, None)
        assert after.created_at - before.created_at >= RETENTION
        assert RETENTION - MOMENT < after.retention_left <= RETENTION
        assert after.lease_left is not None
        assert LEASE - MOMENT < after.lease_left <= LEASE

    def test_expired_record_starts_anew_under_another_token(self, store: Handle, scope: str, age: Age) -> None:
        """A record past its retention becomes no new operation under its own token: the two could not be told apart."""
        mine = claim_on(scope)
        hold = held(store, mine)
        age(RETENTION)
        assert store.perform(TakeOver(mine, hold)) is Again.AGAIN
        assert taken_over(store, claim_on(scope), hold).attempt == 1

    def test_expired_record_in_progress_starts_anew(self, store: Handle, scope: str, age: Age) -> None:
        """A record that was left in progress until its retention had passed becomes a new operation as well."""
        hold = held(store, claim_on(scope))
        age(RETENTION)
        taken_over(store, claim_on(scope, fingerprint=b"another"), hold)
        after = record(store, scope)
        assert after.fingerprint == b"another"
        assert after.retention_left > RETENTION - MOMENT

    def test_renewed_lease_outlives_retention(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A worker that still renews past the record's retention can't be taken over from."""
        hold = held(store, claim_on(scope))
        age(RETENTION)
        assert store.perform(Renew(((hold, LEASE),))) == frozenset()
        found = rival.perform(claim_on(scope))
        assert isinstance(found, Found)
        assert (found.is_expired, found.lease_is_over) == (True, False)
        assert rival.perform(TakeOver(claim_on(scope), hold)) is Again.AGAIN
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE

    def test_terminal_record_stays(self, store: Handle, scope: str, age: Age) -> None:
        """A record that has ended can't be taken over before it expires, however long its lease has been gone."""
        hold = completed(store, claim_on(scope))
        age(RETENTION - timedelta(minutes=1))
        assert store.perform(TakeOver(claim_on(scope), hold)) is Again.AGAIN
        assert record(store, scope).answer == CREATED

    def test_only_what_was_seen(self, store: Handle, scope: str, age: Age) -> None:
        """A take-over compares both attempt and token: if either differs, another worker has the record."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        for seen in (replace(hold, attempt=2), replace(hold, attempt=0), replace(hold, token=uuid4().bytes)):
            assert store.perform(TakeOver(claim_on(scope), seen)) is Again.AGAIN
        assert record(store, scope).attempt == 1

    def test_absent_record_is_not_taken_over(self, store: Handle, scope: str) -> None:
        """A record that was freed meanwhile is claimed, not taken over."""
        hold = held(store, claim_on(scope))
        store.perform(Release(hold))
        assert store.perform(TakeOver(claim_on(scope), hold)) is Again.AGAIN
        assert store.perform(Look(scope, "key")) is None

    def test_crowd_takes_over_once(self, store: Handle, scope: str, age: Age) -> None:
        """Of many that saw the same dead worker, one gets the record."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        got = store.perform_all([TakeOver(claim_on(scope), hold) for _ in range(CROWD)])
        assert sorted(isinstance(each, Hold) for each in got) == [False] * (CROWD - 1) + [True]
        assert record(store, scope).attempt == 2

    def test_rivals_take_over_once(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Of two processes that take over at the same moment, one gets the record, each time."""
        holds = [held(store, claim_on(scope, f"key {number}")) for number in range(10)]
        age(LEASE)
        for hold in holds:
            got = race([(each, TakeOver(claim_on(scope, hold.key), hold)) for each in (store, rival)])
            assert sorted(isinstance(each, Hold) for each in got) == [False, True]

    def test_holder_and_heir_race(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """When a worker stores its answer at the moment of a take-over, one of the two is refused."""
        holds = [held(store, claim_on(scope, f"key {number}")) for number in range(10)]
        age(LEASE)
        for hold in holds:
            done, got = race(
                [
                    (store, Complete(hold, Event.COMPLETE, CREATED)),
                    (rival, TakeOver(claim_on(scope, hold.key), hold)),
                ]
            )
            assert (done, isinstance(got, Hold)) in {(Verdict.DONE, False), (Verdict.FENCED, True)}
            state = State.COMPLETE if done is Verdict.DONE else State.PROCESSING
            assert record(store, scope, hold.key).state is state

    def test_take_over_whose_reply_was_lost(self, store: Handle, scope: str, age: Age) -> None:
        """A take-over that is repeated is Again, and the claim that follows finds its own token."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        claim = claim_on(scope)
        taken_over(store, claim, hold)
        assert store.perform(TakeOver(claim, hold)) is Again.AGAIN
        found = store.perform(claim)
        assert isinstance(found, Found)
        assert (found.token, found.attempt) == (claim.token, 2)

    def test_attempts_count_up(self, store: Handle, scope: str, age: Age) -> None:
        """Every take-over is the next attempt."""
        hold = held(store, claim_on(scope))
        for attempt in range(2, 6):
            age(LEASE)
            hold = taken_over(store, claim_on(scope), hold)
            assert hold.attempt == attempt

"""Guarantee 12: what is only accepted is pending, without a lease, until a worker begins it."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

from semel.core.commands import (
    Again,
    Complete,
    FindStuck,
    Look,
    ReadRequest,
    ReadTrail,
    Release,
    Renew,
    TakeOver,
    Verdict,
)
from semel.core.record import NO_TOKEN, Found, Hold, Stuck
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    CREATED,
    FINGERPRINT,
    LEASE,
    REQUEST,
    RETENTION,
    Age,
    Suite,
    accepted_on,
    claim_on,
    found,
    held,
    held_as,
    record,
    taken_over,
    timeless,
    worker_of,
)
from semel.testing.conformance.handles import Handle, race

CROWD = 20
#: More than any suite leaves behind.
ALL = 100_000
MOMENT = timedelta(minutes=1)


def waiting(store: Handle, scope: str, *, with_pending: bool = True) -> list[Stuck]:
    """Return what a worker finds to do in *scope*, the longest silent first."""
    stuck = store.perform(FindStuck(ALL, with_request=True, with_no_token=True, with_pending=with_pending))
    found = [each for each in stuck if each.hold.scope == scope]
    assert found == sorted(found, key=lambda each: each.silent_for, reverse=True)
    return found


class Accepted(Suite):
    """Accepted operations, and the workers that run them."""

    def test_accepted_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """An accepted request is pending: with all that a claim leaves, and without a lease."""
        claim = accepted_on(scope)
        assert store.perform(claim) == Hold(scope, "key", 1, claim.token)
        seen = record(rival, scope)
        assert (seen.state, seen.attempt, seen.token, seen.fingerprint) == (State.PENDING, 1, claim.token, FINGERPRINT)
        assert (seen.is_accepted, seen.milestone, seen.lease_expires_at, seen.is_stuck) == (True, None, None, False)
        assert RETENTION - MOMENT < seen.retention_left <= RETENTION
        assert rival.perform(ReadRequest(held_as(claim))) == REQUEST

    def test_others_are_not_accepted(self, store: Handle, scope: str, age: Age) -> None:
        """A claim without acceptance is never shown as accepted: neither running, nor stuck, nor ended."""
        hold = held(store, claim_on(scope, request=REQUEST))
        assert (record(store, scope).is_accepted, found(store, scope).is_accepted) == (False, False)
        age(LEASE)
        assert [each.is_accepted for each in waiting(store, scope)] == [False]
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert (record(store, scope).is_accepted, found(store, scope).is_accepted) == (False, False)

    def test_duplicates_find_it_accepted(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Every later claim of the key finds it accepted: pending, begun, given up and ended."""
        hold = held(store, accepted_on(scope))
        pending = Found(
            State.PENDING, 1, hold.token, FINGERPRINT, None, lease_is_over=True, is_expired=False, is_accepted=True
        )
        for each, claim in ((store, claim_on(scope)), (rival, accepted_on(scope, fingerprint=b"another"))):
            assert timeless(each.perform(claim)) == pending
        begun = worker_of(store, hold)
        for is_over in (False, True):
            seen = found(rival, scope)
            assert (seen.state, seen.is_accepted, seen.lease_is_over) == (State.PROCESSING, True, is_over)
            age(LEASE)
        store.perform(Complete(begun, Event.COMPLETE, CREATED))
        seen = found(rival, scope)
        assert (seen.state, seen.is_accepted, seen.answer) == (State.COMPLETE, True, CREATED)

    def test_crowd_to_be_accepted(self, store: Handle, scope: str) -> None:
        """Of many that are to be accepted under one key at once, one is, and the others find it accepted."""
        got = store.perform_all([accepted_on(scope) for _ in range(CROWD)])
        assert sum(isinstance(each, Hold) for each in got) == 1
        seen = [each for each in got if isinstance(each, Found)]
        assert all((each.state, each.is_accepted) == (State.PENDING, True) for each in seen)

    def test_accepted_and_claimed_together(self, store: Handle, scope: str) -> None:
        """Claims of both kinds that go out together are each what they are."""
        keys = [f"key {number}" for number in range(2 * CROWD)]
        claims = [claim_on(scope, key) if number % 2 else accepted_on(scope, key) for number, key in enumerate(keys)]
        assert store.perform_all(claims) == [held_as(claim) for claim in claims]
        for claim in claims:
            wanted = State.PENDING if claim.is_accepted else State.PROCESSING
            assert record(store, scope, claim.key).state is wanted

    def test_accepted_claim_whose_reply_was_lost(self, store: Handle, scope: str) -> None:
        """It finds its own token when it is repeated."""
        claim = accepted_on(scope)
        held(store, claim)
        again = store.perform(claim)
        assert isinstance(again, Found)
        assert (again.token, again.attempt, again.state) == (claim.token, 1, State.PENDING)

    def test_only_a_worker_begins_it(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """No client takes a pending record over, however old it is, before it expires."""
        hold = held(store, accepted_on(scope))
        for claim in (claim_on(scope), accepted_on(scope)):
            assert rival.perform(TakeOver(claim, hold)) is Again.AGAIN
            age(10 * LEASE)
        assert record(store, scope).state is State.PENDING

    def test_begun_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """A worker that begins it makes its first attempt: under a token and a lease of its own, the rest as it was."""
        hold = held(store, accepted_on(scope))
        before = record(store, scope)
        claim = claim_on(scope, fingerprint=b"", lease=2 * LEASE, retention=9 * RETENTION)
        assert rival.perform(TakeOver(claim, hold, is_abandoned=True)) == Hold(scope, "key", 1, claim.token)
        after = record(store, scope)
        assert (after.state, after.attempt, after.token) == (State.PROCESSING, 1, claim.token)
        assert (after.created_at, after.expires_at) == (before.created_at, before.expires_at)
        assert (after.fingerprint, after.is_accepted) == (FINGERPRINT, True)
        assert after.lease_left is not None
        assert 2 * LEASE - MOMENT < after.lease_left <= 2 * LEASE
        assert store.perform(ReadRequest(held_as(claim))) == REQUEST
        # The request that stored it is no longer its holder.
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, CREATED))
        assert rival.perform(Renew(((held_as(claim), LEASE),))) == frozenset()

    def test_one_of_many_workers_begins_it(self, store: Handle, rival: Handle, scope: str) -> None:
        """Of several workers that see it, one begins it."""
        hold = held(store, accepted_on(scope))
        got = race([(each, TakeOver(claim_on(scope), hold, is_abandoned=True)) for each in (store, rival)])
        got += store.perform_all([TakeOver(claim_on(scope), hold, is_abandoned=True) for _ in range(CROWD)])
        assert sum(isinstance(each, Hold) for each in got) == 1
        assert all(isinstance(each, Hold) or each is Again.AGAIN for each in got)

    def test_taken_over_from_a_dead_worker(self, store: Handle, scope: str, age: Age) -> None:
        """When its worker is silent past the lease another takes it over, and that is the second attempt and try."""
        begun = worker_of(store, held(store, accepted_on(scope)))
        assert store.perform(TakeOver(claim_on(scope), begun, is_abandoned=True)) is Again.AGAIN
        age(LEASE)
        (stuck,) = waiting(store, scope)
        assert (stuck.hold, stuck.tries, stuck.is_accepted, stuck.has_request) == (begun, 1, True, True)
        successor = worker_of(store, begun)
        assert successor.attempt == 2
        age(LEASE)
        assert [each.tries for each in waiting(store, scope)] == [2]
        assert store.perform(ReadRequest(successor)) == REQUEST
        assert record(store, scope).is_accepted

    def test_released_while_pending(self, store: Handle, rival: Handle, scope: str) -> None:
        """Freed before it was begun, the record is deleted, also by its token alone; the key is new."""
        for number, attempt in enumerate((1, 0), 1):
            hold = held(store, accepted_on(scope))
            self._is_fenced(rival, scope, Release(replace(hold, token=uuid4().bytes)))
            assert store.perform(Release(replace(hold, attempt=attempt), wakes=True)) is Verdict.DONE
            assert store.perform(Look(scope, "key")) is None
            assert [line.event for line in store.perform(ReadTrail(scope, "key"))] == ["released"] * number
        assert held(rival, claim_on(scope, fingerprint=b"another")).attempt == 1

    def test_given_up_when_it_was_begun(self, store: Handle, scope: str) -> None:
        """Freed by its worker, the record stays without a holder: its client was told that it would be run."""
        begun = worker_of(store, held(store, accepted_on(scope)))
        assert store.perform(Release(begun)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.attempt, after.token, after.is_accepted) == (
            State.PROCESSING,
            1,
            NO_TOKEN,
            True,
        )
        assert after.is_stuck
        assert store.perform(ReadRequest(replace(begun, token=NO_TOKEN))) == REQUEST
        assert worker_of(store, replace(begun, token=NO_TOKEN)).attempt == 2

    def test_accepted_record_has_ended(self, store: Handle, scope: str) -> None:
        """When it has ended its request is gone, and its answer is kept like any other."""
        begun = worker_of(store, held(store, accepted_on(scope)))
        assert store.perform(Complete(begun, Event.COMPLETE, CREATED, wakes=True)) is Verdict.DONE
        assert store.perform(ReadRequest(begun)) is None
        after = record(store, scope)
        assert (after.state, after.answer, after.is_accepted) == (State.COMPLETE, CREATED, True)
        self._is_fenced(store, scope, Release(begun))

    def test_expired_pending_record(self, store: Handle, scope: str, age: Age) -> None:
        """Past its retention it is a new operation, accepted or not, as the new claim says."""
        hold = held(store, accepted_on(scope))
        age(RETENTION)
        assert found(store, scope).is_expired
        # No client has asked for it again, so a worker does not touch it.
        assert store.perform(TakeOver(claim_on(scope), hold, is_abandoned=True)) is Again.AGAIN
        new = taken_over(store, claim_on(scope, fingerprint=b"new"), hold)
        after = record(store, scope)
        assert (after.state, after.attempt, after.fingerprint, after.is_accepted) == (
            State.PROCESSING,
            1,
            b"new",
            False,
        )
        assert store.perform(ReadRequest(new)) is None

"""Guarantee 12, continued: an operation that no worker has begun is found, parked, discarded and reaped."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from semel.core.commands import (
    Browse,
    Complete,
    Discard,
    FindStuck,
    Look,
    Mark,
    Park,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    Release,
    Renew,
    Save,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.record import NO_TOKEN, Hold, Milestone
from semel.core.recovery import Progress
from semel.core.state import Event, State
from semel.core.upkeep import FIRST_PAUSE, MAX_DOUBLINGS, is_due, pause_after
from semel.testing.conformance.accepted import ALL, waiting
from semel.testing.conformance.base import (
    ABANDONED,
    CREATED,
    LEASE,
    REQUEST,
    RETENTION,
    RIDE,
    Age,
    Suite,
    accepted_on,
    claim_on,
    completed,
    held,
    held_as,
    parked,
    reap_everything,
    record,
    saved,
    taken_over,
    worker_of,
)
from semel.testing.conformance.handles import Handle, race

MOMENT = timedelta(minutes=1)
HALF = Milestone(0.5, "half")


def due(store: Handle, scope: str) -> list[str]:
    """Return the keys of what a worker may begin now."""
    stuck = store.perform(FindStuck(ALL, with_request=True, with_no_token=True, with_pending=True, only_due=True))
    return [each.hold.key for each in stuck if each.hold.scope == scope]


class Pending(Suite):
    """Accepted operations that wait for their first worker."""

    @pytest.mark.parametrize("state", ["pending", "processing", "complete", "failed"])
    def test_accepted_in_place_of_an_expired_one(self, store: Handle, scope: str, age: Age, state: str) -> None:
        """An expired record can be accepted again: pending, the first attempt, without its former content."""
        hold = brought_to(store, scope, State(state))
        age(RETENTION)
        other = replace(REQUEST, principal="another")
        claim = accepted_on(scope, fingerprint=b"new", request=other)
        assert taken_over(store, claim, hold) == held_as(claim)
        after = record(store, scope)
        assert (after.state, after.attempt, after.fingerprint) == (State.PENDING, 1, b"new")
        assert (after.is_accepted, after.answer, after.steps, after.milestone) == (True, None, None, None)
        assert RETENTION - MOMENT < after.retention_left <= RETENTION
        assert store.perform(ReadRequest(held_as(claim))) == other
        assert [each.tries for each in waiting(store, scope)] == [0]

    def test_pending_records_are_found_among_the_stuck(self, store: Handle, scope: str, age: Age) -> None:
        """Workers find pending records by age among the stuck, the longest silent first; other services do not."""
        first = held(store, accepted_on(scope, "first", on_crash="refuse"))
        age(MOMENT)
        silent = held(store, claim_on(scope, "silent", lease=LEASE, request=REQUEST))
        age(LEASE + MOMENT)
        last = held(store, accepted_on(scope, "last"))
        assert [each.hold for each in waiting(store, scope)] == [first, silent, last]
        assert [each.hold for each in waiting(store, scope, with_pending=False)] == [silent]
        pending, *_ = waiting(store, scope)
        assert (pending.on_crash, pending.steps, pending.has_request, pending.tries) == ("refuse", None, True, 0)
        assert pending.is_accepted
        assert 2 * MOMENT + LEASE <= pending.silent_for < 3 * MOMENT + LEASE
        assert [each.hold for each in store.perform(FindStuck(1, with_pending=True))] != [last]
        age(RETENTION)
        assert waiting(store, scope) == []  # by now they are the reaper's

    def test_scopes_take_turns(self, store: Handle, scope: str, age: Age) -> None:
        """However many operations of one scope wait, and for however long, the oldest of any other is found before its
        second: also where no more are asked for than one of each.
        """
        many, other = f"{scope}-many", f"{scope}-other"
        for number in range(20):
            held(store, accepted_on(many, f"{number:02}"))
        age(MOMENT)
        for key in ("first", "second"):
            held(store, accepted_on(other, key))
            age(MOMENT)
        wanted = FindStuck(ALL, with_request=True, with_no_token=True, with_pending=True, only_due=True)
        found = [each.hold for each in store.perform(wanted)]
        ours = [each for each in found if each.scope in {many, other}]
        assert [each.scope for each in ours] == [many, other, many, other] + [many] * 18
        assert [each.key for each in ours if each.scope == other] == ["first", "second"]
        scopes = {each.scope for each in found}
        few = store.perform(replace(wanted, limit=len(scopes)))
        assert {each.hold.scope for each in few} == scopes

    def test_only_those_whose_time_has_come(self, store: Handle, scope: str, age: Age) -> None:
        """A search for due records finds the pending ones, those of dead workers, and those after their pause: an
        ordinary one after its lease, and one that workers gave up after a longer pause with each try. Records that are
        not due hide none of them.
        """
        held(store, claim_on(scope, "ordinary", lease=LEASE, request=REQUEST))
        worker_of(store, held(store, accepted_on(scope, "dead")))
        age(LEASE)
        store.perform(Release(worker_of(store, held(store, accepted_on(scope, "given up")))))
        held(store, accepted_on(scope, "pending"))
        assert sorted(due(store, scope)) == ["dead", "pending"]
        (first,) = store.perform(FindStuck(1, with_request=True, with_no_token=True, with_pending=True, only_due=True))
        assert is_due(first)
        age(FIRST_PAUSE)
        assert sorted(due(store, scope)) == ["dead", "given up", "ordinary", "pending"]
        for tries in range(1, MAX_DOUBLINGS + 3):
            (seen,) = (each for each in waiting(store, scope) if each.hold.key == "given up")
            store.perform(Release(worker_of(store, seen.hold)))
            age(pause_after(tries) - FIRST_PAUSE)
            assert "given up" not in due(store, scope)
            age(FIRST_PAUSE)
            assert "given up" in due(store, scope)

    def test_pending_records_are_shown(self, store: Handle, scope: str) -> None:
        """Operators find a pending record by its state, and see that it was accepted."""
        held(store, accepted_on(scope))
        (seen,) = store.perform(Browse(9, scope=scope, state=State.PENDING))
        assert (seen.key, seen.is_accepted, seen.milestone) == ("key", True, None)
        assert store.perform(Browse(9, scope=scope, state=State.PROCESSING)) == ()

    def test_parked_while_pending(self, store: Handle, rival: Handle, scope: str) -> None:
        """It can be parked before it was begun, once; and goes on when an operator has resolved it."""
        hold = held(store, accepted_on(scope))
        got = race([(each, Park(hold, if_silent=True)) for each in (store, rival)])
        assert sorted(each.value for each in got) == ["done", "fenced"]
        seen = record(store, scope)
        assert (seen.state, seen.is_accepted) == (State.UNKNOWN, True)
        assert store.perform(ReadRequest(hold)) == REQUEST
        assert store.perform(Unpark(hold, Progress())) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.attempt, after.token, after.steps) == (State.PROCESSING, 2, NO_TOKEN, None)
        assert worker_of(store, Hold(scope, "key", 2, NO_TOKEN)).attempt == 3

    def test_discarded_while_pending(self, store: Handle, scope: str) -> None:
        """An operator can discard it, and the key is new."""
        hold = held(store, accepted_on(scope))
        self._is_fenced(store, scope, Discard(replace(hold, token=uuid4().bytes)))
        assert store.perform(Discard(hold)) is Verdict.DONE
        assert store.perform(Look(scope, "key")) is None
        assert held(store, claim_on(scope)).attempt == 1

    def test_pending_record_has_no_worker(self, store: Handle, scope: str) -> None:
        """What only a worker does is refused while there is none."""
        hold = held(store, accepted_on(scope))
        for command in (
            Complete(hold, Event.COMPLETE, CREATED),
            Save(hold, RIDE),
            Mark(hold, HALF),
            Sweep(hold),
        ):
            self._is_fenced(store, scope, command)
        assert store.perform(Renew(((hold, LEASE),))) == {hold}

    def test_nobody_ran_it(self, store: Handle, scope: str, age: Age) -> None:
        """A record that was not begun within its retention fails with the reaper's answer, and is deleted next time."""
        reap_everything(store, age)
        hold = held(store, accepted_on(scope))
        age(RETENTION - MOMENT)
        assert store.perform(Reap(10, ABANDONED)) == Reaped()
        age(MOMENT)
        assert store.perform(Reap(10, ABANDONED)) == Reaped(failed=1)
        after = record(store, scope)
        assert (after.state, after.answer, after.token) == (State.FAILED, ABANDONED, NO_TOKEN)
        assert store.perform(ReadRequest(hold)) is None
        self._is_fenced(store, scope, Release(hold))
        assert store.perform(Reap(10, ABANDONED)) == Reaped(deleted=1)
        assert [line.event for line in store.perform(ReadTrail(scope, "key"))] == ["abandoned"]

    def test_story_of_an_accepted_one(self, store: Handle, scope: str, age: Age) -> None:
        """The audit trail has what the record does not show: every attempt after the first, and how it ended."""
        hold = held(store, accepted_on(scope))
        begun = worker_of(store, hold)
        store.perform(Mark(begun, HALF))
        age(LEASE)
        successor = worker_of(store, begun)
        store.perform(Release(successor))
        last = worker_of(store, replace(successor, token=NO_TOKEN))
        store.perform(Complete(last, Event.FAIL, CREATED))
        assert [(line.attempt, line.event) for line in store.perform(ReadTrail(scope, "key"))] == [
            (2, "taken over"),
            (2, "given up"),
            (3, "taken over"),
        ]


def brought_to(store: Handle, scope: str, state: State) -> Hold:
    """Bring a record into *state*."""
    match state:
        case State.PENDING:
            return held(store, accepted_on(scope))
        case State.PROCESSING:
            hold = saved(store, worker_of(store, held(store, accepted_on(scope))))
            store.perform(Mark(hold, HALF))
            return hold
        case State.UNKNOWN:
            return parked(store, claim_on(scope, request=REQUEST))
        case State.COMPLETE:
            return completed(store, claim_on(scope))
        case State.FAILED:
            hold = worker_of(store, held(store, accepted_on(scope)))
            store.perform(Complete(hold, Event.FAIL, CREATED))
            return hold

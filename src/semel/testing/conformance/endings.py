"""Guarantees 2, 3 and 7: only the holder writes, an ending is final, and repeating it is safe."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from uuid import uuid4

import pytest

from semel.core.commands import Complete, Look, Release, Renew, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    CREATED,
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
from semel.testing.conformance.handles import Handle

OTHER = Answer(500, (), b"another answer")
MANY = 200


def _other_attempt(hold: Hold) -> Hold:
    return replace(hold, attempt=hold.attempt + 1)


def _other_token(hold: Hold) -> Hold:
    return replace(hold, token=uuid4().bytes)


not_the_holder = pytest.mark.parametrize("other", [_other_attempt, _other_token], ids=["attempt", "token"])


class Endings(Suite):
    """Complete, release and renew."""

    @pytest.mark.parametrize(
        "event, state", [(Event.COMPLETE, State.COMPLETE), (Event.FAIL, State.FAILED)], ids=["complete", "failed"]
    )
    def test_holder_ends_it(self, store: Handle, scope: str, event: Event, state: State) -> None:
        """The holder stores how it ended; the lease is gone, and the record says when it ended."""
        hold = held(store, claim_on(scope))
        assert store.perform(Complete(hold, event, CREATED)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.answer, after.lease_expires_at) == (state, CREATED, None)
        assert after.completed_at is not None
        assert after.created_at <= after.completed_at

    def test_late_but_still_the_holder(self, store: Handle, scope: str, age: Age) -> None:
        """A worker with an expired lease that was not taken over still stores its answer."""
        hold = held(store, claim_on(scope))
        age(2 * LEASE)
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE

    @not_the_holder
    def test_other_can_not_end_it(self, store: Handle, scope: str, other: Callable[[Hold], Hold]) -> None:
        """A completion under another attempt, or under the same attempt and another token, is fenced."""
        hold = held(store, claim_on(scope))
        self._is_fenced(store, scope, Complete(other(hold), Event.COMPLETE, OTHER))

    @not_the_holder
    def test_other_can_not_free_it(self, store: Handle, scope: str, other: Callable[[Hold], Hold]) -> None:
        """A release under another attempt, or under the same attempt and another token, is fenced."""
        hold = held(store, claim_on(scope))
        self._is_fenced(store, scope, Release(other(hold)))

    @not_the_holder
    def test_other_can_not_renew_it(self, store: Handle, scope: str, other: Callable[[Hold], Hold]) -> None:
        """A renewal under another attempt, or under the same attempt and another token, is lost."""
        stranger = other(held(store, claim_on(scope)))
        before = record(store, scope)
        assert store.perform(Renew(((stranger, 9 * LEASE),))) == {stranger}
        assert record(store, scope).lease_expires_at == before.lease_expires_at

    def test_zombie_writes_nothing(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A worker that was taken over from can neither end, free nor renew; the new worker can."""
        zombie = held(store, claim_on(scope))
        age(LEASE)
        successor = taken_over(rival, claim_on(scope), zombie)
        self._is_fenced(store, scope, Complete(zombie, Event.COMPLETE, OTHER))
        self._is_fenced(store, scope, Release(zombie))
        assert store.perform(Renew(((zombie, LEASE), (successor, LEASE)))) == {zombie}
        assert rival.perform(Complete(successor, Event.COMPLETE, CREATED)) is Verdict.DONE
        self._is_fenced(store, scope, Complete(zombie, Event.COMPLETE, OTHER))
        self._is_fenced(store, scope, Release(zombie))
        assert record(store, scope).answer == CREATED

    def test_nothing_to_end(self, store: Handle, scope: str) -> None:
        """A record that was freed can't be completed or renewed, and neither creates it again."""
        hold = held(store, claim_on(scope))
        store.perform(Release(hold))
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.FENCED
        assert store.perform(Renew(((hold, LEASE),))) == {hold}
        assert store.perform(Look(scope, "key")) is None

    def test_completion_may_be_repeated(self, store: Handle, rival: Handle, scope: str) -> None:
        """A completion that is repeated after a lost reply is DONE, on another connection, too."""
        hold = completed(store, claim_on(scope))
        for each in (store, rival):
            assert each.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert store.perform_all([Complete(hold, Event.COMPLETE, CREATED)] * 3) == [Verdict.DONE] * 3

    def test_first_ending_counts(self, store: Handle, scope: str) -> None:
        """A stored answer does not change, not even under its own hold."""
        hold = completed(store, claim_on(scope))
        before = record(store, scope)
        assert store.perform(Complete(hold, Event.FAIL, OTHER)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.answer, after.completed_at) == (State.COMPLETE, CREATED, before.completed_at)

    def test_ended_record_is_not_freed(self, store: Handle, scope: str) -> None:
        """What has ended can't be freed, nor renewed, not even under its own hold."""
        hold = completed(store, claim_on(scope))
        self._is_fenced(store, scope, Release(hold))
        self._is_fenced(store, scope, Release(replace(hold, attempt=0)))
        assert store.perform(Renew(((hold, LEASE),))) == {hold}
        assert record(store, scope).lease_expires_at is None

    def test_replays_write_nothing(self, store: Handle, scope: str) -> None:
        """Any number of claims on an ended record leave it as it was."""
        completed(store, claim_on(scope))
        before = record(store, scope)
        store.perform_all([claim_on(scope, fingerprint=b"another") for _ in range(10)])
        after = record(store, scope)
        assert replace(after, retention_left=before.retention_left) == before

    def test_completion_keeps_its_retention(self, store: Handle, scope: str, age: Age) -> None:
        """Retention counts from the first request with the key, not from its end."""
        hold = held(store, claim_on(scope))
        age(LEASE)
        before = record(store, scope)
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        after = record(store, scope)
        assert (after.created_at, after.expires_at) == (before.created_at, before.expires_at)

    def test_freed_key_can_be_claimed(self, store: Handle, rival: Handle, scope: str) -> None:
        """A freed key is new: attempt 1, with another fingerprint, for any request."""
        hold = held(store, claim_on(scope))
        assert store.perform(Release(hold)) is Verdict.DONE
        assert store.perform(Look(scope, "key")) is None
        assert held(rival, claim_on(scope, fingerprint=b"another")).attempt == 1

    def test_release_may_be_repeated(self, store: Handle, rival: Handle, scope: str) -> None:
        """A release that is repeated after a lost reply is DONE."""
        hold = held(store, claim_on(scope))
        assert [each.perform(Release(hold)) for each in (store, rival, store)] == [Verdict.DONE] * 3

    def test_release_does_not_reach_the_next(self, store: Handle, rival: Handle, scope: str) -> None:
        """A release that arrives late does not free a key that was claimed since, again as attempt 1."""
        hold = held(store, claim_on(scope))
        store.perform(Release(hold))
        held(rival, claim_on(scope))
        self._is_fenced(store, scope, Release(hold))
        self._is_fenced(store, scope, Release(replace(hold, attempt=0)))
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, OTHER))

    def test_attempt_zero_stands_for_any(self, store: Handle, scope: str, age: Age) -> None:
        """A release that knows only its token frees the attempt with that token, whatever its number."""
        first = held(store, claim_on(scope))
        age(LEASE)
        second = taken_over(store, claim_on(scope), first)
        assert store.perform(Release(replace(first, attempt=0))) is Verdict.FENCED
        assert store.perform(Release(replace(second, attempt=0))) is Verdict.DONE
        assert record(store, scope).is_stuck

    def test_freed_after_a_take_over(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A later attempt that did nothing frees the key at once, but an earlier one may have done something: its
        fingerprint and its count stay, without a holder.
        """
        first = held(store, claim_on(scope))
        age(LEASE)
        second = taken_over(store, claim_on(scope), first)
        assert store.perform(Release(second)) is Verdict.DONE
        found = rival.perform(claim_on(scope, fingerprint=b"another"))
        assert isinstance(found, Found)
        assert (found.attempt, found.fingerprint, found.lease_is_over) == (2, claim_on(scope).fingerprint, True)
        self._is_fenced(store, scope, Complete(second, Event.COMPLETE, OTHER))
        assert store.perform(Renew(((second, LEASE),))) == {second}
        third = taken_over(rival, claim_on(scope), replace(second, token=found.token))
        assert third.attempt == second.attempt + 1

    def test_attempt_zero_of_a_claim_that_never_came(self, store: Handle, scope: str) -> None:
        """Freeing a claim that may not have arrived is DONE without a record, and fenced if another worker has it."""
        lost = Hold(scope, "key", 0, uuid4().bytes)
        assert store.perform(Release(lost)) is Verdict.DONE
        held(store, claim_on(scope))
        self._is_fenced(store, scope, Release(lost))

    def test_attempt_zero_is_for_release_alone(self, store: Handle, scope: str) -> None:
        """A completion or a renewal must know its attempt."""
        unknown = replace(held(store, claim_on(scope)), attempt=0)
        self._is_fenced(store, scope, Complete(unknown, Event.COMPLETE, OTHER))
        assert store.perform(Renew(((unknown, LEASE),))) == {unknown}

    def test_renewed_lease_runs_from_now(self, store: Handle, scope: str, age: Age) -> None:
        """A renewal starts the lease again, at its own length, and changes nothing else."""
        hold = held(store, claim_on(scope))
        age(LEASE - timedelta(minutes=1))
        before = record(store, scope)
        assert store.perform(Renew(((hold, 2 * LEASE),))) == frozenset()
        after = record(store, scope)
        assert after.lease_left is not None
        assert 2 * LEASE - timedelta(minutes=1) < after.lease_left <= 2 * LEASE
        rest = attrgetter("attempt", "token", "created_at", "expires_at")
        assert rest(after) == rest(before)

    def test_late_renewal(self, store: Handle, scope: str, age: Age) -> None:
        """A lease that ran out, and was not taken over, can still be renewed."""
        hold = held(store, claim_on(scope))
        age(2 * LEASE)
        assert store.perform(Renew(((hold, LEASE),))) == frozenset()
        found = store.perform(claim_on(scope))
        assert isinstance(found, Found)
        assert not found.lease_is_over

    def test_renewal_reports_only_the_lost(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """One renewal for many: the taken, the freed and the ended are lost; the rest are renewed."""
        taken, freed, ended, *live = [held(store, claim_on(scope, f"key {number}")) for number in range(MANY)]
        age(LEASE)
        taken_over(rival, claim_on(scope, taken.key), taken)
        store.perform(Release(freed))
        store.perform(Complete(ended, Event.COMPLETE, CREATED))
        leases = {hold: LEASE * (1 + number % 3) for number, hold in enumerate([taken, freed, ended, *live])}
        assert store.perform(Renew(tuple(leases.items()))) == {taken, freed, ended}
        for hold in (live[0], live[1], live[-1]):
            left = record(store, scope, hold.key).lease_left
            assert left is not None
            assert leases[hold] - timedelta(minutes=1) < left <= leases[hold]

    def test_renewing_nothing(self, store: Handle) -> None:
        """A renewal of no holds loses none."""
        assert store.perform(Renew(())) == frozenset()

    def test_crowd_ends_together(self, store: Handle, scope: str) -> None:
        """Many completions at once: each record gets its own answer; only the fenced ones get FENCED."""
        holds = [held(store, claim_on(scope, f"key {number}")) for number in range(MANY)]
        commands = [
            Complete(_other_token(hold) if number % 10 == 0 else hold, Event.COMPLETE, Answer(200, (), b"%d" % number))
            for number, hold in enumerate(holds)
        ]
        got = store.perform_all(commands)
        assert got == [Verdict.FENCED if number % 10 == 0 else Verdict.DONE for number in range(MANY)]
        for number in (1, 99, MANY - 1):
            assert record(store, scope, f"key {number}").answer == Answer(200, (), b"%d" % number)
        assert record(store, scope, "key 0").state is State.PROCESSING

    def test_holder_and_stranger_end_together(self, store: Handle, scope: str) -> None:
        """The holder's completion and another worker's, of one record and in one batch, get different verdicts."""
        hold = held(store, claim_on(scope))
        stranger = _other_token(hold)
        commands = [Complete(each, Event.COMPLETE, Answer(200, (), each.token)) for each in (stranger, hold, stranger)]
        assert store.perform_all(commands) == [Verdict.FENCED, Verdict.DONE, Verdict.FENCED]
        assert record(store, scope).answer == Answer(200, (), hold.token)

    def test_crowd_is_freed_together(self, store: Handle, scope: str) -> None:
        """Many releases at once free their own keys, and fenced ones none."""
        holds = [held(store, claim_on(scope, f"key {number}")) for number in range(MANY)]
        got = store.perform_all(
            [Release(_other_token(hold) if number % 10 == 0 else hold) for number, hold in enumerate(holds)]
        )
        assert got == [Verdict.FENCED if number % 10 == 0 else Verdict.DONE for number in range(MANY)]
        left = [number for number in range(MANY) if store.perform(Look(scope, f"key {number}")) is not None]
        assert left == list(range(0, MANY, 10))

    def test_expired_but_not_taken(self, store: Handle, scope: str, age: Age) -> None:
        """Expiry alone changes nothing: until it is taken over, a repeated completion is still DONE."""
        hold = completed(store, claim_on(scope))
        age(RETENTION)
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert record(store, scope).answer == CREATED

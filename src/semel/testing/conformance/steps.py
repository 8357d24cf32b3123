"""Guarantee 9: steps and recovery points stay until the record expires, and no release deletes such a record."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from semel.core.commands import (
    Again,
    Browse,
    Complete,
    FindStuck,
    Look,
    Park,
    ReadRequest,
    Release,
    Renew,
    Save,
    Settle,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.record import NO_TOKEN, Found, Hold
from semel.core.recovery import Done, Progress, written
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    CREATED,
    FINGERPRINT,
    IN_DOUBT,
    LEASE,
    REQUEST,
    RETENTION,
    RIDE,
    Age,
    Suite,
    claim_on,
    completed,
    found,
    held,
    parked,
    record,
    same_but_for_the_clock,
    saved,
    taken_over,
    timeless,
)
from semel.testing.conformance.handles import Handle


class Steps(Suite):
    """Save, park and settle."""

    def test_new_record_has_no_steps(self, store: Handle, scope: str) -> None:
        """A record begins without steps and without a recovery point."""
        held(store, claim_on(scope))
        assert (record(store, scope).steps, record(store, scope).recovery_point) == (None, None)
        assert found(store, scope).steps is None

    def test_steps_come_back(self, store: Handle, rival: Handle, scope: str) -> None:
        """Saved steps come back in every read and claim, text for text; nothing else changes."""
        hold = held(store, claim_on(scope))
        before = record(store, scope)
        saved(store, hold)
        after = record(rival, scope)
        assert (after.steps, after.recovery_point) == (written(RIDE), "ride_created")
        assert same_but_for_the_clock(before, replace(after, steps=None, recovery_point=None))
        assert timeless(found(rival, scope)) == replace(self._in_progress(hold), steps=written(RIDE))

    def test_recovery_point_is_the_last_that_is_done(self, store: Handle, scope: str) -> None:
        """An effect that was only begun is stored as a step, but is not a recovery point."""
        hold = saved(store, held(store, claim_on(scope)), IN_DOUBT)
        assert (record(store, scope).steps, record(store, scope).recovery_point) == (written(IN_DOUBT), "ride_created")
        further = IN_DOUBT.plus(Done("effect", "charge_created", None))
        saved(store, hold, further)
        assert (record(store, scope).steps, record(store, scope).recovery_point) == (written(further), "charge_created")

    def test_no_steps_are_none(self, store: Handle, scope: str) -> None:
        """Saving no steps removes those that were there."""
        hold = saved(store, held(store, claim_on(scope)))
        saved(store, hold, Progress())
        assert (record(store, scope).steps, record(store, scope).recovery_point) == (None, None)

    def test_saving_may_be_repeated(self, store: Handle, rival: Handle, scope: str) -> None:
        """A save that is repeated after a lost reply is DONE, on another connection, too."""
        hold = held(store, claim_on(scope))
        assert [each.perform(Save(hold, RIDE)) for each in (store, rival, store)] == [Verdict.DONE] * 3
        assert record(store, scope).steps == written(RIDE)

    def test_a_save_that_arrives_late_sets_nothing_back(self, store: Handle, rival: Handle, scope: str) -> None:
        """A delayed copy changes nothing once the operation has gone on."""
        hold = saved(store, held(store, claim_on(scope)), IN_DOUBT)
        self._is_fenced(rival, scope, Save(hold, RIDE))
        saved(store, hold, IN_DOUBT.plus(Done("effect", "charge_created", None)))
        self._is_fenced(rival, scope, Save(hold, IN_DOUBT, RIDE))

    def test_taking_over_without_a_client(self, store: Handle, scope: str, age: Age) -> None:
        """Such take-overs are counted, until an operator resolves; and a record that expired is left alone."""
        hold = saved(store, held(store, claim_on(scope)))
        for tries in range(1, 3):
            age(LEASE)
            (stuck,) = (each for each in store.perform(FindStuck(1000)) if each.hold == hold)
            assert stuck.tries == tries - 1
            hold = _taken(store.perform(TakeOver(claim_on(scope), hold, is_abandoned=True)))
        store.perform(Park(hold))
        store.perform(Unpark(hold, RIDE))
        (stuck,) = (each for each in store.perform(FindStuck(1000, with_no_token=True)) if each.hold.scope == scope)
        assert stuck.tries == 0
        age(RETENTION)
        assert store.perform(TakeOver(claim_on(scope), stuck.hold, is_abandoned=True)) is Again.AGAIN
        assert record(store, scope).steps == written(RIDE)

    def test_only_the_holder_saves(self, store: Handle, scope: str) -> None:
        """A save under another attempt, another token, or of a record that is not there, is fenced."""
        hold = held(store, claim_on(scope))
        for stranger in (replace(hold, attempt=2), replace(hold, attempt=0), replace(hold, token=uuid4().bytes)):
            self._is_fenced(store, scope, Save(stranger, RIDE))
        assert store.perform(Save(replace(hold, key="absent"), RIDE)) is Verdict.FENCED
        assert store.perform(Look(scope, "absent")) is None

    def test_zombie_saves_nothing(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A worker that was taken over from can't save, and what the new worker saved stays."""
        zombie = saved(store, held(store, claim_on(scope)))
        age(LEASE)
        successor = taken_over(rival, claim_on(scope), zombie)
        self._is_fenced(store, scope, Save(zombie, Progress(), RIDE))
        saved(rival, successor, IN_DOUBT)
        self._is_fenced(store, scope, Save(zombie, RIDE, IN_DOUBT))

    def test_ended_record_takes_no_steps(self, store: Handle, scope: str) -> None:
        """A record that has ended, or is parked, keeps its steps as they are."""
        hold = saved(store, held(store, claim_on(scope)))
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        self._is_fenced(store, scope, Save(hold, IN_DOUBT, RIDE))
        assert record(store, scope).steps == written(RIDE)
        stopped = parked(store, claim_on(scope, "parked"))
        self._is_fenced(store, scope, Save(stopped, RIDE, IN_DOUBT), "parked")

    def test_steps_stay_through_take_overs(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Each attempt goes on where the last one stopped."""
        hold = saved(store, held(store, claim_on(scope)))
        for _ in range(2):
            age(LEASE)
            hold = taken_over(rival, claim_on(scope), hold)
            assert found(store, scope).steps == written(RIDE)
        assert (hold.attempt, record(store, scope).recovery_point) == (3, "ride_created")

    def test_expired_steps_are_gone(self, store: Handle, scope: str, age: Age) -> None:
        """Past its retention a key is a new operation, without steps, whether the old one ended or not."""
        for key, end in (("ended", True), ("left", False)):
            hold = saved(store, held(store, claim_on(scope, key)))
            if end:
                store.perform(Complete(hold, Event.COMPLETE, CREATED))
        age(RETENTION)
        for key in ("ended", "left"):
            seen = found(store, scope, key)
            new = taken_over(store, claim_on(scope, key), replace(hold, key=key, token=seen.token))
            assert (new.attempt, record(store, scope, key).steps, record(store, scope, key).recovery_point) == (
                1,
                None,
                None,
            )

    def test_release_keeps_what_has_steps(self, store: Handle, rival: Handle, scope: str) -> None:
        """A first attempt with a saved step stays when it is released, without a holder; it may be taken over."""
        hold = saved(store, held(store, claim_on(scope)))
        assert store.perform(Release(hold)) is Verdict.DONE
        seen = found(rival, scope)
        assert (seen.token, seen.lease_is_over, seen.steps) == (NO_TOKEN, True, written(RIDE))
        self._is_fenced(store, scope, Save(hold, IN_DOUBT, RIDE))
        assert store.perform(Renew(((hold, LEASE),))) == {hold}
        assert taken_over(rival, claim_on(scope), replace(hold, token=seen.token)).attempt == 2

    def test_parked_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """A parked record has no lease and no answer; it keeps its token, its steps and its fingerprint."""
        hold = saved(store, held(store, claim_on(scope)), IN_DOUBT)
        before = record(store, scope)
        assert store.perform(Park(hold)) is Verdict.DONE
        after = record(rival, scope)
        assert (after.state, after.lease_expires_at, after.answer) == (State.UNKNOWN, None, None)
        assert replace(after, state=before.state, lease_expires_at=before.lease_expires_at) == replace(
            before, retention_left=after.retention_left, lease_left=None
        )
        seen = found(rival, scope)
        assert (seen.state, seen.token, seen.lease_is_over, seen.is_expired) == (
            State.UNKNOWN,
            hold.token,
            True,
            False,
        )

    def test_parking_may_be_repeated(self, store: Handle, rival: Handle, scope: str) -> None:
        """The worker that parks may ask twice; of others that ask at once, one gets DONE."""
        hold = parked(store, claim_on(scope))
        assert rival.perform(Park(hold)) is Verdict.DONE
        self._is_fenced(rival, scope, Park(hold, if_silent=True))

    def test_only_the_holder_parks(self, store: Handle, scope: str) -> None:
        """Parking compares attempt and token, and what has ended is not parked."""
        hold = held(store, claim_on(scope))
        for stranger in (replace(hold, attempt=2), replace(hold, token=uuid4().bytes)):
            self._is_fenced(store, scope, Park(stranger))
        ended = completed(store, claim_on(scope, "ended"))
        self._is_fenced(store, scope, Park(ended), "ended")
        assert store.perform(Park(replace(hold, key="absent"))) is Verdict.FENCED

    def test_parking_the_silent(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Another process parks a record only when its lease is over by the store's clock."""
        hold = held(store, claim_on(scope))
        age(LEASE - LEASE / 10)
        self._is_fenced(rival, scope, Park(hold, if_silent=True))
        age(LEASE / 10)
        assert rival.perform(Park(hold, if_silent=True)) is Verdict.DONE
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, CREATED))

    @pytest.mark.parametrize(
        "time", [RETENTION - LEASE, RETENTION, 400 * RETENTION], ids=["within", "at", "long after"]
    )
    def test_parked_record_stays(self, store: Handle, rival: Handle, scope: str, age: Age, time: timedelta) -> None:
        """Nothing ends, frees, renews or takes over a parked record, and it never expires, however long it waits."""
        hold = parked(store, claim_on(scope, request=REQUEST))
        age(time)
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, CREATED))
        self._is_fenced(store, scope, Release(hold))
        assert store.perform(Renew(((hold, LEASE),))) == {hold}
        for claim in (claim_on(scope), replace(claim_on(scope, request=REQUEST), is_accepted=True)):
            for is_abandoned in (False, True):
                assert store.perform(TakeOver(claim, hold, is_abandoned=is_abandoned)) is Again.AGAIN
        seen = found(rival, scope)
        assert (seen.state, seen.token, seen.is_expired) == (State.UNKNOWN, hold.token, False)
        after = record(store, scope)
        assert (after.state, after.steps, after.is_expired) == (State.UNKNOWN, written(IN_DOUBT), False)
        assert hold.key in {each.key for each in store.perform(Browse(9, scope=scope, state=State.UNKNOWN))}
        assert store.perform(ReadRequest(hold)) == REQUEST

    def test_settling_reads_the_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """When no transaction is open, settling returns the record, under any hold."""
        hold = saved(store, held(store, claim_on(scope)))
        seen = rival.perform(Settle(hold))
        assert seen is not None
        assert (seen.token, seen.steps) == (hold.token, written(RIDE))
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        seen = rival.perform(Settle(replace(hold, token=uuid4().bytes)))
        assert seen is not None
        assert (seen.token, seen.answer) == (hold.token, CREATED)
        assert rival.perform(Settle(replace(hold, key="absent"))) is None

    @staticmethod
    def _in_progress(hold: Hold) -> Found:
        return Found(
            State.PROCESSING, hold.attempt, hold.token, FINGERPRINT, None, lease_is_over=False, is_expired=False
        )


def _taken(outcome: Hold | Again) -> Hold:
    assert isinstance(outcome, Hold), outcome
    return outcome

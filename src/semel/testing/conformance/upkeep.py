"""Guarantee 10: keys of dead workers are swept, old records reaped, none in progress; and operators' commands."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from semel.core.commands import (
    Complete,
    Discard,
    FindStuck,
    Look,
    Now,
    ReadRequest,
    Reap,
    Reaped,
    Release,
    Renew,
    Resolution,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import NO_TOKEN, AfterRetention, Stuck
from semel.core.recovery import Done, written
from semel.core.state import Event, State
from semel.testing.conformance.base import (
    ABANDONED,
    CREATED,
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
    reap_everything,
    record,
    same_but_for_the_clock,
    saved,
    taken_over,
)
from semel.testing.conformance.handles import Handle, race

MANY = 150
#: More than any suite leaves behind.
ALL = 100_000


class Upkeep(Suite):
    """Sweeping, reaping and resolving."""

    def test_stuck_records(self, store: Handle, scope: str, age: Age) -> None:
        """Records in progress under an expired lease are found, with everything that the services need."""
        plain = held(store, claim_on(scope, "plain"))
        age(timedelta(minutes=1))
        full = saved(store, held(store, claim_on(scope, "full", on_crash="refuse", request=REQUEST)))
        held(store, claim_on(scope, "alive", lease=9 * LEASE))
        completed(store, claim_on(scope, "ended"))
        parked(store, claim_on(scope, "parked"))
        assert self._stuck(store, scope) == []
        age(LEASE)
        first, second = self._stuck(store, scope)
        assert (first.hold, first.on_crash, first.steps, first.has_request) == (plain, "rerun", None, False)
        assert (second.hold, second.on_crash, second.steps, second.has_request) == (full, "refuse", written(RIDE), True)
        assert timedelta(0) <= second.silent_for < first.silent_for < timedelta(minutes=2)
        assert first.silent_for - second.silent_for >= timedelta(minutes=1) - timedelta(seconds=1)

    def test_stuck_records_are_narrowed_down(self, store: Handle, scope: str, age: Age) -> None:
        """Records with a request can be searched for alone; those with a freed key are found only on request."""
        held(store, claim_on(scope, "plain"))
        kept = held(store, claim_on(scope, "kept", request=REQUEST))
        freed = saved(store, held(store, claim_on(scope, "freed", request=REQUEST)))
        store.perform(Release(freed))
        age(LEASE)
        assert {each.hold.key for each in self._stuck(store, scope)} == {"plain", "kept"}
        assert [each.hold for each in self._stuck(store, scope, with_request=True)] == [kept]
        everything = self._stuck(store, scope, with_no_token=True)
        assert {each.hold.key: each.is_unheld for each in everything} == {"plain": False, "kept": False, "freed": True}
        assert {each.hold.key for each in self._stuck(store, scope, with_request=True, with_no_token=True)} == {
            "kept",
            "freed",
        }
        assert len(store.perform(FindStuck(1))) == 1
        age(RETENTION)
        assert self._stuck(store, scope, with_no_token=True) == []  # by now they are the reaper's

    def test_kept_request(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A stored request comes back byte for byte, after take-overs, to its holder alone."""
        hold = held(store, claim_on(scope, request=REQUEST))
        assert rival.perform(ReadRequest(hold)) == REQUEST
        age(LEASE)
        successor = taken_over(rival, claim_on(scope), hold)
        assert store.perform(ReadRequest(successor)) == REQUEST
        for stranger in (hold, replace(successor, token=uuid4().bytes), replace(successor, key="absent")):
            assert store.perform(ReadRequest(stranger)) is None

    def test_request_with_an_empty_body(self, store: Handle, scope: str) -> None:
        """A request without a body is a request, too."""
        hold = held(store, claim_on(scope, request=replace(REQUEST, body=b"")))
        assert store.perform(ReadRequest(hold)) == replace(REQUEST, body=b"")
        assert store.perform(ReadRequest(held(store, claim_on(scope, "none")))) is None

    def test_credentials_are_not_kept(self, store: Handle, scope: str) -> None:
        """Credentials are not stored with a request; its principal is."""
        secret = (b"authorization", b"Bearer secret"), (b"cookie", b"session=secret")
        head = replace(REQUEST.head, headers=(*secret, *REQUEST.head.headers))
        hold = held(store, claim_on(scope, request=replace(REQUEST, head=head)))
        assert store.perform(ReadRequest(hold)) == REQUEST

    def test_request_ends_with_the_operation(self, store: Handle, scope: str, age: Age) -> None:
        """When the operation has ended its request is deleted; a new operation stores its own."""
        hold = held(store, claim_on(scope, request=REQUEST))
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        assert store.perform(ReadRequest(hold)) is None
        age(RETENTION)
        other = replace(REQUEST, principal="another")
        new = taken_over(store, claim_on(scope, request=other, on_crash="refuse"), hold)
        assert store.perform(ReadRequest(new)) == other
        age(LEASE)
        (stuck,) = self._stuck(store, scope)
        assert stuck.on_crash == "refuse"

    def test_swept_key(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A swept record has no holder and keeps all else; its worker, if it still lives, is fenced."""
        hold = saved(store, held(store, claim_on(scope)))
        age(LEASE)
        before = record(store, scope)
        assert rival.perform(Sweep(hold)) is Verdict.DONE
        assert same_but_for_the_clock(replace(before, token=NO_TOKEN), record(store, scope))
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, CREATED))
        assert store.perform(Renew(((hold, LEASE),))) == {hold}
        assert taken_over(store, claim_on(scope), replace(hold, token=NO_TOKEN)).attempt == 2

    def test_living_are_not_swept(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """The key of a worker that has renewed is not swept, nor that of the next worker, nor an ended one."""
        hold = held(store, claim_on(scope))
        self._is_fenced(rival, scope, Sweep(hold))
        age(LEASE)
        store.perform(Renew(((hold, LEASE),)))
        self._is_fenced(rival, scope, Sweep(hold))
        age(LEASE)
        successor = taken_over(store, claim_on(scope), hold)
        age(LEASE)
        self._is_fenced(rival, scope, Sweep(hold))
        self._is_fenced(rival, scope, Sweep(replace(successor, token=uuid4().bytes)))
        store.perform(Complete(successor, Event.COMPLETE, CREATED))
        self._is_fenced(rival, scope, Sweep(successor))
        assert rival.perform(Sweep(replace(successor, key="absent"))) is Verdict.FENCED

    def test_ended_records_are_deleted(self, store: Handle, scope: str, age: Age) -> None:
        """Past its retention an answer is deleted; within it, it stays."""
        reap_everything(store, age)
        completed(store, claim_on(scope, "old"))
        completed(store, claim_on(scope, "young", retention=2 * RETENTION))
        age(RETENTION - timedelta(minutes=1))
        assert store.perform(Reap(10, ABANDONED)) == Reaped()
        age(timedelta(minutes=1))
        assert store.perform(Reap(10, ABANDONED)) == Reaped(deleted=1)
        assert store.perform(Look(scope, "old")) is None
        assert record(store, scope, "young").answer == CREATED

    def test_answers_are_stripped(self, store: Handle, scope: str, age: Age) -> None:
        """If a late retry is to be refused, a tombstone stays: the status without headers and body, for ever."""
        reap_everything(store, age)
        hold = saved(store, held(store, claim_on(scope, after_retention="strip")))
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        age(RETENTION)
        assert store.perform(Reap(10, ABANDONED)) == Reaped(stripped=1)
        after = record(store, scope)
        assert (after.steps, after.recovery_point) == (None, None)
        assert (after.state, after.token, after.answer) == (State.COMPLETE, hold.token, Answer(201, (), None))
        age(10 * RETENTION)
        assert store.perform(Reap(10, ABANDONED)) == Reaped()
        assert found(store, scope).is_expired

    @pytest.mark.parametrize("how", ["claimed", "taken over"])
    @pytest.mark.parametrize(
        "after_retention, ahead, reaped",
        [
            ("strip", timedelta(hours=1), Reaped(stripped=1)),
            ("strip", timedelta(hours=-1), Reaped(deleted=1)),
            ("delete", timedelta(hours=1), Reaped(deleted=1)),
        ],
    )
    def test_keys_that_tell_their_time(
        self,
        *,
        store: Handle,
        scope: str,
        age: Age,
        after_retention: AfterRetention,
        ahead: timedelta,
        reaped: Reaped,
        how: str,
    ) -> None:
        """A key that tells its time leaves no tombstone, unless that is after the store's own clock at the claim."""
        reap_everything(store, age)
        old = completed(store, claim_on(scope)) if how == "taken over" else None
        if old is not None:
            age(RETENTION)
        claim = claim_on(scope, after_retention=after_retention, made_at=store.perform(Now()) + ahead)
        hold = held(store, claim) if old is None else taken_over(store, claim, old)
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        age(RETENTION)
        assert store.perform(Reap(10, ABANDONED)) == reaped

    def test_abandoned_records_fail(self, store: Handle, scope: str, age: Age) -> None:
        """A record that did not end within its retention fails with the reaper's answer, and is deleted next time."""
        reap_everything(store, age)
        hold = saved(store, held(store, claim_on(scope, request=REQUEST)))
        age(RETENTION)
        assert store.perform(Reap(10, ABANDONED)) == Reaped(failed=1)
        after = record(store, scope)
        assert (after.state, after.answer) == (State.FAILED, ABANDONED)
        assert after.completed_at is not None
        assert store.perform(ReadRequest(hold)) is None
        # Its worker, if it still lives, must not believe that its own answer is the one that is kept.
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, CREATED))
        assert store.perform(Reap(10, ABANDONED)) == Reaped(deleted=1)

    def test_nothing_in_flight_is_reaped(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A worker that still renews past the retention keeps its record; and what is parked waits for its operator."""
        reap_everything(store, age)
        hold = held(store, claim_on(scope))
        parked(store, claim_on(scope, "parked"))
        age(RETENTION)
        store.perform(Renew(((hold, LEASE),)))
        before = record(store, scope)
        assert rival.perform(Reap(10, ABANDONED)) == Reaped()
        assert same_but_for_the_clock(before, record(store, scope))
        assert record(store, scope, "parked").state is State.UNKNOWN
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE

    def test_oldest_are_reaped_first(self, store: Handle, scope: str, age: Age) -> None:
        """A round takes so many and no more, of all kinds together, beginning with what expired first."""
        reap_everything(store, age)
        for number in range(3):
            completed(store, claim_on(scope, f"deleted {number}"))
            age(timedelta(minutes=1))
            completed(store, claim_on(scope, f"stripped {number}", after_retention="strip"))
            age(timedelta(minutes=1))
            held(store, claim_on(scope, f"failed {number}"))
            age(timedelta(minutes=1))
        age(RETENTION)
        assert store.perform(Reap(2, ABANDONED)) == Reaped(deleted=1, stripped=1)
        assert store.perform(Reap(4, ABANDONED)) == Reaped(deleted=1, stripped=1, failed=2)
        assert store.perform(Look(scope, "deleted 1")) is None
        assert record(store, scope, "deleted 2").answer == CREATED

    def test_several_reap_at_once(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Rounds that run at the same time take each record once, and miss none."""
        reap_everything(store, age)
        store.perform_all([claim_on(scope, f"key {number}") for number in range(MANY)])
        age(RETENTION)
        rounds = race([(each, Reap(MANY, ABANDONED)) for each in (store, rival)])
        assert sum(each.failed for each in rounds) == MANY
        rounds += race([(each, Reap(MANY, ABANDONED)) for each in (store, rival)])
        assert sum(each.failed for each in rounds) == MANY
        assert sum(each.deleted for each in rounds) == MANY
        assert store.perform(Look(scope, "key 0")) is None

    def test_discarded_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """An operator frees a key whatever it did: the record is deleted, its holder is fenced, and the key is new."""
        hold = saved(store, held(store, claim_on(scope)))
        assert rival.perform(Discard(hold)) is Verdict.DONE
        assert store.perform(Look(scope, "key")) is None
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.FENCED
        assert held(store, claim_on(scope, fingerprint=b"another")).attempt == 1
        assert rival.perform(Discard(parked(store, claim_on(scope, "parked")))) is Verdict.DONE
        assert store.perform(Look(scope, "parked")) is None

    def test_only_what_was_seen_is_discarded(self, store: Handle, scope: str) -> None:
        """An answer is not discarded, nor is a record that another worker holds by now."""
        hold = held(store, claim_on(scope))
        self._is_fenced(store, scope, Discard(replace(hold, attempt=2)))
        self._is_fenced(store, scope, Discard(replace(hold, token=uuid4().bytes)))
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        self._is_fenced(store, scope, Discard(hold))
        assert store.perform(Discard(replace(hold, key="absent"))) is Verdict.FENCED

    def test_unparked_record(self, store: Handle, rival: Handle, scope: str) -> None:
        """An operator says what an effect did: the record has no holder, and the next attempt goes on from there."""
        hold = parked(store, claim_on(scope, request=REQUEST))
        settled = IN_DOUBT.plus(Done("effect", "charge_created", {"id": "ch_1"}))
        assert rival.perform(Unpark(hold, settled)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.token, after.is_stuck) == (State.PROCESSING, NO_TOKEN, True)
        assert (after.steps, after.recovery_point) == (written(settled), "charge_created")
        # It was an attempt, the operator's.
        successor = taken_over(store, claim_on(scope), replace(hold, attempt=2, token=NO_TOKEN))
        assert (successor.attempt, store.perform(ReadRequest(successor))) == (3, REQUEST)

    def test_resolved_answer(self, store: Handle, rival: Handle, scope: str) -> None:
        """An operator ends a parked operation with an answer, which is then replayed like any other."""
        hold = parked(store, claim_on(scope, request=REQUEST))
        assert rival.perform(Resolution(hold, CREATED)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.answer) == (State.COMPLETE, CREATED)
        assert after.completed_at is not None
        assert found(store, scope).answer == CREATED
        self._is_fenced(store, scope, Complete(hold, Event.COMPLETE, Answer(500)))
        assert store.perform(ReadRequest(hold)) is None

    @pytest.mark.parametrize("late", [timedelta(hours=1), RETENTION, 10 * RETENTION])
    def test_resolving_begins_the_retention_anew(self, store: Handle, scope: str, age: Age, late: timedelta) -> None:
        """What is resolved, however late, is kept for as long as its retention was, from then on."""
        reap_everything(store, age)
        resolved = parked(store, claim_on(scope, "resolved"))
        tombstone = parked(store, claim_on(scope, "tombstone", after_retention="strip"))
        resumed = parked(store, claim_on(scope, "resumed", request=REQUEST))
        freed = parked(store, claim_on(scope, "freed"))
        age(late)
        assert store.perform(Reap(10, ABANDONED)) == Reaped()
        for hold in (resolved, tombstone):
            assert store.perform(Resolution(hold, CREATED)) is Verdict.DONE
        assert store.perform(Unpark(resumed, RIDE)) is Verdict.DONE
        assert store.perform(Discard(freed)) is Verdict.DONE
        for key in ("resolved", "tombstone", "resumed"):
            after = record(store, scope, key)
            assert not after.is_expired
            assert RETENTION - LEASE < after.retention_left <= RETENTION
        age(RETENTION - LEASE)
        assert store.perform(Reap(10, ABANDONED)) == Reaped()
        assert found(store, scope, "resolved").answer == CREATED
        assert [each.hold.key for each in self._stuck(store, scope, with_no_token=True)] == ["resumed"]
        age(LEASE)
        assert store.perform(Reap(10, ABANDONED)) == Reaped(deleted=1, stripped=1, failed=1)

    @pytest.mark.parametrize("what", ["in progress", "ended", "parked by another"])
    def test_only_the_parked_are_resolved(self, store: Handle, scope: str, what: str) -> None:
        """Nothing is resolved but what is parked under the attempt and the token that the operator saw."""
        if what == "in progress":
            hold = held(store, claim_on(scope))
        elif what == "ended":
            hold = completed(store, claim_on(scope))
        else:
            hold = replace(parked(store, claim_on(scope)), token=uuid4().bytes)
        self._is_fenced(store, scope, Unpark(hold, RIDE))
        self._is_fenced(store, scope, Resolution(hold, Answer(500)))

    @staticmethod
    def _stuck(store: Handle, scope: str, *, with_request: bool = False, with_no_token: bool = False) -> list[Stuck]:
        stuck = store.perform(FindStuck(ALL, with_request=with_request, with_no_token=with_no_token))
        found = [each for each in stuck if each.hold.scope == scope]
        assert found == sorted(found, key=lambda each: each.silent_for, reverse=True)
        return found

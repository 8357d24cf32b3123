"""Transactions of the application: the record and what the handler writes commit together, or neither does.

What a handler writes is tested by each store's own tests, since it depends on the database.
"""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from uuid import uuid4

import pytest

from semel.core.commands import (
    Begin,
    Browse,
    Claim,
    Commit,
    Complete,
    Finish,
    Look,
    Now,
    Open,
    Reap,
    Reaped,
    Undo,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import NO_TOKEN, AfterRetention, Found, Hold
from semel.core.recovery import Progress, written
from semel.core.state import Event, State
from semel.errors import NoConnection
from semel.testing.conformance.base import (
    ABANDONED,
    CREATED,
    FINGERPRINT,
    IN_DOUBT,
    LEASE,
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
    timeless,
)
from semel.testing.conformance.handles import Handle, Lent, at_once


@contextmanager
def transaction(store: Handle) -> Iterator[Lent]:
    """A transaction that is undone if nothing else ends it."""
    tx = store.transaction()
    try:
        yield tx
    finally:
        tx.perform(Undo())


def begun(tx: Lent, claim: Claim) -> Hold:
    """Begin *claim*, which must succeed."""
    hold = tx.perform(Begin(claim))
    assert isinstance(hold, Hold), hold
    return hold


def finished(claim: Claim, hold: Hold, seen: Hold | None = None, answer: Answer = CREATED) -> Finish:
    """Return the end of an operation in atomic mode."""
    return Finish(claim, hold, seen, Event.COMPLETE, answer)


class Transactions(Suite):
    """Begin and finish; open and commit; undo."""

    @pytest.mark.parametrize(
        "event, state", [(Event.COMPLETE, State.COMPLETE), (Event.FAIL, State.FAILED)], ids=["complete", "failed"]
    )
    def test_finished_record(self, store: Handle, rival: Handle, scope: str, event: Event, state: State) -> None:
        """A record that was begun and finished in one transaction has all that a claim and a completion leave."""
        claim = claim_on(scope, after_retention="strip")
        with transaction(store) as tx:
            hold = begun(tx, claim)
            assert hold == Hold(scope, "key", 1, claim.token)
            assert tx.perform(Finish(claim, hold, None, event, CREATED)) is Verdict.DONE
        seen = record(rival, scope)
        assert (seen.state, seen.attempt, seen.token, seen.fingerprint) == (state, 1, claim.token, FINGERPRINT)
        assert (seen.answer, seen.lease_expires_at, seen.steps) == (CREATED, None, None)
        assert seen.completed_at is not None
        assert RETENTION - LEASE < seen.retention_left <= RETENTION
        assert found(rival, scope).answer == CREATED

    @pytest.mark.parametrize("answer", [Answer(204), Answer(200, (), None)], ids=["empty", "tombstone"])
    def test_finished_answers(self, store: Handle, scope: str, answer: Answer) -> None:
        """An empty answer and a tombstone come back as what they are."""
        claim = claim_on(scope)
        with transaction(store) as tx:
            assert tx.perform(finished(claim, begun(tx, claim), answer=answer)) is Verdict.DONE
        assert record(store, scope).answer == answer

    def test_finished_record_is_seen_by_all(self, store: Handle, rival: Handle, scope: str) -> None:
        """What is finished is seen by every transaction that begins, while others under the same key are open."""
        completed(store, claim_on(scope))
        # Two at a time: a pooler may have no more connections than that.
        for other in (store, rival):
            with transaction(store) as first, transaction(other) as second:
                for tx in (first, second):
                    seen = tx.perform(Begin(claim_on(scope)))
                    assert isinstance(seen, Found)
                    assert (seen.state, seen.answer) == (State.COMPLETE, CREATED)

    def test_nobody_sees_it_before_the_end(self, store: Handle, rival: Handle, scope: str) -> None:
        """Until the transaction commits, no process sees a record."""
        claim = claim_on(scope)
        for each in (store, rival):
            assert each.perform(Look(scope, "key")) is None  # They open here: a store may need the lock for that.
        with transaction(store) as tx:
            hold = begun(tx, claim)
            for each in (store, rival):
                assert each.perform(Look(scope, "key")) is None
                assert each.perform(Browse(9, scope=scope)) == ()
            assert tx.perform(finished(claim, hold)) is Verdict.DONE
        assert record(rival, scope).answer == CREATED

    def test_undone_leaves_nothing(self, store: Handle, rival: Handle, scope: str) -> None:
        """A rollback leaves nothing, and the key is free for the next request at once, also for a different one."""
        with transaction(store) as tx:
            begun(tx, claim_on(scope))
        assert rival.perform(Look(scope, "key")) is None
        claim = claim_on(scope, fingerprint=b"another")
        with transaction(rival) as tx:
            assert tx.perform(finished(claim, begun(tx, claim))) is Verdict.DONE

    def test_undoing_nothing(self, store: Handle) -> None:
        """Undoing a transaction that was not begun, or has ended, does nothing; ending it is an error."""
        tx = store.transaction()
        tx.perform(Undo())
        tx.perform(Open())
        tx.perform(Undo())
        tx.perform(Undo())
        with pytest.raises(NoConnection):
            tx.perform(Commit(Hold("scope", "key", 1, bytes(16)), RIDE))

    def test_second_begin_finds_it_in_progress(self, store: Handle, scope: str) -> None:
        """While one transaction has a key, another with the same request finds it in progress, and does not wait."""
        first = claim_on(scope)
        with transaction(store) as tx, transaction(store) as other:
            hold = begun(tx, first)
            seen = other.perform(Begin(claim_on(scope)))
            assert timeless(seen) == Found(
                State.PROCESSING, 1, NO_TOKEN, FINGERPRINT, None, lease_is_over=False, is_expired=False
            )
            other.perform(Undo())
            assert tx.perform(finished(first, hold)) is Verdict.DONE
        assert record(store, scope).token == first.token

    def test_second_begin_with_another_request(self, store: Handle, scope: str) -> None:
        """One with a different request finds a fingerprint that is not its own."""
        first, other_print = claim_on(scope), bytes([FINGERPRINT[0]]) + bytes(68)
        with transaction(store) as tx, transaction(store) as other:
            hold = begun(tx, first)
            seen = other.perform(Begin(claim_on(scope, fingerprint=other_print)))
            assert isinstance(seen, Found)
            assert (seen.state, seen.lease_is_over, seen.is_expired) == (State.PROCESSING, False, False)
            assert seen.fingerprint != other_print
            other.perform(Undo())
            assert tx.perform(finished(first, hold)) is Verdict.DONE

    def test_begin_after_the_end(self, store: Handle, rival: Handle, scope: str) -> None:
        """A finished record is found with its answer, by the same process and by another."""
        hold = completed(store, claim_on(scope))
        for each in (store, rival):
            with transaction(each) as tx:
                seen = tx.perform(Begin(claim_on(scope)))
            assert timeless(seen) == Found(
                State.COMPLETE, 1, hold.token, FINGERPRINT, CREATED, lease_is_over=True, is_expired=False
            )

    def test_begin_finds_what_others_hold(self, store: Handle, scope: str) -> None:
        """A record that a worker holds under a lease is found in progress; a parked one is found parked."""
        hold = saved(store, held(store, claim_on(scope)))
        with transaction(store) as tx:
            seen = tx.perform(Begin(claim_on(scope)))
        assert isinstance(seen, Found)
        assert (seen.state, seen.token, seen.steps) == (State.PROCESSING, hold.token, written(RIDE))
        assert not seen.lease_is_over
        parked(store, claim_on(scope, "parked"))
        with transaction(store) as tx:
            seen = tx.perform(Begin(claim_on(scope, "parked")))
        assert isinstance(seen, Found)
        assert seen.state is State.UNKNOWN

    def test_rivals_begin_together(self, store: Handle, rival: Handle, scope: str) -> None:
        """Of two processes that begin on one key at the same moment, one finishes, each time."""
        for number in range(10):
            claims = [claim_on(scope, f"key {number}") for _ in range(2)]
            pairs = zip((store, rival), claims, strict=True)
            got = at_once([partial(self._begin_and_finish, each, claim) for each, claim in pairs])
            winners = [claim for claim, verdict in zip(claims, got, strict=True) if verdict is Verdict.DONE]
            assert len(winners) == 1, got
            assert record(store, scope, f"key {number}").token == winners[0].token

    def test_finish_in_place_of_the_dead(self, store: Handle, scope: str, age: Age) -> None:
        """A dead worker's record is finished under the next number; creation time and fingerprint stay."""
        dead = saved(store, held(store, claim_on(scope)))
        age(LEASE)
        before = record(store, scope)
        claim = claim_on(scope, retention=9 * RETENTION)
        with transaction(store) as tx:
            seen = tx.perform(Begin(claim))
            assert isinstance(seen, Found)
            assert (seen.lease_is_over, seen.token) == (True, dead.token)
            hold = Hold(scope, "key", 2, claim.token)
            assert tx.perform(finished(replace(claim, fingerprint=b"another"), hold, dead)) is Verdict.DONE
        after = record(store, scope)
        assert (after.state, after.attempt, after.token) == (State.COMPLETE, 2, claim.token)
        assert (after.created_at, after.expires_at) == (before.created_at, before.expires_at)
        assert (after.fingerprint, after.answer) == (FINGERPRINT, CREATED)

    def test_finished_record_has_its_trace(self, store: Handle, scope: str, age: Age) -> None:
        """The trace of the attempt that finished is found by a replay, whether there was a record before or not."""
        first, second = (f"00-{uuid4().hex}-{uuid4().hex[:16]}-01" for _ in range(2))
        new = replace(claim_on(scope), traceparent=first)
        with transaction(store) as tx:
            tx.perform(finished(new, begun(tx, new)))
        assert [found(store, scope).traceparent for _ in range(2)] == [first, first]
        dead = held(store, replace(claim_on(scope, "dead"), traceparent=first))
        age(LEASE)
        heir = replace(claim_on(scope, "dead"), traceparent=second)
        with transaction(store) as tx:
            seen = tx.perform(Begin(heir))
            assert isinstance(seen, Found)
            assert seen.traceparent == first
            tx.perform(finished(heir, Hold(scope, "dead", 2, heir.token), dead))
        assert [found(store, scope, "dead").traceparent for _ in range(2)] == [second, second]

    def test_finish_in_place_of_the_expired(self, store: Handle, scope: str, age: Age) -> None:
        """Past its retention a record is replaced by a new operation: all of it."""
        old = saved(store, held(store, claim_on(scope)))
        store.perform(Complete(old, Event.COMPLETE, Answer(500)))
        age(RETENTION)
        claim = claim_on(scope, fingerprint=b"another")
        with transaction(store) as tx:
            seen = tx.perform(Begin(claim))
            assert isinstance(seen, Found)
            assert seen.is_expired
            assert tx.perform(finished(claim, Hold(scope, "key", 1, claim.token), old)) is Verdict.DONE
        after = record(store, scope)
        assert (after.token, after.fingerprint, after.answer) == (claim.token, b"another", CREATED)
        assert (after.steps, after.recovery_point) == (None, None)
        assert after.retention_left > RETENTION - LEASE

    @pytest.mark.parametrize(
        "after_retention, ahead, reaped",
        [
            ("strip", None, Reaped(stripped=1)),
            ("strip", timedelta(hours=1), Reaped(stripped=1)),
            ("strip", timedelta(hours=-1), Reaped(deleted=1)),
            ("delete", timedelta(hours=1), Reaped(deleted=1)),
        ],
    )
    def test_finish_leaves_a_tombstone(
        self,
        *,
        store: Handle,
        scope: str,
        age: Age,
        after_retention: AfterRetention,
        ahead: timedelta | None,
        reaped: Reaped,
    ) -> None:
        """A key that tells its time leaves no tombstone, unless that is after the store's own clock."""
        reap_everything(store, age)
        made_at = None if ahead is None else store.perform(Now()) + ahead
        claim = claim_on(scope, after_retention=after_retention, made_at=made_at)
        with transaction(store) as tx:
            hold = tx.perform(Begin(claim))
            assert isinstance(hold, Hold)
            assert tx.perform(finished(claim, hold)) is Verdict.DONE
        age(RETENTION)
        assert store.perform(Reap(10, ABANDONED)) == reaped

    @pytest.mark.parametrize("which", ["nothing", "another token", "another attempt"])
    def test_finish_replaces_only_what_was_seen(self, store: Handle, scope: str, age: Age, which: str) -> None:
        """A record that is not the one that was seen belongs to another worker: everything is rolled back."""
        dead = held(store, claim_on(scope))
        age(LEASE)
        seen = {
            "nothing": None,
            "another token": replace(dead, token=uuid4().bytes),
            "another attempt": replace(dead, attempt=2),
        }[which]
        self._finish_is_fenced(store, scope, seen)

    def test_finish_does_not_replace_the_living(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Neither a record with a live lease, nor an answer within its retention, nor a parked one is replaced."""
        dead = held(store, claim_on(scope))
        age(LEASE)
        successor = taken_over(rival, claim_on(scope), dead)
        self._finish_is_fenced(store, scope, dead)
        self._finish_is_fenced(store, scope, successor)
        rival.perform(Complete(successor, Event.COMPLETE, CREATED))
        self._finish_is_fenced(store, scope, successor)
        waiting = parked(store, claim_on(scope, "parked"))
        self._finish_is_fenced(store, scope, waiting)
        age(10 * RETENTION)
        self._finish_is_fenced(store, scope, waiting)

    def test_committed_phase(self, store: Handle, rival: Handle, scope: str) -> None:
        """A phase's steps are there when its transaction commits, and not before."""
        hold = held(store, claim_on(scope))
        with transaction(store) as tx:
            tx.perform(Open())
            assert record(rival, scope).steps is None
            assert tx.perform(Commit(hold, RIDE)) is Verdict.DONE
        after = record(rival, scope)
        assert (after.state, after.steps, after.recovery_point) == (State.PROCESSING, written(RIDE), "ride_created")
        with transaction(store) as tx:
            tx.perform(Open())
            assert tx.perform(Commit(hold, IN_DOUBT, RIDE)) is Verdict.DONE
        assert record(rival, scope).steps == written(IN_DOUBT)

    def test_undone_phase(self, store: Handle, scope: str) -> None:
        """A phase that was undone has left no step."""
        hold = saved(store, held(store, claim_on(scope)))
        with transaction(store) as tx:
            tx.perform(Open())
        assert record(store, scope).steps == written(RIDE)
        assert record(store, scope).token == hold.token

    def test_lost_hold_commits_nothing(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A phase of a worker that was taken over from is fenced, and so is one with an unknown hold."""
        zombie = held(store, claim_on(scope))
        age(LEASE)
        successor = saved(rival, taken_over(rival, claim_on(scope), zombie))
        before = record(store, scope)
        strangers = (
            zombie,
            replace(successor, attempt=9),
            replace(successor, token=uuid4().bytes),
            replace(successor, key="absent"),
        )
        for stranger in strangers:
            with transaction(store) as tx:
                tx.perform(Open())
                assert tx.perform(Commit(stranger, Progress(), RIDE)) is Verdict.FENCED
        assert same_but_for_the_clock(before, record(store, scope))
        assert store.perform(Look(scope, "absent")) is None

    @staticmethod
    def _begin_and_finish(store: Handle, claim: Claim) -> Verdict | Found:
        with transaction(store) as tx:
            got = tx.perform(Begin(claim))
            return got if isinstance(got, Found) else tx.perform(finished(claim, got))

    @staticmethod
    def _finish_is_fenced(store: Handle, scope: str, seen: Hold | None) -> None:
        key = "key" if seen is None else seen.key
        before = record(store, scope, key)
        claim = claim_on(scope, key)
        with transaction(store) as tx:
            # Not Begin, which would have found the record: the end is tested alone.
            tx.perform(Open())
            assert tx.perform(finished(claim, Hold(scope, key, 3, claim.token), seen)) is Verdict.FENCED
        assert same_but_for_the_clock(before, record(store, scope, key))

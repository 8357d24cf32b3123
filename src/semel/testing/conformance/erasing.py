"""Guarantee 14: one owner's data is erased, no other's, and nothing runs again."""
# ruff: noqa: PLR2004, S101 - a suite of tests asserts, and what it expects is a bare number

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import (
    Command,
    Complete,
    Erase,
    EraseTrail,
    Left,
    Look,
    Mark,
    Note,
    ReadRequest,
    ReadTrail,
    Reap,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Hold, Milestone
from semel.core.state import Event, State
from semel.core.trail import NO_KEY
from semel.errors import ConfigurationError
from semel.testing.conformance.base import (
    ABANDONED,
    CREATED,
    LEASE,
    REQUEST,
    RETENTION,
    Age,
    Suite,
    accepted_on,
    claim_on,
    completed,
    found,
    held,
    parked,
    record,
    same_but_for_the_clock,
    saved,
)
from semel.testing.conformance.handles import Handle

#: More than any test makes.
ALL = 100_000
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Erasing(Suite):
    """Erase."""

    def test_what_stays_of_an_ended_record(self, store: Handle, scope: str) -> None:
        """Answer, steps, request line, trace and progress are gone; status, fingerprint, attempt and times stay."""
        hold = _ended_with_everything(store, scope)
        before = record(store, scope)
        done = store.perform(Erase(scope, ALL))
        assert (done.count, done.left, done.further) == (1, (), None)
        after = record(store, scope)
        bare = replace(
            before,
            answer=Answer(201, (), None),
            steps=None,
            recovery_point=None,
            milestone=None,
            request_line="",
            traceparent=None,
        )
        assert same_but_for_the_clock(bare, after)
        assert store.perform(ReadRequest(hold)) is None

    def test_a_retry_finds_a_tombstone(self, store: Handle, rival: Handle, scope: str) -> None:
        """A retry is told that the operation has ended, and does not get the key; the worker may repeat its ending."""
        hold = _ended_with_everything(store, scope)
        store.perform(Erase(scope, ALL))
        for each in (store, rival):
            seen = found(each, scope)
            assert seen.answer == Answer(201, (), None)
            assert (seen.state, seen.token, seen.steps, seen.traceparent) == (State.COMPLETE, hold.token, None, None)
            assert not seen.may_be_taken
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert record(store, scope).answer == Answer(201, (), None)

    def test_what_has_not_ended_is_left(self, store: Handle, scope: str, age: Age) -> None:
        """Operations in progress, stuck, accepted and parked stay as they are, and are named."""
        held(store, claim_on(scope, "stuck", request=REQUEST))
        age(LEASE)
        held(store, claim_on(scope, "running", request=REQUEST))
        held(store, accepted_on(scope, "accepted"))
        parked(store, claim_on(scope, "parked", request=REQUEST))
        keys = {
            "stuck": State.PROCESSING,
            "running": State.PROCESSING,
            "accepted": State.PENDING,
            "parked": State.UNKNOWN,
        }
        before = {key: record(store, scope, key) for key in keys}
        done = store.perform(Erase(scope, ALL))
        assert (done.count, done.ended) == (0, ())
        assert set(done.left) == {Left(scope, key, state) for key, state in keys.items()}
        for key, seen in before.items():
            assert same_but_for_the_clock(seen, record(store, scope, key))

    def test_which_scopes(self, store: Handle, scope: str) -> None:
        """The owner's own scope is erased, and those of its operations; not those of owners with a similar name."""
        mine = [scope, f"{scope}\tPOST /payments", f"{scope}\tPOST /a\tb", f"{scope}\t\N{SNOWMAN}"]
        others = [
            scope[:-1],
            f"{scope} ",
            f"{scope}x",
            f"{scope}/1",
            f"x\t{scope}",
            f"{scope}\N{SNOWMAN}",
            scope.upper(),
        ]
        for each in (*mine, *others):
            completed(store, claim_on(each))
        done = store.perform(Erase(scope, ALL))
        assert done.count == len(mine)
        assert set(done.ended) == {(each, "key") for each in mine}
        for each in mine:
            assert record(store, each).answer == Answer(201, (), None)
        for each in others:
            assert record(store, each).answer == CREATED

    def test_preview(self, store: Handle, scope: str) -> None:
        """A preview counts, and changes nothing."""
        hold = completed(store, claim_on(scope))
        store.perform(Note(hold, "said"))
        held(store, claim_on(scope, "running"))
        before = record(store, scope)
        seen = store.perform(Erase(scope, ALL, is_preview=True))
        assert (seen.count, seen.left) == (1, (Left(scope, "running", State.PROCESSING),))
        assert store.perform(EraseTrail(scope, ALL, is_preview=True)).count == 1
        assert same_but_for_the_clock(before, record(store, scope))
        assert len(store.perform(ReadTrail(scope, "key"))) == 1

    def test_repeated(self, store: Handle, rival: Handle, scope: str) -> None:
        """A second erasure finds nothing to do; it still names what has ended, for caches."""
        completed(store, claim_on(scope))
        assert store.perform(Erase(scope, ALL)).count == 1
        again = rival.perform(Erase(scope, ALL))
        assert (again.count, again.ended, again.left) == (0, ((scope, "key"),), ())

    @pytest.mark.parametrize("limit", [1, 3])
    def test_in_parts(self, store: Handle, scope: str, limit: int) -> None:
        """A walk in small parts comes past every record once, and then says that it is at its end."""
        keys = [f"key-{number}" for number in range(5)]
        for owner in (scope, f"{scope}\tPOST /"):
            for key in keys:
                store.perform(Note(completed(store, claim_on(owner, key)), "said"))
        for command in (Erase(scope, limit), EraseTrail(scope, limit)):
            count, parts = 0, 0
            while True:
                done = store.perform(command)
                count, parts = count + done.count, parts + 1
                if done.further is None:
                    break
                command = replace(command, after=done.further)  # noqa: PLW2901 - the next part of it
            assert count == 10
            assert parts <= 11
        assert {record(store, scope, key).answer for key in keys} == {Answer(201, (), None)}

    def test_beside_endings(self, store: Handle, scope: str) -> None:
        """Operations that end while others erase end all the same, and the next erasure finds them."""
        holds = [held(store, claim_on(scope, f"key-{number}")) for number in range(30)]
        endings: list[Command[Any]] = [Complete(hold, Event.COMPLETE, CREATED) for hold in holds]
        mixed = [each for ending in endings for each in (ending, Erase(scope, ALL))]
        outcomes = store.perform_all(mixed)
        assert outcomes[::2] == [Verdict.DONE] * len(holds)
        count = sum(each.count for each in outcomes[1::2])
        assert count + store.perform(Erase(scope, ALL)).count == len(holds)
        assert {record(store, scope, hold.key).answer for hold in holds} == {Answer(201, (), None)}

    def test_a_place_of_another_walk(self, store: Handle, scope: str) -> None:
        """A place from the walk of another owner leads to no records of others; one that can't be read is refused."""
        completed(store, claim_on(f"a{scope}", "one"))
        completed(store, claim_on(f"a{scope}", "two"))
        completed(store, claim_on(f"b{scope}"))
        place = store.perform(Erase(f"a{scope}", 1, is_preview=True)).further
        store.perform(Erase(f"b{scope}", ALL, place))
        assert record(store, f"a{scope}", "two").answer == CREATED
        for kind in (Erase, EraseTrail):
            with pytest.raises(ConfigurationError, match="can't be read"):
                kind(scope, ALL, "%%%")

    def test_the_trail(self, store: Handle, scope: str) -> None:
        """Lines are deleted, also those of records that are gone; those of what has not ended stay with it."""
        store.perform(Note(completed(store, claim_on(scope, "ended")), "said"))
        store.perform(Note(Hold(scope, "gone", 1, b"\1" * 16), "said", scope))
        store.perform(Note(completed(store, claim_on(f"{scope}\tPOST /", "ended")), "said"))
        store.perform(Note(parked(store, claim_on(scope, "parked")), "said"))
        store.perform(Note(completed(store, claim_on(f"{scope}x", "ended")), "said"))
        count = store.perform(EraseTrail(scope, ALL)).count
        assert count == 3
        for owner, key, is_kept in (
            (scope, "ended", False),
            (scope, "gone", False),
            (f"{scope}\tPOST /", "ended", False),
            (scope, "parked", True),
            (f"{scope}x", "ended", True),
        ):
            assert bool(store.perform(ReadTrail(owner, key))) == is_kept, (owner, key)
        assert store.perform(EraseTrail(scope, ALL)).count == 0

    def test_what_the_trail_tells(self, store: Handle, scope: str) -> None:
        """One line for each part says how much was erased, by whom and why, and neither of whom nor which keys."""
        told = len(_summaries(store))
        store.perform(Note(completed(store, claim_on(scope, "secret key")), "said"))
        store.perform(Erase(scope, ALL, is_preview=True))
        store.perform(Erase(scope, ALL, reason="ticket 7"))
        store.perform(EraseTrail(scope, ALL))
        store.perform(Erase(scope, ALL))
        lines = _summaries(store)[told:]
        assert [(line.event, line.detail) for line in lines] == [
            ("erased", "ticket 7: 1 erased"),
            ("erased", "1 audit lines deleted"),
        ]
        assert all(line.actor for line in lines)
        assert scope not in repr(lines)

    def test_until_the_retention_ends(self, store: Handle, scope: str, age: Age) -> None:
        """What was erased is reaped as any record: deleted, or kept as a tombstone where a late retry is refused."""
        completed(store, claim_on(scope, "plain"))
        completed(store, claim_on(scope, "late", after_retention="strip"))
        store.perform(Erase(scope, ALL))
        age(RETENTION + timedelta(minutes=2))
        while store.perform(Reap(1000, ABANDONED)).total:
            pass
        assert store.perform(Look(scope, "plain")) is None
        assert record(store, scope, "late").answer == Answer(201, (), None)
        assert store.perform(Erase(scope, ALL)).count == 0


def _ended_with_everything(store: Handle, scope: str) -> Hold:
    """Make a record that has ended, with all that a record can have."""
    everything: dict[str, Any] = {"request_line": "POST /payments", "traceparent": TRACE}
    hold = saved(store, held(store, replace(claim_on(scope, request=REQUEST), **everything)))
    store.perform(Mark(hold, Milestone(0.4, "charging")))
    assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE
    return hold


def _summaries(store: Handle) -> list[Any]:
    return [line for line in store.perform(ReadTrail(NO_KEY, NO_KEY, ALL)) if line.event == "erased"]

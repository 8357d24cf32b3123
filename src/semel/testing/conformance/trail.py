"""Guarantee 11: the record shows the ordinary, and the audit trail has the rest; with ``?audit=all``, everything.

``Trail`` is about a store with default settings, and part of the whole suite. ``FullTrail`` is about one that writes a
line for every change.
"""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

from semel.core.commands import (
    Begin,
    Command,
    Commit,
    Complete,
    Discard,
    Finish,
    Look,
    Note,
    Now,
    Open,
    Park,
    ReadTrail,
    Reap,
    ReapTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Undo,
    Unpark,
    Verdict,
)
from semel.core.record import NO_TOKEN, Entry, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.core.trail import NO_KEY
from semel.stores.base import this_process
from semel.testing.conformance.base import (
    ABANDONED,
    CREATED,
    IN_DOUBT,
    LEASE,
    RETENTION,
    RIDE,
    Age,
    Suite,
    accepted_on,
    claim_on,
    completed,
    held,
    parked,
    reap_everything,
    saved,
    taken_over,
    worker_of,
)
from semel.testing.conformance.handles import Handle
from semel.testing.conformance.transactions import begun, transaction

MANY = 100
MOMENT = timedelta(minutes=1)
#: More lines than there ever are.
ALL = 100_000


def trail(store: Handle, scope: str, key: str = "key") -> list[tuple[int, str]]:
    """What the trail has of a key: attempts and events."""
    return [(line.attempt, line.event) for line in store.perform(ReadTrail(scope, key))]


def summaries(store: Handle) -> list[Entry]:
    """What the trail has of no single key: a line for each batch of the reaper."""
    lines = store.perform(ReadTrail(NO_KEY, NO_KEY, ALL))
    return list(lines)


class Trail(Suite):
    """The audit trail with default settings."""

    def test_line(self, store: Handle, rival: Handle, scope: str) -> None:
        """A line has its time by the store's clock, its key, its attempt, and its process."""
        before = store.perform(Now())
        saved(store, held(store, claim_on(scope)))
        (line,) = rival.perform(ReadTrail(scope, "key"))
        assert before - MOMENT < line.at <= store.perform(Now())
        assert line.at.utcoffset() is not None
        assert line == Entry(line.at, scope, "key", 1, "saved", this_process(), "phase ride_created done")

    def test_actor(self, store: Handle, scope: str) -> None:
        """A store that acts for an operator names the operator."""
        store.act_as("Zoë of the night shift")
        try:
            hold = saved(store, held(store, claim_on(scope)))
        finally:
            store.act_as(None)
        store.perform(Release(hold))
        actors = [line.actor for line in store.perform(ReadTrail(scope, "key"))]
        assert actors == ["Zoë of the night shift", this_process()]

    def test_actor_of_a_transaction(self, store: Handle, scope: str) -> None:
        """A transaction that acts for an operator names the operator, too."""
        hold = held(store, claim_on(scope))
        store.act_as("Zoë of the night shift")
        try:
            with transaction(store) as tx:
                tx.perform(Open())
                assert tx.perform(Commit(hold, RIDE)) is Verdict.DONE
        finally:
            store.act_as(None)
        assert [line.actor for line in store.perform(ReadTrail(scope, "key"))] == ["Zoë of the night shift"]

    def test_the_record_tells_the_ordinary(self, store: Handle, scope: str) -> None:
        """A claim, an acceptance, its first attempt, an answer and a failure leave no line: a write each, not two."""
        completed(store, claim_on(scope, "completed"))
        store.perform(Complete(held(store, claim_on(scope, "failed")), Event.FAIL, CREATED))
        begun_later = worker_of(store, held(store, accepted_on(scope, "accepted")))
        store.perform(Complete(begun_later, Event.COMPLETE, CREATED))
        for key in ("completed", "failed", "accepted"):
            assert trail(store, scope, key) == []

    def test_life_of_a_key(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """From the claim to the answer, each change that the record does not show is a line, oldest first; a save names
        its step.
        """
        hold = saved(store, held(store, claim_on(scope)))
        age(LEASE)
        rival.perform(Sweep(hold))
        hold = taken_over(rival, claim_on(scope), replace(hold, token=NO_TOKEN))
        saved(rival, hold, IN_DOUBT)
        rival.perform(Complete(hold, Event.COMPLETE, CREATED))
        lines = store.perform(ReadTrail(scope, "key"))
        assert [(line.attempt, line.event, line.detail) for line in lines] == [
            (1, "saved", "phase ride_created done"),
            (1, "swept", None),
            (2, "taken over", None),
            (2, "saved", "effect charge_created begun"),
        ]
        assert [line.at for line in lines] == sorted(line.at for line in lines)
        assert store.perform(ReadTrail(scope, "key", 2)) == lines[:2]

    def test_other_ends(self, store: Handle, scope: str, age: Age) -> None:
        """A release and a given-up attempt have different lines."""
        released = held(store, claim_on(scope, "released"))
        store.perform(Release(replace(released, attempt=0)))
        given_up = held(store, claim_on(scope, "given up"))
        age(LEASE)
        store.perform(Release(taken_over(store, claim_on(scope, "given up"), given_up)))
        assert trail(store, scope, "released") == [(1, "released")]
        assert trail(store, scope, "given up") == [(2, "taken over"), (2, "given up")]

    def test_an_effect_begun_and_done(self, store: Handle, scope: str) -> None:
        """The line of an effect says whether it was begun, or done, or had no effect."""
        hold = saved(store, held(store, claim_on(scope)))
        done = RIDE.plus(Done("effect", "charge_created", "ch_1"))
        for before, now in ((RIDE, IN_DOUBT), (IN_DOUBT, RIDE), (RIDE, IN_DOUBT), (IN_DOUBT, done)):
            assert store.perform(Save(hold, now, before)) is Verdict.DONE
        assert [line.detail for line in store.perform(ReadTrail(scope, "key"))[1:]] == [
            "effect charge_created begun",
            "effect charge_created had no effect",
            "effect charge_created begun",
            "effect charge_created done",
        ]

    def test_reasons(self, store: Handle, scope: str) -> None:
        """The line says why a key was freed, an attempt given up or an operation parked, if a reason was given."""
        store.perform(Release(held(store, claim_on(scope, "released")), reason="answered 429"))
        store.perform(Release(saved(store, held(store, claim_on(scope, "given up"))), reason="raised OSError"))
        store.perform(Park(held(store, claim_on(scope, "parked")), reason="effect charge_created unknown"))
        for key, reason in (
            ("released", "answered 429"),
            ("given up", "raised OSError"),
            ("parked", "effect charge_created unknown"),
        ):
            last = store.perform(ReadTrail(scope, key))[-1]
            assert (last.event, last.detail) == (key, reason)

    def test_operators(self, store: Handle, scope: str) -> None:
        """A parked operation, and what an operator did about it, have lines."""
        store.perform(Unpark(parked(store, claim_on(scope, "unparked")), RIDE))
        store.perform(Resolution(parked(store, claim_on(scope, "resolved")), CREATED))
        store.perform(Discard(parked(store, claim_on(scope, "discarded"))))
        for key, last in (
            ("unparked", (2, "resolved")),
            ("resolved", (1, "resolved")),
            ("discarded", (1, "discarded")),
        ):
            assert trail(store, scope, key) == [(1, "saved"), (1, "parked"), last]

    def test_reaping(self, store: Handle, scope: str, age: Age) -> None:
        """A batch of the reaper is summed up in one line, which names no key; what it abandoned has a line each."""
        reap_everything(store, age)
        before = len(summaries(store))
        for key in ("reaped", "reaped too"):
            completed(store, claim_on(scope, key))
        completed(store, claim_on(scope, "stripped", after_retention="strip"))
        held(store, claim_on(scope, "abandoned"))
        age(RETENTION)
        store.perform(Reap(10, ABANDONED))
        assert trail(store, scope, "abandoned") == [(1, "abandoned")]
        assert trail(store, scope, "reaped") == trail(store, scope, "stripped") == []
        (line,) = summaries(store)[before:]
        assert line == Entry(line.at, "", "", 0, "reaped", this_process(), "2 deleted, 1 stripped")

    def test_reaping_nothing(self, store: Handle, scope: str, age: Age) -> None:
        """A batch that deleted and stripped nothing leaves no line; and a line has no zero counts."""
        reap_everything(store, age)
        before = len(summaries(store))
        held(store, claim_on(scope))
        store.perform(Reap(10, ABANDONED))
        age(RETENTION)
        store.perform(Reap(10, ABANDONED))
        assert summaries(store)[before:] == []
        store.perform(Reap(10, ABANDONED))
        assert [line.detail for line in summaries(store)[before:]] == ["1 deleted"]

    def test_transactions(self, store: Handle, scope: str) -> None:
        """A finished transaction leaves no line: the record shows it. A phase leaves its line with its commit."""
        claim = claim_on(scope)
        with transaction(store) as tx:
            hold = begun(tx, claim)
            assert tx.perform(Finish(claim, hold, None, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert trail(store, scope) == []
        phase = held(store, claim_on(scope, "phase"))
        with transaction(store) as tx:
            tx.perform(Open())
            tx.perform(Undo())
            tx.perform(Open())
            assert tx.perform(Commit(phase, RIDE)) is Verdict.DONE
        lines = store.perform(ReadTrail(scope, "phase"))
        assert [(line.event, line.detail) for line in lines] == [("saved", "phase ride_created done")]

    def test_transactions_in_place_of_others(self, store: Handle, scope: str, age: Age) -> None:
        """A transaction that finishes another worker's operation leaves a line; after an expired record it does not."""
        dead, expired = held(store, claim_on(scope, "dead")), completed(store, claim_on(scope, "expired"))
        age(LEASE)
        claim = claim_on(scope, "dead")
        with transaction(store) as tx:
            tx.perform(Begin(claim))
            hold = Hold(scope, "dead", 2, claim.token)
            assert tx.perform(Finish(claim, hold, dead, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert trail(store, scope, "dead") == [(2, "taken over")]
        age(RETENTION)
        claim = claim_on(scope, "expired")
        with transaction(store) as tx:
            tx.perform(Begin(claim))
            hold = Hold(scope, "expired", 1, claim.token)
            assert tx.perform(Finish(claim, hold, expired, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert trail(store, scope, "expired") == []

    def test_nothing_changed_nothing_told(self, store: Handle, rival: Handle, scope: str) -> None:
        """A renewal, a replay, a fenced write and a repeated one leave no line."""
        hold = held(store, claim_on(scope))
        for command in silent(scope, hold):
            store.perform(command)
        assert trail(store, scope) == []
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        for each in (store, rival):
            each.perform(Complete(hold, Event.COMPLETE, CREATED))
            each.perform(claim_on(scope))
        assert trail(store, scope) == []

    def test_a_transaction_that_finds_an_answer_tells_nothing(self, store: Handle, rival: Handle, scope: str) -> None:
        """A replay in atomic mode leaves no line."""
        completed(store, claim_on(scope))
        for each in (store, rival):
            with transaction(each) as tx:
                tx.perform(Begin(claim_on(scope)))
        assert trail(store, scope) == []

    def test_crowd(self, store: Handle, scope: str) -> None:
        """Of many saves and releases at once, each that changed something has its line, and no other has."""
        claims = [claim_on(scope, f"key {number}") for number in range(MANY)]
        holds = [each for each in store.perform_all(claims) if isinstance(each, Hold)]
        assert len(holds) == MANY
        strangers = [replace(hold, attempt=2) for hold in holds[::10]]
        store.perform_all([Save(hold, RIDE) for hold in (*holds, *strangers)])
        for number in range(MANY):
            assert trail(store, scope, f"key {number}") == [(1, "saved")]

    def test_notes(self, store: Handle, scope: str) -> None:
        """Other events can be noted, with a detail; a note makes no record."""
        hold = held(store, claim_on(scope))
        store.perform(Note(hold, "replayed"))
        store.perform(Note(replace(hold, attempt=7), "fenced", 'it\'s "odd" \\ Zoë'))
        lines = store.perform(ReadTrail(scope, "key"))
        assert [(line.attempt, line.event, line.detail) for line in lines] == [
            (1, "replayed", None),
            (7, "fenced", 'it\'s "odd" \\ Zoë'),
        ]
        store.perform(Note(replace(hold, key="absent"), "fenced"))
        assert store.perform(Look(scope, "absent")) is None

    def test_keys_are_told_apart(self, store: Handle, scope: str) -> None:
        """The trail of a key has lines of no other, and none of the same key in another scope."""
        saved(store, held(store, claim_on(scope, "a")))
        saved(store, held(store, claim_on(f"{scope} other", "a")))
        saved(store, held(store, claim_on(scope, "A")), Progress())
        assert trail(store, scope, "a") == [(1, "saved")]
        assert trail(store, scope, "absent") == []

    def test_old_lines_are_reaped(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """Lines older than a limit are deleted, so many at a time; the record is not touched by it."""
        month, year = timedelta(days=30), timedelta(days=365)
        age(10 * year)
        while store.perform(ReapTrail(1000, year)):
            pass
        for key in ("a", "b", "c"):
            saved(store, held(store, claim_on(scope, key)))
        age(month)
        young = saved(store, held(store, claim_on(scope, "d")))
        assert rival.perform(ReapTrail(10, month + MOMENT)) == 0
        assert rival.perform(ReapTrail(2, month)) == 2  # noqa: PLR2004 - as asked for
        assert rival.perform(ReapTrail(10, month)) == 1
        assert trail(store, scope, "d") == [(1, "saved")]
        assert store.perform(Complete(young, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert store.perform(claim_on(scope, "a")) is not None


class FullTrail(Suite):
    """The audit trail of a store that was opened with ``?audit=all``: a line for every change of a record."""

    def test_life_of_a_key_in_full(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """From the claim to the answer, each change is a line, oldest first."""
        hold = saved(store, held(store, claim_on(scope)))
        age(LEASE)
        rival.perform(Sweep(hold))
        hold = taken_over(rival, claim_on(scope), replace(hold, token=NO_TOKEN))
        rival.perform(Complete(hold, Event.COMPLETE, CREATED))
        lines = store.perform(ReadTrail(scope, "key"))
        assert [(line.attempt, line.event, line.detail) for line in lines] == [
            (1, "claimed", None),
            (1, "saved", "phase ride_created done"),
            (1, "swept", None),
            (2, "taken over", None),
            (2, "completed", None),
        ]
        assert [line.at for line in lines] == sorted(line.at for line in lines)

    def test_other_lives_in_full(self, store: Handle, scope: str) -> None:
        """A failure has its line; so has an acceptance, and its first attempt."""
        store.perform(Complete(held(store, claim_on(scope, "failed")), Event.FAIL, CREATED))
        begun_later = worker_of(store, held(store, accepted_on(scope, "accepted")))
        store.perform(Complete(begun_later, Event.COMPLETE, CREATED))
        assert trail(store, scope, "failed") == [(1, "claimed"), (1, "failed")]
        assert trail(store, scope, "accepted") == [(1, "accepted"), (1, "claimed"), (1, "completed")]

    def test_reaping_in_full(self, store: Handle, scope: str, age: Age) -> None:
        """What was deleted, stripped or abandoned has its own line, which outlives the record; there is no summary."""
        reap_everything(store, age)
        completed(store, claim_on(scope, "reaped"))
        completed(store, claim_on(scope, "stripped", after_retention="strip"))
        held(store, claim_on(scope, "abandoned"))
        age(RETENTION)
        store.perform(Reap(10, ABANDONED))
        for key in ("reaped", "stripped"):
            assert trail(store, scope, key) == [(1, "claimed"), (1, "completed"), (1, key)]
        assert trail(store, scope, "abandoned") == [(1, "claimed"), (1, "abandoned")]
        assert summaries(store) == []

    def test_transactions_in_full(self, store: Handle, scope: str, age: Age) -> None:
        """A transaction's line is there when it commits, and only then: one, whether or not it took over."""
        claim = claim_on(scope)
        with transaction(store) as tx:
            hold = begun(tx, claim)
            assert trail(store, scope) == []
            assert tx.perform(Finish(claim, hold, None, Event.COMPLETE, CREATED)) is Verdict.DONE
        assert trail(store, scope) == [(1, "completed")]
        dead, claim = held(store, claim_on(scope, "dead")), claim_on(scope, "dead")
        age(LEASE)
        with transaction(store) as tx:
            tx.perform(Begin(claim))
            hold = Hold(scope, "dead", 2, claim.token)
            assert tx.perform(Finish(claim, hold, dead, Event.FAIL, CREATED)) is Verdict.DONE
        assert trail(store, scope, "dead") == [(1, "claimed"), (2, "failed")]

    def test_nothing_changed_nothing_told_in_full(self, store: Handle, rival: Handle, scope: str) -> None:
        """A renewal, a replay, a fenced write and a repeated one leave no line."""
        hold = held(store, claim_on(scope))
        for command in silent(scope, hold):
            store.perform(command)
        assert trail(store, scope) == [(1, "claimed")]
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        for each in (store, rival):
            each.perform(Complete(hold, Event.COMPLETE, CREATED))
            each.perform(claim_on(scope))
        assert trail(store, scope) == [(1, "claimed"), (1, "completed")]

    def test_crowd_in_full(self, store: Handle, scope: str) -> None:
        """Of many claims and completions at once, each that changed something has its line, and no other has."""
        claims = [claim_on(scope, f"key {number}") for number in range(MANY)]
        got = store.perform_all([*claims, *[claim_on(scope, claim.key) for claim in claims[:10]]])
        holds = {each.key: each for each in got if isinstance(each, Hold)}
        assert len(holds) == MANY
        endings = [Complete(hold, Event.COMPLETE, CREATED) for hold in holds.values()]
        strangers = [replace(each, hold=replace(each.hold, attempt=2)) for each in endings[::10]]
        store.perform_all([*endings, *strangers, *endings[:5]])
        for number in range(MANY):
            assert trail(store, scope, f"key {number}") == [(1, "claimed"), (1, "completed")]


def silent(scope: str, hold: Hold) -> list[Command[Any]]:
    """Commands that change nothing while *hold* is live."""
    stranger = replace(hold, token=uuid4().bytes)
    return [
        Renew(((hold, LEASE),)),
        claim_on(scope),
        TakeOver(claim_on(scope), hold),
        Save(stranger, RIDE),
        Complete(stranger, Event.COMPLETE, CREATED),
        Release(stranger),
        Park(stranger),
        Park(hold, if_silent=True),
        Sweep(hold),
        Discard(stranger),
        Unpark(hold, RIDE),
        Resolution(hold, CREATED),
        Settle(hold),
    ]

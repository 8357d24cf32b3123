"""A handler's progress: only the holder writes it, any reader may see it, and nothing depends on it."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest

from semel.core.commands import Browse, Complete, Mark, Verdict
from semel.core.record import Milestone
from semel.core.state import Event
from semel.testing.conformance.base import (
    CREATED,
    LEASE,
    RETENTION,
    Age,
    Suite,
    claim_on,
    held,
    record,
    same_but_for_the_clock,
    taken_over,
)
from semel.testing.conformance.handles import Handle

HALF = Milestone(0.5, "Zoë's half: \"'\\")


class Milestones(Suite):
    """Milestones."""

    @pytest.mark.parametrize("milestone", [HALF, Milestone(0), Milestone(1.0), Milestone(1 / 3, "")], ids=repr)
    def test_milestone(self, store: Handle, rival: Handle, scope: str, milestone: Milestone) -> None:
        """A handler's progress can be read by any process, unchanged, and changes nothing else."""
        hold = held(store, claim_on(scope))
        before = record(store, scope)
        assert store.perform(Mark(hold, milestone)) is Verdict.DONE
        assert same_but_for_the_clock(replace(before, milestone=milestone), record(rival, scope))
        (listed,) = store.perform(Browse(9, scope=scope))
        assert listed.milestone == milestone
        assert store.perform(Complete(hold, Event.COMPLETE, CREATED)) is Verdict.DONE

    def test_latest_milestone_counts(self, store: Handle, scope: str, age: Age) -> None:
        """A new value replaces the old, also a smaller one; the next attempt begins with the last value."""
        hold = held(store, claim_on(scope))
        store.perform(Mark(hold, Milestone(0.9, "almost")))
        store.perform(Mark(hold, Milestone(0.1)))
        age(LEASE)
        successor = taken_over(store, claim_on(scope), hold)
        assert record(store, scope).milestone == Milestone(0.1)
        age(RETENTION)
        taken_over(store, claim_on(scope), successor)
        assert record(store, scope).milestone is None

    def test_only_the_holder_marks(self, store: Handle, rival: Handle, scope: str, age: Age) -> None:
        """A worker that has lost its key can't write its progress; nor can any worker after the end."""
        hold = held(store, claim_on(scope))
        self._is_fenced(store, scope, Mark(replace(hold, token=uuid4().bytes), HALF))
        self._is_fenced(store, scope, Mark(replace(hold, attempt=2), HALF))
        age(LEASE)
        successor = taken_over(rival, claim_on(scope), hold)
        self._is_fenced(store, scope, Mark(hold, HALF))
        rival.perform(Complete(successor, Event.COMPLETE, CREATED))
        self._is_fenced(store, scope, Mark(successor, HALF))
        assert store.perform(Mark(replace(hold, key="absent"), HALF)) is Verdict.FENCED

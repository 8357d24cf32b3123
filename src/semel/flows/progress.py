"""How far a handler says that it is, for whoever asks meanwhile. Nothing is decided by it, and no retry sees it."""

from __future__ import annotations

from contextlib import suppress

from semel.core.commands import Flow, Mark, Verdict
from semel.core.record import Milestone
from semel.errors import LeaseLost, StoreError
from semel.flows.steps import Story


def mark(story: Story, milestone: Milestone) -> Flow[None]:
    """Store *milestone*; raise ``LeaseLost`` where another worker has the operation."""
    story.check()
    # What can't be shown is no reason to stop the work that it is about.
    with suppress(StoreError):
        if (yield from Mark(story.hold, milestone)) is Verdict.FENCED:
            story.is_lost = True
            raise LeaseLost

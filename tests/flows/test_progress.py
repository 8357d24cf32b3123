"""How far a handler says that it is: stored while the operation is its own, and left out where it can't be stored."""

import pytest

from semel.core.commands import Mark, Verdict
from semel.core.record import Hold, Milestone
from semel.core.recovery import Progress
from semel.errors import HandlerIsOver, LeaseLost, StoreUnavailable
from semel.flows.steps import Story, mark
from tests.kit.ports import PORTS
from tests.kit.script import play

HOLD = Hold("alice", "key-1", 1, b"t" * 16)
HALF = Milestone(0.5, "half-way")


@pytest.fixture
def story() -> Story:
    return Story(HOLD, Progress())


def test_stored(story: Story) -> None:
    """It is one write, under the hold of the operation."""
    assert play(mark(PORTS, story, HALF), [(Mark, Verdict.DONE)]).commands == (Mark(HOLD, HALF),)


def test_a_store_in_trouble(story: Story) -> None:
    """That it can't be stored is no reason to stop the work."""
    assert play(mark(PORTS, story, HALF), [(Mark, StoreUnavailable("gone"))]).result is None
    assert not story.is_lost


def test_lost(story: Story) -> None:
    """Where another has the operation, the handler is told so, now and from then on."""
    with pytest.raises(LeaseLost):
        play(mark(PORTS, story, HALF), [(Mark, Verdict.FENCED)])
    with pytest.raises(LeaseLost):
        play(mark(PORTS, story, HALF), [])


def test_after_the_answer(story: Story) -> None:
    """After its answer an operation has no progress."""
    story.is_over = True
    with pytest.raises(HandlerIsOver):
        play(mark(PORTS, story, HALF), [])

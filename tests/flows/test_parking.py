"""A handler that can't find out what it has done: its operation is parked, or its lease decides."""

import pytest

from semel.core.commands import Park, Verdict
from semel.core.events import ParkedUnknown
from semel.core.key import Key
from semel.core.record import Hold
from semel.core.recovery import Progress
from semel.errors import LeaseLost, OutcomeUnknown, StoreUnavailable
from semel.flows.steps import Story, park
from tests.kit.ports import PORTS, Tell
from tests.kit.script import play

HOLD = Hold("alice", "key-1", 1, b"t" * 16)


@pytest.fixture
def story() -> Story:
    return Story(HOLD, Progress())


def test_parked(story: Story) -> None:
    """It is one write, and said aloud; the handler does nothing more."""
    commands = play(park(PORTS, story, "upstream"), [(Park, Verdict.DONE), (Tell, None)]).commands
    assert commands == (Park(HOLD), Tell(ParkedUnknown(Key("key-1").short(), 1, "upstream")))
    assert story.is_parked
    with pytest.raises(OutcomeUnknown):
        play(park(PORTS, story, "upstream"), [])


def test_a_store_in_trouble(story: Story) -> None:
    """Where it can't be stored the key is kept: the end of its lease is that of a crash."""
    play(park(PORTS, story, "upstream"), [(Park, StoreUnavailable("gone"))])
    assert story.is_parked


def test_lost(story: Story) -> None:
    """Where another has the operation, it is not this one's to park."""
    with pytest.raises(LeaseLost):
        play(park(PORTS, story, "upstream"), [(Park, Verdict.FENCED)])
    assert not story.is_parked

"""What an audit trail tells, and the story of a key: the record's own part of it among the lines of the trail."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from semel.core.message import Answer
from semel.core.record import NO_TOKEN, Entry, Record
from semel.core.state import State
from semel.core.trail import LINES, erased, reaped, story

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
TOKEN = bytes(range(16))
RUNNING = Record(
    scope="scope",
    key="key",
    state=State.PROCESSING,
    attempt=1,
    token=TOKEN,
    fingerprint=b"",
    recovery_point=None,
    steps=None,
    answer=None,
    created_at=NOON,
    lease_expires_at=NOON + HOUR,
    completed_at=None,
    expires_at=NOON + 24 * HOUR,
    lease_left=HOUR,
    retention_left=24 * HOUR,
)


def ended(attempt: int = 1, state: State = State.COMPLETE, token: bytes = TOKEN, after: timedelta = HOUR) -> Record:
    return replace(
        RUNNING,
        state=state,
        attempt=attempt,
        token=token,
        answer=Answer(201),
        lease_expires_at=None,
        lease_left=None,
        completed_at=NOON + after,
    )


def line(after: timedelta, event: str, attempt: int = 1) -> Entry:
    return Entry(NOON + after, "scope", "key", attempt, event, "host:7", None)


def told(record: Record, *trail: Entry) -> list[tuple[int, str, str]]:
    return [(each.attempt, each.event, each.actor) for each in story(record, trail)]


def test_the_record_alone() -> None:
    """Without a line in the trail the record tells when it was claimed, and how it ended; not which process it was."""
    assert told(RUNNING) == [(1, "claimed", "")]
    assert told(replace(RUNNING, is_accepted=True)) == [(1, "accepted", "")]
    assert told(ended()) == [(1, "claimed", ""), (1, "completed", "")]
    assert [each.at for each in story(ended(), ())] == [NOON, NOON + HOUR]
    assert told(ended(state=State.FAILED)) == [(1, "claimed", ""), (1, "failed", "")]


def test_among_the_lines() -> None:
    """What the record tells stands among the lines of the trail, by its time."""
    lines = (line(SECOND, "swept"), line(2 * SECOND, "taken over", 2))
    assert told(ended(attempt=2), *lines) == [
        (1, "claimed", ""),
        (1, "swept", "host:7"),
        (2, "taken over", "host:7"),
        (2, "completed", ""),
    ]


def test_nothing_is_told_twice() -> None:
    """Where the trail has everything, or has it at a time that is a little off, the record adds nothing."""
    lines = (line(SECOND / 10, "claimed"), line(HOUR - SECOND / 10, "completed"))
    assert told(ended(), *lines) == [(1, "claimed", "host:7"), (1, "completed", "host:7")]
    assert told(replace(RUNNING, is_accepted=True), line(SECOND, "accepted")) == [(1, "accepted", "host:7")]


def test_an_earlier_life_is_another() -> None:
    """Lines of an operation that expired under the same key do not stand for those of this one."""
    earlier = (line(-HOUR, "claimed"), line(-HOUR / 2, "completed"))
    assert [event for _, event, _ in told(ended(), *earlier)] == ["claimed", "completed", "claimed", "completed"]
    anew = line(timedelta(0), "taken over")
    assert [event for _, event, _ in told(ended(), *earlier, anew)] == [
        "claimed",
        "completed",
        "taken over",
        "completed",
    ]


def test_in_atomic_mode() -> None:
    """A record that was made when its operation ended was never claimed."""
    assert told(ended(after=timedelta(0))) == [(1, "completed", "")]


@pytest.mark.parametrize("event, state", [("resolved", State.COMPLETE), ("abandoned", State.FAILED)])
def test_ended_by_others(event: str, state: State) -> None:
    """What an operator or the reaper has ended, the trail tells; what went on after an operator's word, the record."""
    by_others = ended(state=state, token=NO_TOKEN)
    assert told(by_others, line(HOUR, event)) == [(1, "claimed", ""), (1, event, "host:7")]
    assert told(ended(2), line(HOUR, "resolved", 2))[1:] == [(2, "resolved", "host:7"), (2, "completed", "")]


def test_summary_of_the_reaper() -> None:
    """A batch of the reaper is summed up by what it did; one that did nothing has nothing to tell."""
    assert reaped(12, 3) == "12 deleted, 3 stripped"
    assert (reaped(1, 0), reaped(0, 2), reaped(0, 0)) == ("1 deleted", "2 stripped", None)


def test_sum_of_an_erasure() -> None:
    """A part of an erasure is one line, with the reason in front; one that erased nothing has none."""
    assert erased(0, "why") is None
    assert erased(3, None) == "3 erased"
    assert erased(3, "why", LINES) == "why: 3 audit lines deleted"

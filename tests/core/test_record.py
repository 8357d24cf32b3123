"""A record can't be built wrong, and tells its own age."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from semel.core.message import Answer
from semel.core.record import NO_TOKEN, Found, Hold, Milestone, Record, Stuck
from semel.core.state import State
from semel.errors import ConfigurationError

NOW = datetime(2025, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)

PROCESSING = Record(
    scope="alice",
    key="key",
    state=State.PROCESSING,
    attempt=1,
    token=b"t" * 16,
    fingerprint=b"",
    recovery_point=None,
    steps=None,
    answer=None,
    created_at=NOW,
    lease_expires_at=NOW + HOUR,
    completed_at=None,
    expires_at=NOW + 24 * HOUR,
    lease_left=HOUR,
    retention_left=24 * HOUR,
)
COMPLETE = replace(
    PROCESSING, state=State.COMPLETE, answer=Answer(200), lease_expires_at=None, lease_left=None, completed_at=NOW
)


@pytest.mark.parametrize(
    "record, change, rule",
    [
        (PROCESSING, {"attempt": 0}, "attempt counts from 1"),
        (PROCESSING, {"answer": Answer(200)}, "has an answer"),
        (COMPLETE, {"answer": None}, "has an answer"),
        (PROCESSING, {"completed_at": NOW}, "says when it ended"),
        (COMPLETE, {"completed_at": None}, "says when it ended"),
        (PROCESSING, {"lease_expires_at": None}, "has a lease"),
        (COMPLETE, {"lease_expires_at": NOW}, "has a lease"),
        (PROCESSING, {"state": State.PENDING, "is_accepted": True}, "has a lease"),
    ],
)
def test_impossible_records_are_refused(record: Record, change: dict[str, object], rule: str) -> None:
    """A record that no store may hold can't be built."""
    with pytest.raises(ValueError, match=rule):
        replace(record, **change)  # type: ignore[arg-type]  # the wrong ones on purpose


def test_pending_record_has_no_lease() -> None:
    """A pending record was accepted, and has neither lease nor answer."""
    pending = replace(PROCESSING, state=State.PENDING, lease_expires_at=None, lease_left=None, is_accepted=True)
    assert not pending.is_stuck
    with pytest.raises(ValueError, match="was accepted"):
        replace(pending, is_accepted=False)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), float("inf"), "0.5", None, True])
def test_progress_is_between_nothing_and_all(fraction: object) -> None:
    """What no progress bar can show is refused."""
    with pytest.raises(ConfigurationError, match="a number between 0 and 1, not "):
        Milestone(fraction)  # type: ignore[arg-type]  # the wrong ones on purpose


@pytest.mark.parametrize("note", ["x" * 201, 5, b"bytes"])
def test_note_is_a_line(note: object) -> None:
    """A note is a text of one line's length, or none."""
    with pytest.raises(ConfigurationError, match="at most 200 characters"):
        Milestone(0.5, note)  # type: ignore[arg-type]  # as above
    assert Milestone(1, "x" * 200).note == "x" * 200
    assert Milestone(0).note is None


def test_parked_record_has_no_lease() -> None:
    """A parked record has neither lease nor answer: it is not stuck, it waits for an operator."""
    parked = replace(PROCESSING, state=State.UNKNOWN, lease_expires_at=None, lease_left=None)
    assert not parked.is_stuck
    with pytest.raises(ValueError, match="has a lease"):
        replace(parked, lease_expires_at=NOW)
    with pytest.raises(ValueError, match="has an answer"):
        replace(parked, answer=Answer(200))


@pytest.mark.parametrize("token, is_unheld", [(b"t" * 16, False), (NO_TOKEN, True)])
def test_freed_records_are_nobodys(token: bytes, is_unheld: bool) -> None:
    """Of a stuck record it is told whether its key was freed already."""
    stuck = Stuck(Hold("alice", "key", 1, token), "rerun", None, has_request=False, silent_for=HOUR)
    assert stuck.is_unheld is is_unheld


@pytest.mark.parametrize("left, is_over", [(HOUR, False), (timedelta(0), True), (-HOUR, True)])
def test_stuck_and_expired(left: timedelta, is_over: bool) -> None:
    """A lease or a retention with nothing left is over: at the very instant, not after it."""
    assert replace(PROCESSING, lease_left=left).is_stuck is is_over
    assert replace(COMPLETE, retention_left=left).is_expired is is_over
    assert not COMPLETE.is_stuck


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("is_expired", [False, True])
def test_what_may_be_taken(is_over: bool, is_expired: bool) -> None:
    """A key in progress may be taken when its lease is over, any other when its record is past its retention."""
    running = Found(State.PROCESSING, 1, b"t" * 16, b"", None, lease_is_over=is_over, is_expired=is_expired)
    assert running.may_be_taken is is_over
    assert replace(running, state=State.COMPLETE).may_be_taken is is_expired

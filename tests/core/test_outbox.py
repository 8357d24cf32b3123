"""What a message is, how its tries end, and in which order a batch is sent."""

from datetime import timedelta
from uuid import UUID

import pytest

from semel.core.outbox import (
    BREAKER_PAUSES,
    BROKER_SCHEDULE,
    MAX_NAME,
    MIN_PACE_BYTES,
    WEBHOOK_SCHEDULE,
    Delivered,
    Failed,
    Message,
    Pace,
    Schedule,
    Unreachable,
    breaker_pause,
    check_name,
    message_id,
    time_ordered_id,
    waves,
)
from semel.errors import ConfigurationError


def message(number: int, key: str | None = None) -> Message:
    return Message(id=str(number), type="t", to="events", payload=b"", key=key)


def test_an_operations_message_has_the_same_id_every_time() -> None:
    """The id is made of the operation, the phase, the type, the destination and the count, and of nothing else."""
    parts = {"step": "paid", "type_": "order.paid", "to": "events", "number": 0}
    made = message_id("alice", "key-1", **parts)  # type: ignore[arg-type]  # as they are named
    assert made == message_id("alice", "key-1", **parts)  # type: ignore[arg-type]  # as above
    assert UUID(made).version == 8
    assert UUID(made).variant == "specified in RFC 4122"
    others = {
        message_id("bob", "key-1", **parts),  # type: ignore[arg-type]  # as above
        message_id("alice", "key-2", **parts),  # type: ignore[arg-type]  # as above
        *(
            message_id("alice", "key-1", **{**parts, name: other})  # type: ignore[arg-type]  # as above
            for name, other in (("step", ""), ("type_", "order.sent"), ("to", "mail"), ("number", 1))
        ),
    }
    assert len(others | {made}) == 7


def test_other_messages_have_ids_in_the_order_of_their_time() -> None:
    """A UUID of version 7 begins with its milliseconds, so that new ones come last in an index."""
    made = [time_ordered_id(milliseconds, b"\xff" * 10) for milliseconds in (1, 2, 1_800_000_000_000)]
    assert [UUID(each).version for each in made] == [7, 7, 7]
    assert made == sorted(made)
    assert made[0] != time_ordered_id(1, b"\x00" * 10)
    assert UUID(time_ordered_id(-1, b"\x00" * 10)).version == 7
    assert UUID(time_ordered_id(2**60, b"\x00" * 10)).version == 7


class TestSchedule:
    def test_pauses(self) -> None:
        """Each failure has its pause, longer or shorter by the jitter; after the last there is none."""
        schedule = Schedule((timedelta(seconds=10), timedelta(seconds=100)), jitter=0.2)
        assert schedule.pause(1, 0.5) == timedelta(seconds=10)
        assert schedule.pause(1, 0.0) == timedelta(seconds=8)
        assert schedule.pause(2, 1.0) == timedelta(seconds=120)
        assert schedule.pause(3, 0.5) is None

    def test_webhooks_are_tried_for_three_days(self) -> None:
        """The schedule is that of Standard Webhooks: ten tries in 75 hours."""
        hours = sum(WEBHOOK_SCHEDULE.pauses, timedelta()) / timedelta(hours=1)
        assert 75 < hours < 76
        assert len(WEBHOOK_SCHEDULE.pauses) == 9

    def test_brokers_are_tried_for_hours(self) -> None:
        """What a broker refuses for now is tried again within a second, and for hours."""
        assert BROKER_SCHEDULE.pauses[0] <= timedelta(seconds=1)
        assert sum(BROKER_SCHEDULE.pauses, timedelta()) > timedelta(hours=2)

    def test_an_outage_is_asked_about_every_half_minute(self) -> None:
        """A destination that can't be reached is tried soon, then every 30 s."""
        assert [breaker_pause(failures) for failures in (1, 2, 3, 4, 1000)] == [
            *BREAKER_PAUSES,
            timedelta(seconds=30),
            timedelta(seconds=30),
        ]


def test_waves() -> None:
    """In each wave there is one message of a key at most, in their order; those without a key are in the first."""
    batch = [message(1, "a"), message(2), message(3, "a"), message(4, "b"), message(5, "a"), message(6)]
    assert [[each.id for each in wave] for wave in waves(batch)] == [["1", "2", "4", "6"], ["3"], ["5"]]
    assert waves([]) == []


class TestNames:
    def test_good(self) -> None:
        """Destinations, types and keys are printable text."""
        assert check_name("to", "order.paid/é") == "order.paid/é"

    @pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_NAME + 1), 7, None, b"bytes", "\ud800"])
    def test_bad(self, name: object) -> None:
        """Anything else is refused, in words that fit a line."""
        with pytest.raises(ConfigurationError, match="to ") as refused:
            check_name("to", name)
        assert len(str(refused.value)) < 200
        assert "\n" not in str(refused.value)


class TestPace:
    def test_less_after_a_time_limit(self) -> None:
        """After a call that ran out of time, the next gets half of what was confirmed, and never less than is sent side
        by side; what is quick doubles it again, up to all.
        """
        pace = Pace(100, 10 * MIN_PACE_BYTES, least=2)
        batch = [message(number) for number in range(10)]
        pace.note(batch, [*[Delivered()] * 8, Failed("late", is_late=True), Unreachable("gone")], share=1.0)
        assert (pace.count, pace.size) == (4, MIN_PACE_BYTES)
        pace.note(batch[:1], [Unreachable("gone")], share=1.0)
        assert pace.count == 2
        pace.note(batch[:4], [Delivered()] * 4, share=0.9)
        assert pace.count == 2
        pace.note(batch[:4], [Delivered()] * 4, share=0.1)
        assert pace.count == 8

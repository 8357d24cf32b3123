"""What a process keeps: never more bytes than it may, and never for longer than the record is there."""

import gc
import tracemalloc
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.message import Answer
from semel.core.record import Found
from semel.core.state import State
from semel.stores.tiered import memory as module
from semel.stores.tiered.cache import RedisClock
from semel.stores.tiered.memory import DRIFT, Answers, Entry, deadline, now


def entry(key: str = "key", size: int = 10, *, until: float | None = None) -> Entry:
    answer = Answer(201, ((b"content-type", b"application/json"), (b"x-made", uuid4().bytes)), bytes(size))
    moment = now() + 3600 if until is None else until
    return Entry("scope", key, State.COMPLETE, 1, uuid4().bytes, uuid4().bytes * 4, answer, None, False, moment)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "now", found)
    return found


sizes = st.integers(0, 3000)


@given(st.integers(0, 20_000), st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 30), sizes)))
def test_never_more_than_it_may(limit: int, story: list[tuple[str, int, int]]) -> None:
    """Whatever is kept and asked for, the bytes that are kept are counted right, and are never more than the limit."""
    answers = Answers(limit)
    for what, key, size in story:
        if what == "put":
            answers.put(entry(str(key), size))
        else:
            answers.get("scope", str(key))
        assert answers.size <= limit
        assert answers.size == sum(each.size for each, _ in answers._entries.values())


def test_counts_what_it_takes() -> None:
    """The bytes that are counted are at least those that Python takes for the answers, and not many times as many."""
    limit = 2 * 1024 * 1024
    answers = Answers(limit)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        number = 0
        while answers.size + 3000 < limit:
            answers.put(entry(f"key {number}", 300 if number % 2 else 900))
            number += 1
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(answers) == number > 1000
    assert taken <= answers.size
    assert answers.size < 2 * taken


def test_the_least_asked_for_goes_first() -> None:
    """When there is no more room, the answer goes that nobody has asked for the longest."""
    one = entry("0").size
    answers = Answers(3 * one)
    for key in ("0", "1", "2"):
        answers.put(entry(key))
    assert answers.get("scope", "0") is not None
    answers.put(entry("3"))
    assert [key for key in "0123" if answers.get("scope", key) is not None] == ["0", "2", "3"]


def test_too_large() -> None:
    """An answer that is larger than all the room drives out no other, but the older one to its key."""
    answers = Answers(5000)
    answers.put(entry("small"))
    answers.put(entry("large"))
    answers.put(entry("large", 6000))
    assert answers.get("scope", "small") is not None
    assert answers.get("scope", "large") is None


def test_no_memory() -> None:
    """A process that is to keep nothing keeps nothing."""
    answers = Answers(0)
    answers.put(entry())
    assert len(answers) == 0


def test_what_is_found(clock: Clock) -> None:
    """What is kept is found as the durable store would have found it, with the time that is left."""
    answers = Answers(5000)
    kept = replace(entry(until=160.0), steps="[]", is_accepted=True, attempt=3)
    answers.put(kept)
    clock.now = 120.0
    assert answers.get("scope", "key") == Found(
        State.COMPLETE,
        3,
        kept.token,
        kept.fingerprint,
        kept.answer,
        lease_is_over=True,
        is_expired=False,
        steps="[]",
        is_accepted=True,
        retention_left=timedelta(seconds=40),
    )


def test_gone_in_time(clock: Clock) -> None:
    """At its deadline an answer is gone, and what it took is free."""
    answers = Answers(5000)
    answers.put(entry(until=160.0))
    clock.now = 159.999
    assert answers.get("scope", "key") is not None
    clock.now = 160.0
    assert answers.get("scope", "key") is None
    assert (len(answers), answers.size) == (0, 0)


def test_comes_too_late(clock: Clock) -> None:
    """An answer whose time is over when it comes is not kept."""
    answers = Answers(5000)
    answers.put(entry(until=100.0))
    assert len(answers) == 0


moments = st.floats(0, 1e5)
delays = st.floats(0, 1e4)
#: How fast a clock that is kept right by NTP runs at most and at least.
rates = st.floats(1 - DRIFT / 2, 1 + DRIFT / 2)


@given(moments, delays, delays, rates, rates)
def test_never_kept_for_longer_than_the_record(
    asked_at: float, on_the_way: float, left: float, ours: float, theirs: float
) -> None:
    """However long the question was on its way, and however the clocks run, an answer is gone when its record expires.

    Here all moments are true ones; our clock and the database's run at rates of their own.
    """
    record_expires = asked_at + on_the_way + left / theirs
    assert deadline(asked_at * ours, left) / ours <= record_expires + 1e-6


@given(moments, delays, delays, delays, st.floats(-1e6, 1e6))
def test_redis_never_keeps_it_for_longer(
    asked_at: float, to_redis: float, from_redis: float, left: float, offset: float
) -> None:
    """However long the time of day was on its way, Redis is told a moment of its own clock that is not too late; and
    whoever reads the answer from there keeps it no longer than Redis does.
    """
    until = asked_at + left
    said = int((asked_at + to_redis + offset + 1e7) * 1000)
    clock = RedisClock.read([said // 1000, said % 1000 * 1000], asked_at + to_redis + from_redis)
    at = clock.at(until)
    assert at / 1000 - offset - 1e7 <= until + 0.002
    read_at = asked_at + to_redis
    redis_left = at / 1000 - offset - 1e7 - (read_at + from_redis)
    if redis_left > 0:  # Else it is gone.
        assert deadline(read_at, redis_left) <= until + 0.002

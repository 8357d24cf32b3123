"""When a cache that fails is left alone: the state machine by itself, at moments that the test names."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.stores.tiered import fuse
from semel.stores.tiered.breaker import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_FAILURES,
    PROBE_LIMIT,
    Closed,
    Failure,
    HalfOpen,
    Leave,
    Open,
    State,
    asked,
    failed,
    succeeded,
)


def opened(at: float = 0.0) -> State:
    return failed(Closed(), Failure.TIME_OUT, at)


def test_a_well_cache_is_asked() -> None:
    """A cache that has not failed is asked."""
    assert asked(Closed(), 0.0) == (Closed(), Leave.ASK)


def test_one_time_out_is_enough() -> None:
    """A cache that hangs is left alone at once: each who asks it would wait as long."""
    assert asked(opened(), 0.0)[1] is Leave.DO_WITHOUT


def test_errors_in_a_row() -> None:
    """A few errors in a row do the same, and fewer don't."""
    state: State = Closed()
    for _ in range(MOST_FAILURES - 1):
        state = failed(state, Failure.ERROR, 0.0)
        assert asked(state, 0.0)[1] is Leave.ASK
    assert isinstance(failed(state, Failure.ERROR, 0.0), Open)


def test_errors_not_in_a_row() -> None:
    """An answer in between makes up for the errors before it."""
    state: State = Closed()
    for _ in range(10 * MOST_FAILURES):
        state = succeeded(failed(state, Failure.ERROR, 0.0))
    assert state == Closed()


def test_one_probe_after_the_pause() -> None:
    """After the pause one probe is sent, and nobody else asks anything until it is known what came of it."""
    state, leave = asked(opened(), FIRST_PAUSE)
    assert leave is Leave.PROBE
    state, leave = asked(state, FIRST_PAUSE)
    assert leave is Leave.DO_WITHOUT
    assert succeeded(state) == Closed()


def test_pauses_double() -> None:
    """With each probe that fails the pause doubles, up to a limit."""
    state, now, pauses = opened(), 0.0, []
    for _ in range(12):
        assert isinstance(state, Open)
        pauses.append(state.until - now)
        now = state.until
        state = failed(asked(state, now)[0], Failure.ERROR, now)
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert max(pauses) == LONGEST_PAUSE


def test_pauses_begin_anew() -> None:
    """A cache that has been there again is left alone for the shortest pause first."""
    state = failed(HalfOpen(99.0, LONGEST_PAUSE), Failure.ERROR, 0.0)
    state = succeeded(asked(state, LONGEST_PAUSE)[0])
    assert failed(state, Failure.TIME_OUT, 0.0) == Open(FIRST_PAUSE, FIRST_PAUSE)


def test_stragglers_are_no_news() -> None:
    """What was under way when the cache was left alone changes nothing, whatever comes of it."""
    state = opened()
    assert succeeded(state) == state
    assert failed(state, Failure.TIME_OUT, 99.0) == state


def test_a_probe_that_is_never_heard_of() -> None:
    """Another probe takes the place of one whose thread or loop has ended."""
    state, _ = asked(opened(), FIRST_PAUSE)
    state, leave = asked(state, FIRST_PAUSE + PROBE_LIMIT)
    assert leave is Leave.PROBE
    assert isinstance(state, HalfOpen)


@given(st.lists(st.tuples(st.sampled_from(["ask", "succeed", "error", "time out"]), st.floats(0, 100))))
def test_it_always_comes_back(story: list[tuple[str, float]]) -> None:
    """Whatever happened, a cache that answers its next probe is asked again, within the longest pause and a probe."""
    state: State = Closed()
    now = 0.0
    for what, passes in story:
        now += passes
        match what:
            case "ask":
                state, _ = asked(state, now)
            case "succeed":
                state = succeeded(state)
            case "error":
                state = failed(state, Failure.ERROR, now)
            case _:
                state = failed(state, Failure.TIME_OUT, now)
    state, leave = asked(state, now + max(LONGEST_PAUSE, PROBE_LIMIT))
    assert leave is not Leave.DO_WITHOUT
    assert asked(succeeded(state), now)[1] is Leave.ASK


def test_two_lines_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """People are told once that the cache is left alone, with the reason, and once that it is there again."""
    watched = fuse.reading("redis://there/0")
    with caplog.at_level(logging.WARNING, logger="semel"):
        for _ in range(5):
            watched.failed(Failure.TIME_OUT, "it hangs")
        watched._state = HalfOpen(0.0, FIRST_PAUSE)
        watched.failed(Failure.ERROR, "it is still away")
        watched._state = HalfOpen(0.0, FIRST_PAUSE)
        watched.succeeded()
        watched.succeeded()
    assert [record.getMessage() for record in caplog.records] == [
        "The cache redis://there/0 is left alone for now, and the durable store answers: it hangs",
        "The cache redis://there/0 is there again.",
    ]

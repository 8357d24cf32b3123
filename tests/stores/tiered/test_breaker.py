"""When a cache that fails is left alone: the breaker by itself, at moments that the test names."""

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.stores.tiered import cache
from semel.stores.tiered.cache import FIRST_PAUSE, MAX_FAILURES, MAX_PAUSE, PROBE_LIMIT, Breaker

ERROR, TIME_OUT = ConnectionError("it is away"), TimeoutError("it hangs")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(cache, "now", made)
    return made


def breaker(*errors: Exception) -> Breaker:
    made = Breaker("The cache", opened="is left alone", closed="is used again.")
    for error in errors:
        made.failed(error)
    return made


def test_a_well_cache_is_asked() -> None:
    """A cache that has not failed is asked, and needs no probe."""
    assert breaker().is_closed
    assert not breaker().may_probe()


def test_one_time_out_is_enough() -> None:
    """A cache that hangs is left alone at once: each request that asks it would wait as long."""
    assert not breaker(TIME_OUT).is_closed


def test_errors_in_a_row() -> None:
    """A few errors in a row do the same, and fewer don't."""
    assert breaker(*[ERROR] * (MAX_FAILURES - 1)).is_closed
    assert not breaker(*[ERROR] * MAX_FAILURES).is_closed


def test_errors_not_in_a_row() -> None:
    """An answer in between makes up for the errors before it."""
    made = breaker()
    for _ in range(10 * MAX_FAILURES):
        made.failed(ERROR)
        made.succeeded()
    assert made.is_closed


def test_one_probe_after_the_pause(clock: Clock) -> None:
    """After the pause one probe is sent, and nothing else is asked until it is known what came of it."""
    made = breaker(TIME_OUT)
    assert not made.may_probe()
    clock.now = FIRST_PAUSE
    assert (made.may_probe(), made.may_probe(), made.is_closed) == (True, False, False)
    made.succeeded()
    assert made.is_closed


def test_pauses_double(clock: Clock) -> None:
    """With each probe that fails the pause doubles, up to a limit; a cache that was there again begins anew."""
    made, pauses = breaker(TIME_OUT), []
    for _ in range(12):
        begun = clock.now
        while not made.may_probe():
            clock.now += FIRST_PAUSE
        pauses.append(clock.now - begun)
        made.failed(ERROR)
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == max(pauses) == MAX_PAUSE
    clock.now += MAX_PAUSE
    assert made.may_probe()
    made.succeeded()
    made.failed(TIME_OUT)
    clock.now += FIRST_PAUSE
    assert made.may_probe()


def test_stragglers_are_no_news(clock: Clock) -> None:
    """What was under way when the cache was left alone changes nothing, whatever comes of it."""
    made = breaker(TIME_OUT)
    made.succeeded()
    assert not made.is_closed
    clock.now = FIRST_PAUSE
    made.failed(TIME_OUT)
    assert made.may_probe()


def test_a_probe_that_is_never_heard_of(clock: Clock) -> None:
    """Another probe takes the place of one whose thread or loop has ended."""
    made = breaker(TIME_OUT)
    clock.now = FIRST_PAUSE
    assert made.may_probe()
    clock.now += PROBE_LIMIT
    assert made.may_probe()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["probe", "succeed", "error", "time out"]), st.floats(0, 100))))
def test_it_always_comes_back(clock: Clock, story: list[tuple[str, float]]) -> None:
    """Whatever happened, a cache that answers its next probe is asked again, within the longest pause and a probe."""
    made = breaker()
    clock.now = 0.0
    for what, passes in story:
        clock.now += passes
        match what:
            case "probe":
                made.may_probe()
            case "succeed":
                made.succeeded()
            case "error":
                made.failed(ERROR)
            case _:
                made.failed(TIME_OUT)
    clock.now += max(MAX_PAUSE, PROBE_LIMIT)
    assert made.is_closed or made.may_probe()
    made.succeeded()
    assert made.is_closed


def test_two_lines_are_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """People are told once that the cache is left alone, with the reason, and once that it is used again."""
    with caplog.at_level(logging.WARNING, logger="semel"):
        made = breaker(*[TIME_OUT] * 5)
        clock.now += FIRST_PAUSE
        assert made.may_probe()
        made.failed(ERROR)
        clock.now += MAX_PAUSE
        assert made.may_probe()
        made.succeeded()
        made.succeeded()
    assert caplog.messages == ["The cache is left alone: it hangs", "The cache is used again."]

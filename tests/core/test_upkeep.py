"""What becomes of records that nobody works on, case by case."""

from dataclasses import replace
from datetime import timedelta

import pytest

from semel.core.record import NO_TOKEN, Hold, OnCrash, Stuck
from semel.core.upkeep import (
    FIRST_PAUSE,
    MAX_ATTEMPTS,
    MAX_BATCH,
    MAX_DOUBLINGS,
    Free,
    Hand,
    ParkIt,
    Run,
    finishing,
    in_turn,
    is_due,
    next_batch,
    pause_after,
    sweeping,
)
from semel.errors import StoreError, StoreReadOnly, StoreUnavailable

STEPS = '[{"phase":"ride_created","result":1}]'
MOMENT = timedelta(microseconds=1)

CUT_SHORT = StoreUnavailable("time-out", was_sent=True)
UNREACHABLE = StoreUnavailable("no route")


def stuck(
    on_crash: OnCrash = "rerun",
    *,
    steps: str | None = None,
    has_request: bool = False,
    attempt: int = 1,
    silent_for: timedelta = MOMENT,
    token: bytes = b"t" * 16,
    tries: int = 0,
) -> Stuck:
    return Stuck(Hold("alice", "key", attempt, token), on_crash, steps, has_request, silent_for, tries)


@pytest.mark.parametrize(
    "on_crash, steps, has_request, has_completer, decision",
    [
        ("rerun", None, False, False, Free()),
        ("rerun", STEPS, False, False, Free()),
        ("refuse", STEPS, False, False, Free()),  # what was done is known, and the rest can be done
        ("refuse", None, False, False, ParkIt()),
        ("rerun", None, True, False, Free()),  # nobody would come for the request
        ("rerun", None, True, True, Hand()),
        ("rerun", STEPS, True, True, Hand()),
        ("refuse", STEPS, True, True, Hand()),
        ("refuse", None, True, True, ParkIt()),  # the completer may not run it again either
        ("rerun", None, False, True, Free()),
        ("refuse", None, False, True, ParkIt()),
    ],
)
def test_sweeping(
    on_crash: OnCrash, steps: str | None, has_request: bool, has_completer: bool, decision: Free | Hand | ParkIt
) -> None:
    """A dead worker's key is free, unless its policy forbids a second run; a completer is left what it can finish."""
    found = stuck(on_crash, steps=steps, has_request=has_request)
    assert sweeping(found, has_completer=has_completer) == decision


def test_pauses_double_up_to_a_limit() -> None:
    """The completer waits twice as long after each try, and never longer than the longest pause."""
    pauses = [pause_after(tries) for tries in range(11)]
    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert max(pauses) == pauses[MAX_DOUBLINGS] == pauses[-1] == pause_after(1_000_000)


@pytest.mark.parametrize("tries", range(MAX_ATTEMPTS))
def test_finishing_waits_for_its_time(tries: int) -> None:
    """An operation is finished once its worker has been silent for as long as this try's pause, and not before."""
    pause = pause_after(tries)
    assert not is_due(stuck(tries=tries, silent_for=pause - MOMENT))
    assert is_due(stuck(tries=tries, silent_for=pause))
    assert is_due(stuck(tries=tries, silent_for=pause, token=NO_TOKEN))
    assert finishing(stuck(tries=tries, silent_for=pause)) == Run()


def test_finishing_gives_up() -> None:
    """After the last try, and its pause, an operation is parked. What its client tries by itself does not count."""
    late = timedelta(days=1)
    assert finishing(stuck(tries=MAX_ATTEMPTS, silent_for=late)) == ParkIt()
    assert not is_due(stuck(tries=MAX_ATTEMPTS))
    assert finishing(stuck(tries=2, silent_for=late), max_attempts=2) == ParkIt()
    assert finishing(stuck(attempt=100, silent_for=late)) == Run()


def test_finishing_what_may_not_run_again() -> None:
    """What its policy forbids to run again is parked at once; with a recovery point it is run on."""
    late = timedelta(days=1)
    assert finishing(stuck("refuse", silent_for=late)) == ParkIt()
    assert finishing(stuck("refuse", steps=STEPS, silent_for=late)) == Run()


@pytest.mark.parametrize(
    "size, outcome, following",
    [
        (MAX_BATCH, CUT_SHORT, MAX_BATCH // 2),
        (3, CUT_SHORT, 1),
        (1, CUT_SHORT, None),
        (MAX_BATCH, UNREACHABLE, None),
        (MAX_BATCH, StoreReadOnly(), None),
        (1, None, 2),
        (100, None, 125),
        (MAX_BATCH - 1, None, MAX_BATCH),
        (MAX_BATCH, None, MAX_BATCH),
    ],
)
def test_next_batch(size: int, outcome: StoreError | None, following: int | None) -> None:
    """A batch that was cut short is halved, down to one record, and grows again; where size is no help, it ends."""
    assert next_batch(size, outcome) == following


def test_every_size_is_regained() -> None:
    """From a single record, a batch grows to the largest and no further."""
    size, rounds = 1, 0
    while size < 200:
        size = next_batch(size, None, 200) or 0
        rounds += 1
    assert (size, rounds < 40) == (200, True)


def test_scopes_take_turns() -> None:
    """The longest silent of every scope comes first, then the second of every scope; and no more than are wanted."""

    def of(scope: str, key: str, seconds: int) -> Stuck:
        return replace(stuck(silent_for=timedelta(seconds=seconds)), hold=Hold(scope, key, 1, b"t" * 16))

    backlog = [of("a", f"{number}", 100 - number) for number in range(3)]
    others = [of("b", "0", 9), of("c", "0", 5), of("b", "1", 7)]
    ordered = in_turn([*reversed(backlog), *others], 5)
    assert [(each.hold.scope, each.hold.key) for each in ordered] == [
        ("a", "0"),
        ("b", "0"),
        ("c", "0"),
        ("a", "1"),
        ("b", "1"),
    ]
    assert in_turn([], 5) == ()


def accepted(each: Stuck) -> Stuck:
    return replace(each, is_accepted=True, has_request=True)


def test_what_was_accepted_is_begun_at_once() -> None:
    """Nobody else will run it, so it waits for nobody; what a dead worker was at is taken over at once, too."""
    resolved = stuck(token=NO_TOKEN)  # by an operator
    for each in (stuck(), stuck(tries=1, attempt=1), resolved):
        assert is_due(accepted(each))
        assert finishing(accepted(each)) == Run()


def test_what_was_accepted_and_ended_in_vain_waits() -> None:
    """After a try that ended in vain comes a pause, twice as long each time, and after the last an operator."""
    for tries in range(1, MAX_ATTEMPTS):
        each = accepted(stuck(tries=tries, token=NO_TOKEN))
        assert not is_due(replace(each, silent_for=pause_after(tries - 1) - MOMENT))
        assert is_due(replace(each, silent_for=pause_after(tries - 1)))
        assert finishing(each) == Run()
    tired = accepted(stuck(tries=MAX_ATTEMPTS, token=NO_TOKEN, silent_for=timedelta(days=1)))
    assert finishing(tired) == ParkIt()


def test_what_was_accepted_and_may_not_run_again() -> None:
    """A policy that refuses a second run has a dead worker's parked; what was not begun, or ended in order, is run."""
    assert finishing(accepted(stuck("refuse"))) == Run()
    assert finishing(accepted(stuck("refuse", tries=1))) == ParkIt()
    assert finishing(accepted(stuck("refuse", tries=1, steps=STEPS))) == Run()
    given_up = accepted(stuck("refuse", tries=1, token=NO_TOKEN, silent_for=FIRST_PAUSE))
    assert finishing(given_up) == Run()

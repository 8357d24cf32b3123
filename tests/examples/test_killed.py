"""Rocket Rides is killed, and cut off from its provider. What came of it, the database and the provider's books say.

Some of the lines are tried, and others with another SEMEL_SEED; SEMEL_EVERY_LINE=1 tries them all.
"""

import os
import random
from collections import Counter

import pytest

from tests.examples.conftest import World
from tests.examples.dying import Outcome

EVERY_LINE = os.environ.get("SEMEL_EVERY_LINE") == "1"
SEED = os.environ.get("SEMEL_SEED", "1")
#: As many as take about twenty seconds.
SAMPLE = 40
#: One recovery in so many is killed too, and recovered from.
KILLED_AGAIN = 3
#: The share of the lines at which it must really have died, for the test to count.
REACHED = 0.95
#: Nothing listens there.
NOWHERE = "http://127.0.0.1:9"

STEPS = {"ride_created", "charge_created", "ride_charged", "receipt_sent"}


@pytest.mark.slow
@pytest.mark.timeout(3600 if EVERY_LINE else 120)
def test_killed_at_any_line_a_retry_ends_with_one_ride_one_charge_one_receipt(world: World) -> None:
    """Whichever line it is killed at, the retry gets 201, and there is one ride, one charge and one receipt."""
    chance = random.Random(SEED)
    undisturbed = world.send("nobody-dies")
    assert undisturbed.status == 201
    died_after: Counter[str | None] = Counter()
    places = lines(undisturbed.lines, chance)
    for line in places:
        rider = f"dies-at-{line}"
        if not world.send(rider, line).killed:
            continue  # Threads may save a line or two; more would be missed below.
        record = world.record(rider)
        died_after[record["recovery_point"] if record else None] += 1
        if line % KILLED_AGAIN == 0:
            world.retry(rider, chance.randint(1, undisturbed.lines))
        assert world.retry(rider).status == 201, rider
        check_rider(world, rider)
    assert died_after.total() >= REACHED * len(places)
    assert set(died_after) == {None, *STEPS}, "It must have died before the first step and after each."


def lines(last: int, chance: random.Random) -> list[int]:
    """The lines to die at: all, or some from everywhere."""
    if EVERY_LINE:
        return list(range(1, last + 1))
    stride = last / SAMPLE
    return [int(number * stride + chance.random() * stride) + 1 for number in range(SAMPLE)]


def test_gate_4_killed_mid_phase_resumes_and_repeats_nothing(world: World) -> None:
    """Killed between a phase's write and its commit: the write is undone, the retry resumes at the last recovery point,
    and no finished step is repeated.
    """
    assert world.send("Ada", line=2, function="mark").killed
    assert world.record("Ada") == {"state": "processing", "attempt": 1, "recovery_point": "charge_created"}
    assert [ride["status"] for ride in world.rides()] == ["booked"]
    answer = world.retry("Ada")
    assert (answer.status, answer.replayed) == (201, False)
    assert world.record("Ada") == {"state": "complete", "attempt": 2, "recovery_point": "receipt_sent"}
    check_rider(world, "Ada")
    assert orders(world) == ["/charges", "/receipts"]
    assert world.retry("Ada").replayed


@pytest.mark.parametrize(
    "function, line, repeated",
    [("charge_card", 3, "/charges"), ("send_receipt", 2, None)],
    ids=["a charge, called again with its key", "a receipt, asked about"],
)
def test_gate_4_killed_between_an_effect_and_its_record(
    world: World, function: str, line: int, repeated: str | None
) -> None:
    """Killed when the provider has answered and nothing is recorded: the retry finds out, and nothing happens twice."""
    assert world.send("Ada", line, function).killed
    assert world.retry("Ada").status == 201
    check_rider(world, "Ada")
    assert sorted(orders(world)) == sorted(["/charges", "/receipts", *([repeated] if repeated else [])])


@pytest.mark.slow
@pytest.mark.parametrize("to", ["/charges", "/receipts"])
@pytest.mark.parametrize("kind", ["lose", "fail", "hang"])
def test_gate_9_partition_during_a_payment(world: World, to: str, kind: str) -> None:
    """The provider did it and its answer was lost; or it failed, or was silent: a clean 503, and the retry ends it."""
    world.trouble(to, kind)
    check_clean_error(world.send("Ada"))
    assert len(world.books("charges")) == (0 if to == "/charges" and kind != "lose" else 1)
    assert world.send("Ada").status == 201  # At once: an error answer gives the key up.
    check_rider(world, "Ada")


def test_gate_9_partition_during_a_payment_refused(world: World) -> None:
    """The provider can't be reached: a clean 503 and no charge, as often as it is tried; afterwards exactly one."""
    for _ in range(2):
        check_clean_error(world.send("Ada", provider=NOWHERE))
    assert world.books("orders") == []
    assert world.send("Ada").status == 201
    check_rider(world, "Ada")
    assert orders(world) == ["/charges", "/receipts"]


def test_a_declined_card_is_an_outcome(world: World) -> None:
    """A decline is kept: the retry gets the same 402, and the card is not tried again."""
    world.trouble("/charges", "decline")
    first, again = world.send("Bob"), world.send("Bob")
    assert (first.status, first.replayed) == (402, False)
    assert (again.status, again.replayed, again.ride) == (402, True, first.ride)
    assert orders(world) == ["/charges"]
    assert world.books("charges") == []


def check_rider(world: World, rider: str) -> None:
    """One ride, one charge, one receipt."""
    (ride,) = [ride for ride in world.rides() if ride["rider"] == rider]
    charges = [each["id"] for each in world.books("charges") if each["ride"] == ride["id"]]
    receipts = [each["id"] for each in world.books("receipts") if each["ride"] == ride["id"]]
    assert (ride["status"], charges, len(receipts)) == ("charged", [ride["charge"]], 1), rider


def check_clean_error(answer: Outcome) -> None:
    """One that says when to try again."""
    assert (answer.status, answer.retry_after) == (503, "1")


def orders(world: World) -> list[str]:
    """What the provider was asked for, in order."""
    return [each["to"] for each in world.books("orders")]

"""What a run ends with: a table of faults reached and zeros, and 1 unless all of them are zeros."""

from torture.checker import Violation
from torture.report import is_good, table, troubles
from torture.scenario import Outcome, Plan, Scenario, Worlds


class Pulled:
    name = "plug pulled"
    minimum = 10

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        return Outcome(0)


PULLED: Scenario = Pulled()
DOUBLED = Violation("doubled", "pay-1", "ride was done 2 times")


def test_the_table_has_a_row_for_each_fault() -> None:
    """A row says how many were reached, and what went wrong."""
    shown = table({PULLED: Outcome(1234, (DOUBLED,))}, Plan())
    assert shown.splitlines()[-1].split() == ["plug", "pulled", "1,234", "10", "1", "0", "0", "0"]


def test_a_run_is_good_when_all_is_zero_and_enough_was_tried() -> None:
    """Too few faults are as bad as a violation. A shortened run has to reach one."""
    assert is_good(PULLED, Outcome(10), Plan())
    assert not is_good(PULLED, Outcome(9), Plan())
    assert not is_good(PULLED, Outcome(10, (DOUBLED,)), Plan())
    assert is_good(PULLED, Outcome(1), Plan(stride=5))
    assert not is_good(PULLED, Outcome(0), Plan(stride=5))


def test_what_went_wrong_is_said_in_lines() -> None:
    """Each violation has a line with its key; where there is none, nothing is said."""
    assert troubles({PULLED: Outcome(10)}, Plan()) == ""
    said = troubles({PULLED: Outcome(2, (DOUBLED,) * 12)}, Plan()).splitlines()
    assert said[0] == "plug pulled: too few faults were reached"
    assert said[1] == "plug pulled: doubled: ride was done 2 times (key pay-1)"
    assert said[-1] == "plug pulled: and 2 more"


def test_the_same_seed_makes_the_same_plan() -> None:
    """Fault points are chosen by the seed and their part of the run alone."""
    assert Plan(7, 30).points(100, "a") == Plan(7, 30).points(100, "a")
    assert len({Plan(seed, 30).points(1000, "a") for seed in range(20)}) > 5
    assert list(Plan().points(3, "a")) == [1, 2, 3]

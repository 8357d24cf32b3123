"""What to do about a key that is already there: every case, against a table written out by hand."""

from dataclasses import replace
from itertools import product

import pytest

from semel.core.decision import Accepted, Busy, Decision, Refuse, Replay, Run, decide
from semel.core.message import Answer
from semel.core.policy import Late, Policy
from semel.core.record import Found, OnCrash
from semel.core.state import TERMINAL, State
from semel.errors import KeyExpired, KeyReused, OutcomeUnknown, Refusal

ANSWER = Answer(201, ((b"location", b"/charges/1"),), b"{}")

RUN, REPLAY, REUSED, BUSY, ACCEPTED = "run", "replay", "reused", "busy", "accepted"
LATE = {"rerun": RUN, "refuse": "expired"}
CRASH = {"rerun": RUN, "refuse": "unknown"}

IN_PROGRESS, PARKED, ENDED = "in progress", "parked", "ended"
WHERE = dict.fromkeys(State, IN_PROGRESS) | {State.UNKNOWN: PARKED} | dict.fromkeys(TERMINAL, ENDED)

#: (where, lease is over, expired, same request): what comes of it. LATE and CRASH leave it to the policy.
TABLE: dict[tuple[str, bool, bool, bool], str | dict[str, str]] = {
    (IN_PROGRESS, False, False, True): BUSY,
    (IN_PROGRESS, False, False, False): REUSED,
    (IN_PROGRESS, False, True, True): BUSY,  # a worker that renews is alive, whatever the retention
    (IN_PROGRESS, False, True, False): REUSED,
    (IN_PROGRESS, True, False, True): CRASH,
    (IN_PROGRESS, True, False, False): REUSED,
    (IN_PROGRESS, True, True, True): LATE,
    (IN_PROGRESS, True, True, False): LATE,  # past retention the fingerprint is forgotten too
    (PARKED, True, False, True): "unknown",  # whatever the policy says of crashes: a step's outcome can't be known
    (PARKED, True, False, False): REUSED,
    (PARKED, True, True, True): "unknown",  # however late it is: only a person ends it
    (PARKED, True, True, False): REUSED,
    # No store says that a parked record has a lease. If one did, somebody would be at work.
    (PARKED, False, False, True): BUSY,
    (PARKED, False, False, False): REUSED,
    (PARKED, False, True, True): BUSY,
    (PARKED, False, True, False): REUSED,
    (ENDED, True, False, True): REPLAY,
    (ENDED, True, False, False): REUSED,
    (ENDED, True, True, True): LATE,
    (ENDED, True, True, False): LATE,
    # No store says that an ended record has a lease. If one did, its answer would still be the answer.
    (ENDED, False, False, True): REPLAY,
    (ENDED, False, False, False): REUSED,
    (ENDED, False, True, True): REPLAY,
    (ENDED, False, True, False): REUSED,
}

YES_OR_NO = (False, True)


@pytest.mark.parametrize("late", ["rerun", "refuse"])
@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
@pytest.mark.parametrize(
    "state, lease_is_over, is_expired, is_same", list(product(State, YES_OR_NO, YES_OR_NO, YES_OR_NO))
)
def test_every_case(
    *, state: State, lease_is_over: bool, is_expired: bool, is_same: bool, on_crash: OnCrash, late: Late
) -> None:
    """Every case is decided as the table says."""
    found = seen(state, lease_is_over=lease_is_over, is_expired=is_expired)
    wanted = TABLE[WHERE[state], lease_is_over, is_expired, is_same]
    if isinstance(wanted, dict):
        wanted = wanted[late if wanted is LATE else on_crash]
    decision = decide(found, Policy(on_crash=on_crash, late=late), is_same_request=is_same)
    assert named(decision) == wanted


@pytest.mark.parametrize("late", ["rerun", "refuse"])
@pytest.mark.parametrize("lease_is_over, is_expired, is_same", list(product(YES_OR_NO, YES_OR_NO, YES_OR_NO)))
@pytest.mark.parametrize("state", State)
def test_every_case_of_an_accepted_one(
    *, state: State, lease_is_over: bool, is_expired: bool, is_same: bool, late: Late
) -> None:
    """What was accepted is left to its worker, whatever became of that; all else is decided as ever."""
    found = replace(seen(state, lease_is_over=lease_is_over, is_expired=is_expired), is_accepted=True)
    wanted = TABLE[WHERE[state], lease_is_over, is_expired, is_same]
    if wanted in (BUSY, CRASH) and state is not State.UNKNOWN:
        wanted = ACCEPTED
    if isinstance(wanted, dict):
        wanted = wanted[late]
    assert named(decide(found, Policy(late=late), is_same_request=is_same)) == wanted


@pytest.mark.parametrize("on_crash", ["rerun", "refuse"])
def test_recovery_point_is_always_run_on_from(on_crash: OnCrash) -> None:
    """With steps it is known what a dead worker did, so the rest is run, whatever the policy says of crashes."""
    found = replace(seen(State.PROCESSING, lease_is_over=True), steps='[{"phase":"ride_created","result":null}]')
    assert decide(found, Policy(on_crash=on_crash), is_same_request=True) == Run()


def test_steps_of_a_parked_operation() -> None:
    """Steps don't unpark: of the last one nobody knows."""
    found = replace(seen(State.UNKNOWN, lease_is_over=True), steps='[{"effect":"charge_created"}]')
    assert named(decide(found, Policy(), is_same_request=True)) == "unknown"


@pytest.mark.parametrize("state", State)
def test_mismatch_is_checked_in_every_state(state: State) -> None:
    """Another request under the same key is refused in every state, before "in progress": 409 would mean wait."""
    decision = decide(seen(state, lease_is_over=state in TERMINAL), Policy(), is_same_request=False)
    assert named(decision) == REUSED


def seen(state: State, *, lease_is_over: bool = False, is_expired: bool = False) -> Found:
    answer = ANSWER if state in TERMINAL else None
    return Found(state, 1, b"t" * 16, b"", answer, lease_is_over=lease_is_over, is_expired=is_expired)


def named(decision: Decision) -> str:
    match decision:
        case Run():
            return RUN
        case Replay(answer):
            assert answer is ANSWER
            return REPLAY
        case Busy():
            return BUSY
        case Accepted():
            return ACCEPTED
        case Refuse(refusal):
            refusals: dict[type[Refusal], str] = {
                KeyReused: REUSED,
                KeyExpired: "expired",
                OutcomeUnknown: "unknown",
            }
            return refusals[type(refusal)]

"""The state machine, and that its table holds what is said of it."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.state import TERMINAL, TRANSITIONS, Event, State, after

PLACES: tuple[State | None, ...] = (None, *State)

#: Written out once more, by hand: a change of the machine has to be made twice.
ALLOWED: dict[tuple[State | None, Event], State | None] = {
    (None, Event.ACCEPT): State.PENDING,
    (None, Event.CLAIM): State.PROCESSING,
    (None, Event.COMPLETE): State.COMPLETE,
    (None, Event.FAIL): State.FAILED,
    (State.PENDING, Event.ACCEPT): State.PENDING,
    (State.PENDING, Event.CLAIM): State.PROCESSING,
    (State.PENDING, Event.TAKE_OVER): State.PROCESSING,
    (State.PENDING, Event.RELEASE): None,
    (State.PENDING, Event.PARK): State.UNKNOWN,
    (State.PENDING, Event.DISCARD): None,
    (State.PENDING, Event.ABANDON): State.FAILED,
    (State.PROCESSING, Event.ACCEPT): State.PENDING,
    (State.PROCESSING, Event.RENEW): State.PROCESSING,
    (State.PROCESSING, Event.TAKE_OVER): State.PROCESSING,
    (State.PROCESSING, Event.SAVE): State.PROCESSING,
    (State.PROCESSING, Event.COMPLETE): State.COMPLETE,
    (State.PROCESSING, Event.FAIL): State.FAILED,
    (State.PROCESSING, Event.RELEASE): None,
    (State.PROCESSING, Event.GIVE_UP): State.PROCESSING,
    (State.PROCESSING, Event.SWEEP): State.PROCESSING,
    (State.PROCESSING, Event.PARK): State.UNKNOWN,
    (State.PROCESSING, Event.DISCARD): None,
    (State.PROCESSING, Event.ABANDON): State.FAILED,
    (State.UNKNOWN, Event.RESOLVE): State.PROCESSING,
    (State.UNKNOWN, Event.COMPLETE): State.COMPLETE,
    (State.UNKNOWN, Event.DISCARD): None,
    (State.COMPLETE, Event.ACCEPT): State.PENDING,
    (State.COMPLETE, Event.TAKE_OVER): State.PROCESSING,
    (State.COMPLETE, Event.REAP): None,
    (State.FAILED, Event.ACCEPT): State.PENDING,
    (State.FAILED, Event.TAKE_OVER): State.PROCESSING,
    (State.FAILED, Event.REAP): None,
}


@pytest.mark.parametrize("state, event", list(product(PLACES, Event)))
def test_every_event_in_every_state(state: State | None, event: Event) -> None:
    """An event leads where the table says, and anywhere else it can't happen."""
    if (state, event) in ALLOWED:
        assert after(state, event) is ALLOWED[state, event]
    else:
        with pytest.raises(LookupError, match=f"{event} can't happen to a record that is {state or 'absent'}"):
            after(state, event)


def test_every_state_has_an_exit() -> None:
    """Nothing is stuck for ever: from every state a record can come to an end, and from its end be gone."""
    for state in State:
        reached: set[State | None] = {state}
        while more := {then for each in reached for then in TRANSITIONS[each].values()} - reached:
            reached |= more
        assert None in reached
        assert reached & TERMINAL


def test_only_a_person_ends_what_is_unknown() -> None:
    """No time, no worker, no client and no reaper leads out of *unknown*: only what an operator says."""
    assert TRANSITIONS[State.UNKNOWN].keys() == {Event.RESOLVE, Event.COMPLETE, Event.DISCARD}


def test_every_event_can_happen() -> None:
    """No event is without a use."""
    assert {event for events in TRANSITIONS.values() for event in events} == set(Event)


def test_only_what_has_ended_is_reaped() -> None:
    """Nothing in flight is reaped."""
    assert {state for state, events in TRANSITIONS.items() if Event.REAP in events} == TERMINAL


def test_an_ending_is_left_only_by_expiry() -> None:
    """A stored answer never changes until it expires: only what needs that (a new operation, reaping) touches it."""
    for state in TERMINAL:
        assert set(TRANSITIONS[state]) == {Event.ACCEPT, Event.TAKE_OVER, Event.REAP}


def test_nobody_works_on_what_is_parked() -> None:
    """A parked operation moves when an operator says so, or when it is past retention: no worker can touch it."""
    worker = {Event.RENEW, Event.SAVE, Event.RELEASE, Event.GIVE_UP, Event.SWEEP, Event.FAIL, Event.ABANDON, Event.REAP}
    assert not worker & set(TRANSITIONS[State.UNKNOWN])


#: What only happens to an operation that somebody has begun to work on.
BEGUN = {Event.CLAIM, Event.TAKE_OVER}


@given(st.lists(st.sampled_from(Event), max_size=20))
def test_no_claim_no_run(events: list[Event]) -> None:
    """Whatever happens in whatever order: what ends was begun; or is one commit; or nobody ran it, and it says so."""
    state: State | None = None
    lived: list[Event] = []
    for event in events:
        try:
            state = after(state, event)
        except LookupError:
            continue
        # What is accepted in place of one that expired is another operation.
        lived = [] if state is None else [event] if event is Event.ACCEPT else [*lived, event]
        is_begun = bool({*BEGUN, Event.RESOLVE} & set(lived))  # An operator lets it go on, for the next to take over.
        if state in TERMINAL:
            ended = lived in ([Event.COMPLETE], [Event.FAIL], [Event.ACCEPT, Event.ABANDON])
            assert is_begun or ended or lived == [Event.ACCEPT, Event.PARK, Event.COMPLETE]
        if event in {Event.SAVE, Event.RENEW, Event.GIVE_UP, Event.SWEEP}:
            assert is_begun

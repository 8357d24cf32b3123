"""The state machine of a record. All that can change a state is in this file; it knows nothing of stores or HTTP.

A record that is not there is ``None``. *Expired* is not a state: the ``expires_at`` of the record has passed by the
database's clock, which opens the transitions marked so below. An *unknown* record never expires: an operator ends it.
The recovery point moves inside ``PROCESSING``.
The diagram in the documentation is drawn from ``TRANSITIONS``.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where an operation is."""

    PENDING = "pending"
    PROCESSING = "processing"
    UNKNOWN = "unknown"  #: parked: a step's outcome can't be known, and an operator has to say
    COMPLETE = "complete"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to an operation."""

    ACCEPT = "accept"  #: stored, to be run by a worker; also in place of a record that expired
    CLAIM = "claim"  #: a worker starts it
    RENEW = "renew"  #: the worker is still alive
    TAKE_OVER = "take over"  #: the worker's lease ran out; or the record expired, and a late retry is a new operation
    SAVE = "save"  #: a step is recorded: the recovery point moves on
    COMPLETE = "complete"  #: the handler gave a final answer
    FAIL = "fail"  #: it ended without one, and may have taken effect
    RELEASE = "release"  #: it ended, and nothing happened
    GIVE_UP = "give up"  #: this attempt ends, but something may have happened: the next takes over
    SWEEP = "sweep"  #: a dead worker's key is freed: the next takes over
    PARK = "park"  #: what a step did can't be known, and doing it again is not allowed
    RESOLVE = "resolve"  #: an operator has said what it did
    DISCARD = "discard"  #: an operator has freed the key, whatever it did
    ABANDON = "abandon"  #: it was not run, or not ended, within its retention
    REAP = "reap"  #: expired, and deleted


TRANSITIONS: dict[State | None, dict[Event, State | None]] = {
    None: {
        Event.ACCEPT: State.PENDING,
        Event.CLAIM: State.PROCESSING,
        # In atomic mode the claim and the ending are one commit, so the state between is never visible.
        Event.COMPLETE: State.COMPLETE,
        Event.FAIL: State.FAILED,
    },
    State.PENDING: {
        Event.ACCEPT: State.PENDING,
        Event.CLAIM: State.PROCESSING,
        Event.TAKE_OVER: State.PROCESSING,
        Event.RELEASE: None,
        Event.PARK: State.UNKNOWN,
        Event.DISCARD: None,
        Event.ABANDON: State.FAILED,
    },
    State.PROCESSING: {
        Event.ACCEPT: State.PENDING,
        Event.RENEW: State.PROCESSING,
        Event.TAKE_OVER: State.PROCESSING,
        Event.SAVE: State.PROCESSING,
        Event.COMPLETE: State.COMPLETE,
        Event.FAIL: State.FAILED,
        Event.RELEASE: None,
        Event.GIVE_UP: State.PROCESSING,
        Event.SWEEP: State.PROCESSING,
        Event.PARK: State.UNKNOWN,
        Event.DISCARD: None,
        Event.ABANDON: State.FAILED,
    },
    State.UNKNOWN: {
        Event.RESOLVE: State.PROCESSING,
        Event.COMPLETE: State.COMPLETE,
        Event.DISCARD: None,
    },
    State.COMPLETE: {
        Event.ACCEPT: State.PENDING,
        Event.TAKE_OVER: State.PROCESSING,
        Event.REAP: None,
    },
    State.FAILED: {
        Event.ACCEPT: State.PENDING,
        Event.TAKE_OVER: State.PROCESSING,
        Event.REAP: None,
    },
}

#: A terminal record has an answer, and keeps it until it expires.
TERMINAL = frozenset({State.COMPLETE, State.FAILED})


def after(state: State | None, event: Event) -> State | None:
    """Return the state that *event* leads to, or raise ``LookupError`` where it can't happen."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        message = f"{event!s} can't happen to a record that is {state or 'absent'}"
        raise LookupError(message) from None

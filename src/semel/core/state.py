"""The state machine of a record. All that can change a state is in this file; it knows nothing of stores or HTTP.

A record that is not there is ``None``. *Expired* is no state: it is a record whose ``expires_at`` has passed by the
database's clock, which opens the transitions marked so below. The recovery point moves inside ``PROCESSING``.
The diagram in the documentation is drawn from ``TRANSITIONS``.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where an operation is."""

    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETE = "complete"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to an operation."""

    ACCEPT = "accept"  #: stored, to be run later
    CLAIM = "claim"  #: a worker starts it
    RENEW = "renew"  #: the worker is still alive
    TAKE_OVER = "take over"  #: the worker's lease ran out; or the record expired, and a late retry starts anew
    COMPLETE = "complete"  #: the handler gave a final answer
    FAIL = "fail"  #: it ended without one, and may have taken effect
    RELEASE = "release"  #: it ended, and nothing happened
    GIVE_UP = "give up"  #: this attempt did nothing, but an earlier one may have: the next takes over
    ABANDON = "abandon"  #: accepted, and nobody ever ran it
    REAP = "reap"  #: expired, and deleted


TRANSITIONS: dict[State | None, dict[Event, State | None]] = {
    None: {
        Event.ACCEPT: State.PENDING,
        Event.CLAIM: State.PROCESSING,
    },
    State.PENDING: {
        Event.CLAIM: State.PROCESSING,
        Event.ABANDON: State.FAILED,
    },
    State.PROCESSING: {
        Event.RENEW: State.PROCESSING,
        Event.TAKE_OVER: State.PROCESSING,
        Event.COMPLETE: State.COMPLETE,
        Event.FAIL: State.FAILED,
        Event.RELEASE: None,
        Event.GIVE_UP: State.PROCESSING,
    },
    State.COMPLETE: {
        Event.TAKE_OVER: State.PROCESSING,
        Event.REAP: None,
    },
    State.FAILED: {
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

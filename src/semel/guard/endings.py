"""How a handler's run ended, as the flows are told. What follows from it is for them to say."""

from __future__ import annotations

from semel.core.handler import Answered, Ending, Lost, Parked, Raised, Streaming
from semel.core.message import Answer, Headers
from semel.core.replay import FIRST_SERVER_ERROR
from semel.errors import ConfigurationError, NoEffect, StoreError
from semel.operation import Operation

#: What a router answers by itself, before any handler: no such path, or the same path spelled otherwise.
ROUTERS_STATUSES = frozenset({307, 308, 404})


def answered(answer: Answer, operation: Operation, *, reached_handler: bool, no_effect: bool = False) -> Ending:
    """Return the ending of a handler that gave *answer*."""
    story = operation.story
    if operation.is_refused and answer.status < FIRST_SERVER_ERROR and not story.is_used:
        reached_handler = False
    if operation.is_freed:
        reached_handler = False
    # What a handler of steps did is recorded, so an error leaves it where a retry can go on.
    nothing_lost = no_effect or operation.has_no_effect or story.is_used
    if not (story.is_used or story.promised or story.is_parked or story.is_lost):
        # A handler without steps, as most are.
        story.is_over = True
        return Answered(answer, reached_handler, nothing_lost)
    return _standing(
        Answered(answer, reached_handler, nothing_lost, story.skipped, story.is_used, story.rest), operation
    )


def streaming(status: int, headers: Headers, operation: Operation) -> Ending:
    """Return the ending of a handler with an answer that can't be kept."""
    story = operation.story
    ending = Streaming(status, headers, story.skipped, story.rest, operation.has_no_effect, operation.is_freed)
    return _standing(ending, operation)


def raised(error: Exception, operation: Operation) -> Ending:
    """Return the ending of a handler that raised *error*."""
    story = operation.story
    nothing_lost = isinstance(error, NoEffect) or operation.has_no_effect or story.is_used
    # Before anything was recorded it is not half-way. A mistake in the program is no reason to come back then, and of a
    # store that is away it is true that nothing was run.
    has_begun = bool(story.progress.steps or story.in_doubt)
    has_steps = story.is_used and (has_begun or not isinstance(error, ConfigurationError | StoreError))
    return _standing(Raised(error, nothing_lost, story.skipped, has_steps, story.rest), operation)


def _standing(ending: Ending, operation: Operation) -> Ending:
    """Return *ending*, unless the operation is no longer this handler's to end. No step may begin any more."""
    operation.story.is_over = True
    if operation.story.is_parked:
        return Parked()
    return Lost() if operation.story.is_lost else ending

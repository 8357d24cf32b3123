"""Which answers are kept, which parts of them, and how a replay is marked. It stores nothing and sends nothing."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import assert_never

from semel.core.encrypted import refuse_marked
from semel.core.handler import Answered, Raised, Streaming
from semel.core.message import Answer, Headers
from semel.core.outcome import Ended
from semel.core.policy import Policy
from semel.core.problem import SHOULD_RETRY, refused
from semel.core.state import Event
from semel.core.value import value
from semel.errors import InProgress, NotReplayable, OperationFailed

#: An allow-list, since what it leaves out is unbounded: cookies would give one session to another, dates and request
#: ids belong to one response, and connection headers to the connection.
REPLAYED_HEADERS = frozenset(
    {
        b"cache-control",
        b"content-disposition",
        b"content-encoding",
        b"content-language",
        b"content-location",
        b"content-type",
        b"etag",
        b"last-modified",
        b"link",
        b"location",
    }
)

#: Stripe's name, which other APIs use, too; the IETF draft has none.
MARKER = (b"idempotent-replayed", b"true")

#: A response that never ends can't be kept, and waiting for its end would never return.
ENDLESS_MEDIA_TYPES = (b"text/event-stream", b"multipart/x-mixed-replace", b"application/grpc")
#: Sent line by line, perhaps without an end: unless its length is known, it is not held back.
STREAMED_MEDIA_TYPES = (
    b"application/x-ndjson",
    b"application/ndjson",
    b"application/jsonl",
    b"application/x-jsonl",
    b"application/jsonlines",
    b"application/x-jsonlines",
    b"application/json-seq",
    b"application/x-json-stream",
    b"application/stream+json",
)

FIRST_SERVER_ERROR = 500
#: A plain number: every answer is compared with it, and an enumeration's members are slow to read.
_CONFLICT = int(HTTPStatus.CONFLICT)


@value
class Keep:
    """Store this answer."""

    event: Event
    answer: Answer


@value
class Free:
    """Store nothing and free the key: nothing happened, or nothing final."""


def judge(ending: Answered | Streaming | Raised, policy: Policy) -> Keep | Free:
    """Decide whether a handler's ending is kept or frees the key."""
    match ending:
        case Answered(answer, reached_handler, no_effect):
            status = answer.status
            is_final = reached_handler and _is_kept(status, policy, no_effect=no_effect)
            if not is_final or (status == _CONFLICT and says_later(answer)):
                return Free()
            return Keep(_event(status), Answer(answer.status, kept(answer.headers, policy), answer.body))
        case Streaming(status, headers, no_effect=no_effect, is_freed=is_freed):
            if is_freed or not _is_kept(status, policy, no_effect=no_effect) or says_later(Answer(status, headers)):
                return Free()
            return Keep(_event(status), Answer(status, kept(headers, policy), None))
        case Raised(error, no_effect):
            # From a function with its own key, which another request is running: that means "later", too.
            is_later = isinstance(error, InProgress)
            if is_later or not _is_kept(FIRST_SERVER_ERROR, policy, no_effect=no_effect):
                return Free()
            return Keep(Event.FAIL, refused(OperationFailed(), policy))
        case _:  # pragma: no cover - mypy proves that nothing is left
            assert_never(ending)


def kept(headers: Headers, policy: Policy) -> Headers:
    """Return those of *headers* that a replay repeats, in order, with repeated ones."""
    wanted = REPLAYED_HEADERS
    if policy.replay_headers:
        wanted = REPLAYED_HEADERS | {name.encode() for name in policy.replay_headers}
    return tuple([pair for pair in headers if pair[0] in wanted])


def replayed(answer: Answer, policy: Policy) -> Answer:
    """Return the stored *answer*, marked as a replay; for a tombstone, the refusal that says the operation is done."""
    if answer.is_tombstone:
        return retold(answer, policy)
    refuse_marked(answer.headers)
    headers = (*answer.headers, MARKER)
    if policy.dialect == "stripe" and answer.status >= FIRST_SERVER_ERROR:
        # It will be the same the next time, and Stripe's clients would retry it unless they are told.
        headers = (*(pair for pair in headers if pair[0] != SHOULD_RETRY), (SHOULD_RETRY, b"false"))
    return Answer(answer.status, headers, answer.body)


def ended_with(answer: Answer) -> Ended:
    """Say how a request ended that got *answer* of an operation that was there before it."""
    return "replayed" if MARKER in answer.headers else "not_replayable"


def retold(answer: Answer, policy: Policy) -> Answer:
    """Return the stored *answer* to a request for the operation's state: the client may not have had it yet."""
    refuse_marked(answer.headers)
    if not answer.is_tombstone:
        return answer
    where = tuple(pair for pair in answer.headers if pair[0] == b"location")
    refusal = refused(NotReplayable(), policy)
    return Answer(refusal.status, (*refusal.headers, *where), refusal.body)


def says_later(answer: Answer) -> bool:
    """Whether a 409 says "not now", like 425 and 429, and not "never": a service behind the handler was busy."""
    if answer.status != HTTPStatus.CONFLICT:
        return False
    fields = dict(answer.headers)
    if b"retry-after" in fields or fields.get(SHOULD_RETRY) == b"true":
        return True
    return b"problem+json" in fields.get(b"content-type", b"") and _is_retryable(answer.body or b"")


def _is_retryable(problem: bytes) -> bool:
    try:
        said = json.loads(problem)
    except (ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("retryable") is True


def is_endless(headers: Headers) -> bool:
    """Whether these headers begin a response that has no end of its own."""
    return any(name == b"content-type" and kind.lower().startswith(ENDLESS_MEDIA_TYPES) for name, kind in headers)


def may_be_endless(headers: Headers) -> bool:
    """Whether these headers begin a response that is a stream, and may have no end: it is sent as it comes."""
    is_streamed = has_length = False
    for name, kind in headers:
        if name == b"content-type":
            media = kind.lower()
            if media.startswith(ENDLESS_MEDIA_TYPES):
                return True
            is_streamed = is_streamed or media.startswith(STREAMED_MEDIA_TYPES)
        elif name == b"content-length":
            has_length = True
    return is_streamed and not has_length


def _is_kept(status: int, policy: Policy, *, no_effect: bool = False) -> bool:
    if status < FIRST_SERVER_ERROR:
        return status in policy.keep
    if policy.server_errors == "auto":
        # Atomic mode rolls back what a server error leaves behind.
        return not no_effect and policy.mode != "atomic"
    return policy.server_errors == "keep"


def _event(status: int) -> Event:
    return Event.COMPLETE if status < FIRST_SERVER_ERROR else Event.FAIL

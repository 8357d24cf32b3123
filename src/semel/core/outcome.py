"""How a request ended, in one word of a closed list; and in report mode, how it would have. Nothing is enforced."""

from __future__ import annotations

import re
from typing import Literal

from semel.core.message import one_line
from semel.errors import (
    AnswerNotStored,
    BodyIncomplete,
    BodyTooLarge,
    IdentityRefused,
    InProgress,
    Interrupted,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    NotReplayable,
    OutcomeUnknown,
    Refusal,
    ScopeMissing,
    ShuttingDown,
    StoreError,
    Unauthenticated,
)

Outcome = Literal[
    "new",
    "keyless",
    "replay",
    "conflict",
    "mismatch",
    "missing",
    "malformed",
    "unscoped",
    "too_large",
    "incomplete",
    "expired",
    "rerun",
    "unknown",
    "shutting_down",
    "failed",
]

#: What each means, in the order in which they are shown.
OUTCOMES: dict[Outcome, str] = {
    "new": "the handler would have run, as it did",
    "keyless": "no key, and none is required: it would have passed, as it did",
    "replay": "a duplicate: the first answer would have been given again, and the handler not run",
    "conflict": "409: a duplicate of a request that still runs",
    "mismatch": "422: the key was used for another request",
    "missing": "400: no key, and one is required; or none can be made of the body",
    "malformed": "400: a key that can't be read",
    "unscoped": "400: `scope` returned nothing; the proxy: 400 or 401",
    "too_large": "413: the body is too large",
    "incomplete": "400: the body ended early",
    "expired": '410: past retention, with `late="refuse"`',
    "rerun": "an earlier run died or could not be recorded, and the handler would have run again, as it did",
    "unknown": '409: the same, with `on_crash="refuse"`',
    "shutting_down": "503: the server is about to stop",
    "failed": "not known, because the store or the `scope` function failed",
}

Ended = Literal[
    "ran",
    "freed",
    "not_kept",
    "replayed",
    "waited",
    "accepted",
    "passed_on",
    "reported",
    "conflict",
    "mismatch",
    "missing",
    "malformed",
    "unscoped",
    "too_large",
    "incomplete",
    "expired",
    "unknown",
    "not_replayable",
    "shutting_down",
    "store_failed",
    "not_stored",
    "fenced",
    "lease_lost",
    "refused",
    "interrupted",
    "error",
]

#: What each means, in the order in which they are shown.
ENDED: dict[Ended, str] = {
    "ran": "the handler ran, and its answer is stored",
    "freed": "the handler ran, and left nothing to keep: its key is free, and a retry runs it again",
    "not_kept": "the handler ran, and its answer was too large, too slow or a stream: it is sent once",
    "replayed": "a duplicate: it got the first answer again",
    "waited": "a duplicate that waited for the first request to end, and got its answer",
    "accepted": "202: a worker runs it, or does already",
    "passed_on": "not guarded: it has no key and needs none, its guard is off, or another guard has it",
    "reported": "report mode: it ran unchanged; `semel_reported_total` says what enforcing would have done",
    "conflict": "409: the first request with its key still runs",
    "mismatch": "422: its key was used for another request",
    "missing": "400: no key, and one is required",
    "malformed": "400: a key that can't be read",
    "unscoped": "400: `scope` returned nothing; the proxy: 400 or 401",
    "too_large": "413: the body is too large",
    "incomplete": "400: the body ended early",
    "expired": '410: past retention, with `late="refuse"`',
    "unknown": "409: the outcome of an earlier attempt, or of this one, is unknown",
    "not_replayable": "409: the first answer was not kept",
    "shutting_down": "503: the server is about to stop",
    "store_failed": "503: the store failed, and the handler did not run",
    "not_stored": "500: the handler ran, and its answer could not be stored",
    "fenced": "409: the handler ran, and another worker had taken the key over",
    "lease_lost": "409: the handler was stopped, since its lease was lost",
    "refused": "refused for another reason",
    "interrupted": "the client went away before the handler began",
    "error": "an error of the application or of the configuration, outside of the handler",
}

Door = Literal["asgi", "wsgi", "fastapi", "django", "flask", "function", "proxy", "inbox"]

#: Why a client of Semel's sends a request again.
RetryReason = Literal["not_sent", "lost", "conflict", "too_many", "unavailable", "other"]

#: What each means, in the order in which they are shown.
RETRY_REASONS: dict[RetryReason, str] = {
    "not_sent": "no connection could be made",
    "lost": "the connection was lost, or no answer came in time",
    "conflict": "409 or 425: another request with the key is running",
    "too_many": "429",
    "unavailable": "502, 503 or 504",
    "other": "another answer after which a retry is right",
}

#: Outcomes that enforcing would not have changed.
UNCHANGED = frozenset[Outcome]({"new", "keyless"})

_OF_REFUSALS: dict[type[Refusal], Outcome] = {
    KeyMissing: "missing",
    KeyInvalid: "malformed",
    ScopeMissing: "unscoped",
    Unauthenticated: "unscoped",
    IdentityRefused: "unscoped",
    BodyTooLarge: "too_large",
    BodyIncomplete: "incomplete",
    InProgress: "conflict",
    KeyReused: "mismatch",
    KeyExpired: "expired",
    OutcomeUnknown: "unknown",
    ShuttingDown: "shutting_down",
}

_ENDED_BY: dict[type[Exception], Ended] = {
    AnswerNotStored: "not_stored",
    BodyIncomplete: "incomplete",
    BodyTooLarge: "too_large",
    IdentityRefused: "unscoped",
    InProgress: "conflict",
    KeyExpired: "expired",
    KeyInvalid: "malformed",
    KeyMissing: "missing",
    KeyReused: "mismatch",
    NotReplayable: "not_replayable",
    OutcomeUnknown: "unknown",
    ScopeMissing: "unscoped",
    ShuttingDown: "shutting_down",
    StoreError: "store_failed",
    Unauthenticated: "unscoped",
    Refusal: "refused",
    Interrupted: "interrupted",
}

# A number, or something long with a digit in it: an id, most likely. /v1 and /oauth2 stay.
_ID = re.compile(r"[0-9]+|(?=[^0-9]*[0-9]).{8,}")


def outcome_of(refusal: Refusal) -> Outcome:
    """Name the outcome of a request that would have got *refusal*."""
    return _OF_REFUSALS.get(type(refusal), "failed")


def ended_by(error: BaseException) -> Ended:
    """Name how a request ended that was refused with *error*, or broken off by it."""
    return next((_ENDED_BY[kind] for kind in type(error).__mro__ if kind in _ENDED_BY), "error")


def route_of(method: str, path: str) -> str:
    """Name the endpoint of a request: its method and its path, with ``*`` for what looks like an id."""
    return one_line(f"{method} " + "/".join("*" if _ID.fullmatch(part) else part for part in path.split("/")))

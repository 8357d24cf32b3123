"""What report mode says of a request: what enforcing would have done, and at which endpoint. Nothing is enforced."""

from __future__ import annotations

import re
from typing import Literal

from semel.core.message import one_line
from semel.errors import (
    BodyIncomplete,
    BodyTooLarge,
    IdentityRefused,
    InProgress,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    OutcomeUnknown,
    Refusal,
    ScopeMissing,
    ShuttingDown,
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
    "unscoped": "400: `scope` returned nothing",
    "too_large": "413: the body is too large",
    "incomplete": "400: the body ended early",
    "expired": '410: past retention, with `late="refuse"`',
    "rerun": "an earlier run died or could not be recorded, and the handler would have run again, as it did",
    "unknown": '409: the same, with `on_crash="refuse"`',
    "shutting_down": "503: the server is about to stop",
    "failed": "not known, because the store or the `scope` function failed",
}

#: Outcomes that enforcing would not have changed.
UNCHANGED = frozenset[Outcome]({"new", "keyless"})

_OF_REFUSALS: dict[type[Refusal], Outcome] = {
    KeyMissing: "missing",
    KeyInvalid: "malformed",
    ScopeMissing: "unscoped",
    IdentityRefused: "unscoped",
    BodyTooLarge: "too_large",
    BodyIncomplete: "incomplete",
    InProgress: "conflict",
    KeyReused: "mismatch",
    KeyExpired: "expired",
    OutcomeUnknown: "unknown",
    ShuttingDown: "shutting_down",
}

# A number, or something long with a digit in it: an id, most likely. /v1 and /oauth2 stay.
_ID = re.compile(r"[0-9]+|(?=[^0-9]*[0-9]).{8,}")


def outcome_of(refusal: Refusal) -> Outcome:
    """Name the outcome of a request that would have got *refusal*."""
    return _OF_REFUSALS.get(type(refusal), "failed")


def route_of(method: str, path: str) -> str:
    """Name the endpoint of a request: its method and its path, with ``*`` for what looks like an id."""
    return one_line(f"{method} " + "/".join("*" if _ID.fullmatch(part) else part for part in path.split("/")))

"""What OpenAPI says of a guarded operation: a header, refusals, a marker. It depends on no framework.

The fragments are plain JSON and mean the same in OpenAPI 3.0 and 3.1. OpenAPI has no field for an idempotency key, so
the whole of the policy is in an extension, ``x-idempotency``.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

from semel.core.policy import Policy
from semel.core.problem import refused
from semel.errors import (
    InProgress,
    KeyExpired,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    NotReplayable,
    OperationExpired,
    OperationNotFound,
    OutcomeUnknown,
    Refusal,
)

Json = dict[str, Any]

EXTENSION: Final = "x-idempotency"
#: On every answer that may be a stored one.
REPLAYED: Final = "Idempotent-Replayed"
REPLAYED_HEADER: Final[Json] = {
    "description": "Present, and true, if this is a stored answer and the operation was not run again.",
    "schema": {"type": "boolean"},
}
RETRY_AFTER_HEADER: Final[Json] = {
    "description": "Seconds to wait. If it is missing, the same request will not succeed later.",
    "schema": {"type": "integer", "minimum": 1},
}

LOCATION_HEADER: Final[Json] = {
    "description": "Its status URL: 202 until it has ended, then its answer.",
    "schema": {"type": "string", "format": "uri-reference"},
}
STATE_SCHEMA: Final[Json] = {
    "title": "OperationState",
    "description": "An operation that has not ended.",
    "type": "object",
    "required": ["state", "progress", "note", "status_url"],
    "properties": {
        "state": {"type": "string", "description": "`pending`, or `processing` once a worker has it."},
        "progress": {"description": "Between 0 and 1, if it says so.", "minimum": 0, "maximum": 1},
        "note": {"description": "What it is doing, if it says so."},
        "status_url": {"type": "string", "format": "uri-reference"},
    },
}

PROBLEM_NAME: Final = "IdempotencyProblem"
PROBLEM_SCHEMA: Final[Json] = {
    "title": PROBLEM_NAME,
    "description": "Why a request was refused (RFC 9457).",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retryable"],
    "properties": {
        "type": {
            "type": "string",
            "format": "uri",
            "description": "What kind of problem it is.",
        },
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What to do, for a person."},
        "code": {"type": "string", "description": "The last part of `type`: for a program."},
        "retryable": {"type": "boolean", "description": "Whether the same request, sent again, may succeed."},
    },
}

STRIPE_NAME: Final = "IdempotencyError"
STRIPE_SCHEMA: Final[Json] = {
    "title": STRIPE_NAME,
    "description": "Why a request was refused, as Stripe says it.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string", "enum": ["api_error", "idempotency_error", "invalid_request_error"]},
                "code": {"type": "string"},
                "message": {"type": "string", "description": "What to do, for a person."},
                "doc_url": {"type": "string", "format": "uri"},
            },
        }
    },
}

#: Of no operation in particular.
EXAMPLE_KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"
#: The edition of draft-ietf-httpapi-idempotency-key-header that these rules follow.
FLAVOURS = {"ietf": "ietf-07", "stripe": "stripe"}
#: What RFC 9651 allows, strictly: a quoted string.
_QUOTED_STRING = r'^"([ !#-\[\]-~]|\\["\\])+"$'
_QUOTES = 2

#: What every guarded operation may answer in place of its own; some policies add to it.
_REFUSALS: tuple[type[Refusal], ...] = (KeyInvalid, InProgress, NotReplayable, OutcomeUnknown, KeyReused)


def parameters(policy: Policy) -> list[Json]:
    """Return the header parameters: the one to send, and its other names where there are any."""
    names = [policy.header] if isinstance(policy.header, str) else list(policy.header)
    first, *others = names
    schema: Json = {"type": "string", "minLength": 1, "maxLength": policy.max_key_length}
    if policy.strict:
        schema["minLength"] += _QUOTES
        schema["maxLength"] += _QUOTES
        schema["pattern"] = _QUOTED_STRING
    example = f'"{EXAMPLE_KEY}"' if policy.strict or policy.dialect == "ietf" else EXAMPLE_KEY
    every = [(first, _said_of_the_key(policy)), *((name, f"Another name for `{first}`.") for name in others)]
    return [
        {
            "name": name,
            "in": "header",
            # OpenAPI can't say "one of these headers": a client that sends another of the names is right, too.
            "required": _is_required(policy) and not others,
            "description": description,
            "schema": dict(schema),
            "example": example,
        }
        for name, description in every
    ]


def wishes(policy: Policy) -> list[Json]:
    """Return the header parameter ``Prefer``, if the policy honours a preference of the client."""
    if not policy.may_accept:
        return []
    said = {
        "respond-async": "`respond-async`: answer at once with 202, and run the operation later.",
        "wait": "`wait=5`: if the same request still runs, wait so many seconds for its answer.",
    }
    described = " ".join(text for wish, text in said.items() if wish in policy.preferences)
    prefer = {"name": "Prefer", "in": "header", "required": False, "description": described}
    return [{**prefer, "schema": {"type": "string"}}] if described else []


def responses(policy: Policy) -> dict[str, Json]:
    """Return the refusals by their status, each with the bodies that it is sent with."""
    refusals = [*_REFUSALS]
    if policy.required or policy.key_from is not None:
        refusals.insert(0, KeyMissing)
    if policy.late == "refuse":
        refusals.append(KeyExpired)
    answers = [(each, refused(each(), policy)) for each in refusals]
    found: dict[str, Json] = {}
    for refusal, answer in sorted(answers, key=lambda pair: pair[1].status):
        media_type = dict(answer.headers)[b"content-type"].decode()
        response = found.setdefault(str(answer.status), {"description": "", "content": {media_type: _content(policy)}})
        response["description"] += f"{' ' if response['description'] else ''}{refusal.title}."
        response["content"][media_type]["examples"][refusal.slug] = {"value": json.loads(answer.body or b"")}
        if refusal.retryable:
            response["headers"] = {"Retry-After": copy.deepcopy(RETRY_AFTER_HEADER)}
    return {**({"202": _accepted("It is accepted, and will be run.")} if policy.may_accept else {}), **found}


def status_responses(policy: Policy) -> dict[str, Json]:
    """Return what a request for the state of an operation may be answered with; 200 stands for its own answer."""
    schema = STRIPE_SCHEMA if policy.dialect == "stripe" else PROBLEM_SCHEMA
    ended = {"description": "It has ended. This is its answer, whatever its status."}
    said: dict[str, Json] = {"200": ended, "202": _accepted("It has not ended.")}
    for refusal in (OperationNotFound, OutcomeUnknown, OperationExpired):
        answer = refused(refusal(), policy)
        media_type = dict(answer.headers)[b"content-type"].decode()
        said[str(answer.status)] = {
            "description": f"{refusal.title}.",
            "content": {media_type: {"schema": copy.deepcopy(schema), "example": json.loads(answer.body or b"")}},
        }
    return said


def _accepted(description: str) -> Json:
    headers = {"Location": copy.deepcopy(LOCATION_HEADER), "Retry-After": copy.deepcopy(RETRY_AFTER_HEADER)}
    content = {"application/json": {"schema": copy.deepcopy(STATE_SCHEMA)}}
    return {"description": description, "headers": headers, "content": content}


def schemas(policy: Policy) -> dict[str, Json]:
    """Return what belongs under ``components/schemas``: the responses refer to it."""
    if policy.dialect == "stripe":
        return {STRIPE_NAME: copy.deepcopy(STRIPE_SCHEMA)}
    return {PROBLEM_NAME: copy.deepcopy(PROBLEM_SCHEMA)}


def extension(policy: Policy) -> Json:
    """Return the value of ``x-idempotency``: the policy, for programs."""
    fingerprint: list[str] = []
    if policy.fingerprint is not None:
        fingerprint = ["method", "path", "query", "media type", "body"]
        fingerprint += [f"header {name}" for name in policy.fingerprint.headers]
    return {
        "flavour": FLAVOURS[policy.dialect],
        "required": _is_required(policy),
        "ttl": iso_duration(policy.retention),
        "scope": policy.scope_by,
        "fingerprint": fingerprint,
        "inProgress": policy.in_progress,
        "stored": list(_ranges(sorted(policy.keep))),
        "serverErrors": policy.server_errors,
        "late": policy.late,
        "enforcement": policy.enforcement,
    }


def described(operation: Json, policy: Policy, *, not_stored: Collection[str] = ()) -> Json:
    """Return an OpenAPI *operation* with all of this added to it.

    *not_stored* are statuses that the framework itself answers, before a handler runs.
    """
    told = copy.deepcopy(operation)
    given = {(each.get("in"), str(each.get("name")).lower()) for each in told.get("parameters", ())}
    fresh = [each for each in (*parameters(policy), *wishes(policy)) if ("header", each["name"].lower()) not in given]
    told["parameters"] = [*told.get("parameters", ()), *fresh]
    answers: dict[str, Json] = told.setdefault("responses", {})
    for status, response in answers.items():
        if status not in not_stored and "$ref" not in response and is_stored(status, policy):
            response.setdefault("headers", {}).setdefault(REPLAYED, copy.deepcopy(REPLAYED_HEADER))
    for status, response in responses(policy).items():
        answers[status] = _beside(answers[status], response) if status in answers else response
    told[EXTENSION] = extension(policy)
    return told


def is_stored(status: str, policy: Policy) -> bool:
    """Whether an answer that is declared as *status* ("201", "2XX", "default") may be a stored one."""
    kept = {str(each) for each in policy.keep}
    if policy.server_errors != "release":
        kept.add("500")
    if status == "default":
        return True
    if status.upper().endswith("XX"):
        return any(each[0] == status[0] for each in kept)
    return status in kept or (status.startswith("5") and "500" in kept)


def iso_duration(duration: timedelta) -> str:
    """Write *duration* in ISO 8601, without days: not every day has 24 hours."""
    seconds, fraction = divmod(duration, timedelta(seconds=1))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    decimals = f".{fraction // timedelta(microseconds=1):06}".rstrip("0") if fraction else ""
    parts = [f"{hours}H" if hours else "", f"{minutes}M" if minutes else ""]
    parts.append(f"{seconds}{decimals}S" if seconds or decimals else "")
    return "PT" + ("".join(parts) or "0S")


def _said_of_the_key(policy: Policy) -> str:
    names = [policy.header] if isinstance(policy.header, str) else list(policy.header)
    said = f"Unique to one operation, and the same on each of its retries. Kept for {iso_duration(policy.retention)}."
    if _is_required(policy) and len(names) > 1:
        said += f" One of {', '.join(f'`{name}`' for name in names)} is required."
    return said


def _is_required(policy: Policy) -> bool:
    """Whether a request without the header is always refused. It is not if a key can be made from the body."""
    return policy.required and policy.key_from is None


def _content(policy: Policy) -> Json:
    (name,) = schemas(policy)
    return {"schema": {"$ref": f"#/components/schemas/{name}"}, "examples": {}}


def _beside(theirs: Json, ours: Json) -> Json:
    """Return the application's own response together with Semel's: a client may get either."""
    if "$ref" in theirs:
        return theirs  # A reference: other operations use the same definition.
    content: Json = theirs.setdefault("content", {})
    for media_type, media in ours["content"].items():
        if media_type not in content:
            content[media_type] = media
        elif content[media_type].get("schema") != media["schema"]:
            content[media_type] = {"schema": {"anyOf": [content[media_type].get("schema", {}), media["schema"]]}}
    theirs["headers"] = {**ours.get("headers", {}), **theirs.get("headers", {})}
    if not theirs["headers"]:
        del theirs["headers"]
    return theirs


def _ranges(statuses: Iterable[int]) -> Iterator[str]:
    """Yield ranges of consecutive statuses: ``"200-205"``, ``"404"``."""
    for _, group in itertools.groupby(enumerate(statuses), lambda pair: pair[1] - pair[0]):
        run = [status for _, status in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"

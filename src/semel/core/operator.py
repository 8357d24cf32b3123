"""What an operator may do about a record, and what follows from it, in words. Nothing is changed here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from semel.core.commands import Note
from semel.core.commands.erasing import Left
from semel.core.key import SHORT_LENGTH, digest_of
from semel.core.message import Answer, Headers, one_line
from semel.core.record import Hold, Record
from semel.core.recovery import Done, Step, as_json, read_back
from semel.core.state import TERMINAL, State
from semel.core.text import brief, pasteable
from semel.errors import ConfigurationError, ResultNotJSON, SemelError

#: How many operations are listed that an erasure leaves.
MAX_LISTED = 20

#: What to do about an operation, so that it can be erased afterwards.
_CHANGING = "another process changes it at this moment. Try again."
_TO_DO = {
    State.PENDING: "a worker runs it. Type: semel work --app MODULE:NAME",
    State.PROCESSING: "wait for its end. Without a worker, a retry takes it over; or free it: semel keys release",
    State.UNKNOWN: "find out whether it happened. Then type: semel keys resolve",
    State.COMPLETE: _CHANGING,
    State.FAILED: _CHANGING,
}

#: Why a record that has ended is left alone.
ENDED = "This operation has ended. Its answer stays until it expires; a new operation needs a new key."


#: Characters of a reason.
MAX_REASON = 500

#: A connection's own, made anew for each response, or one client's alone.
_NOT_REPEATED = frozenset(
    {b"connection", b"content-length", b"date", b"keep-alive", b"set-cookie", b"trailer", b"transfer-encoding"}
)
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_STATUSES = range(200, 600)
#: With these, a response has no body.
_EMPTY = frozenset({204, 205, 304})


class ResultUnreadable(SemelError):
    """The result is not JSON."""


class ReasonNotKept(SemelError):
    """It is done, but the audit trail does not have the reason."""


def release_means(record: Record) -> list[str]:
    """Say what follows if the key is freed."""
    if record.state is State.PENDING:
        means = ["This operation was not begun, and no worker will run it. A retry is a new one."]
    else:
        means = ["A retry will run the operation again from its beginning, whatever it has done so far."]
    if record.is_accepted:
        means.append("Its client was told that it would be run, and will find nothing at the status URL.")
    if record.lease_left is not None and not record.is_stuck:
        means.append(
            f"Its worker may be alive (lease {brief(record.lease_left)}): it can store nothing any more, but may act."
        )
    progress = read_back(record.steps)
    if done := progress.without_unknown().names:
        means.append(f"These steps are done, and will be done again: {', '.join(done)}.")
    if progress.unknown is not None:
        means.append(f"{progress.unknown.name} was begun, and may have happened. It will be done again.")
    return means


def explanation(hold: Hold, reason: str) -> Note:
    """Return the line of the audit trail that says why an operator did something."""
    return Note(hold, "explained", one_line(reason.strip())[:MAX_REASON])


def read_result(text: str) -> Any:
    """Return the result that an operator has typed as JSON."""
    try:
        return as_json("the result", json.loads(text, object_pairs_hook=_members))
    except (ValueError, ResultNotJSON, RecursionError):
        raise ResultUnreadable("The result is not JSON.") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is there twice: only one of the two values would be kept."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ResultUnreadable("The result has two members with the same name.")
    return members


def read_headers(lines: Iterable[str]) -> Headers:
    """Return the headers that an operator has typed as ``Name: value``."""
    found = []
    for line in lines:
        match = _HEADER.fullmatch(line.strip())
        if match is None:
            raise ConfigurationError(f"{line!a} is no header. Write it as 'Location: /payments/7'.")
        name = match[1].lower().encode()
        if name in _NOT_REPEATED:
            raise ConfigurationError(f"{match[1]} is a header of one response, and is never repeated. Leave it out.")
        found.append((name, match[2].encode("latin-1")))
    return tuple(found)


def granted(result: Any, *, status: int = 200, headers: Headers = (), body: bytes | None = None) -> Answer:
    """Return the answer that an operator gives: *result* as JSON, or *body* as it is."""
    if status not in _STATUSES:
        raise ConfigurationError(f"{status} is no status of an answer: these are 200 to 599.")
    if status in _EMPTY:
        return Answer(status, headers, b"")
    if body is None:
        # As steps are written: half of a surrogate pair is stored, too.
        body = json.dumps(result, ensure_ascii=False).encode("utf-8", "backslashreplace")
        if b"content-type" not in dict(headers):
            headers = ((b"content-type", b"application/json"), *headers)
    return Answer(status, headers, body)


def resolving_means(record: Record, *, is_applied: bool, status: int = 200) -> str:
    """Say what follows if the operation, or its unknown effect, is said to have happened, or not."""
    progress = read_back(record.steps)
    step, point = progress.unknown, progress.recovery_point
    who = "A worker" if record.is_accepted else "A retry"
    if is_applied:
        if step is None:
            return (
                f"The operation ends with status {status} and the result below. A retry will get it, and run nothing."
            )
        return f"{step.name} is done, with the result below. {who} will go on after it."
    if point is None:
        return f"The operation did nothing. {who} will run the operation again from its beginning."
    return f"{who} will go on after {point}" + (f", and do {step.name}." if step else ".")


def resolving_commands(record: Record) -> tuple[str, str]:
    """Return what can be typed about a parked operation: that it happened, and that it did not."""
    resolve = f"semel keys resolve {pasteable(record.key)} --scope {pasteable(record.scope)}"
    answer = " --status 200" if read_back(record.steps).unknown is None else ""
    return f"{resolve} --applied RESULT{answer}", f"{resolve} --not-applied"


def why_not_resolved(record: Record) -> str:
    """Say why there is nothing to resolve."""
    if record.state in TERMINAL:
        return "This operation has ended, and its answer stays until it expires. There is nothing to resolve."
    if record.state is State.PENDING:
        return "This operation waits for a worker, and has done nothing. There is nothing to resolve."
    if record.is_free:
        return "This operation is free: a retry goes on with it. There is nothing to resolve."
    if record.is_stuck:
        return "No worker holds this operation: a retry goes on with it. If it may not run again, semel sweep parks it."
    return "This operation is in progress. There is nothing to resolve."


def again_means(record: Record) -> list[str]:
    """Say what follows if a worker is to run a parked operation again, with the request that was stored."""
    point = read_back(record.steps).recovery_point
    if point is None:
        return [
            "A worker will run the stored request from its beginning.",
            "Whatever the operation has done will be done again: the card may be charged again.",
        ]
    return [f"A worker will run the stored request, and go on after {point}. Steps that are done stay done."]


def may_run_again(record: Record, *, has_request: bool) -> bool:
    """Whether a worker can be told to run it: it is parked, its request was stored, and no effect is in doubt."""
    return record.state is State.UNKNOWN and has_request and read_back(record.steps).unknown is None


def erasing_means(records: int, lines: int) -> list[str]:
    """Say what follows if one owner's data is erased."""
    if not (records or lines):
        return ["There is nothing to erase."]
    return [
        f"Operations that have ended: {records}. Their answers, and what was stored of their requests, are deleted.",
        "A retry of one is refused, and runs nothing, until its retention ends.",
        f"Lines of the audit trail: {lines}. They are deleted. None of this can be undone.",
    ]


def left_lines(left: Sequence[Left]) -> list[str]:
    """Say of operations that are not erased which they are, by the digest of the key, and what can be done."""
    lines = [f"{digest_of(each.key)[:SHORT_LENGTH]}  {each.state}: {_TO_DO[each.state]}" for each in left[:MAX_LISTED]]
    if len(left) > MAX_LISTED:
        lines.append(f"and {len(left) - MAX_LISTED} more")
    return [f"Operations that stay as they are: {len(left)}.", *lines] if left else []


def outcome_of(record: Record, step: Step) -> str:
    """Return what is known of *step*. While its worker is alive, an effect that was begun may still be running."""
    if isinstance(step, Done):
        return "done"
    return "begun" if record.state is State.PROCESSING and not record.is_stuck else "unknown"


def commands_for(record: Record) -> list[str]:
    """Return what can be typed about *record*: to see it, and to change it if that can be."""
    name = f"{pasteable(record.key)} --scope {pasteable(record.scope)}"
    commands = [f"semel keys show {name}"]
    if record.state is State.UNKNOWN:
        commands += resolving_commands(record)
    if record.state not in TERMINAL:
        commands.append(f"semel keys release {name}")
    if record.is_stuck and not record.is_free:
        commands.append("semel sweep")
    if record.state is State.PENDING:
        commands.append("semel work --app MODULE:NAME")
    return commands


def why_unsent(to: str, endpoints: Mapping[str, bool]) -> str:
    """Return why a message *to* this destination may be ready for long, and what to do; *endpoints* says which of
    webhooks are on.
    """
    if to in endpoints:
        name = pasteable(to)
        return (
            "No relay takes it. Is one running? semel relay --webhooks"
            if endpoints[to]
            else f"Its endpoint is off. To turn it on: semel webhooks enable {name}"
        )
    said = (
        f"No relay takes it, or its destination can't be reached. Is one running? semel relay --to {pasteable(to)}=URL"
    )
    near = get_close_matches(to, endpoints, 1)
    return f"{said} (There is an endpoint {pasteable(near[0])}: was that meant?)" if near else said

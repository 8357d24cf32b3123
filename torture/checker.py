"""Checks whether every payment was made once, by outside evidence: rows, the provider's log, the clients' histories.

It imports nothing of Semel and asks no store: a library can't prove its own claims.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

#: The kinds of violations. "wrong" is another request's answer. "disordered" is a message that was overtaken by a later
#: one of its key. "idle" is a run that proves nothing: no progress, or a wanted event that never happened.
Kind = Literal["doubled", "lost", "stuck", "wrong", "disordered", "idle"]

#: What is said of a key with several answers. Where acknowledged commits can be lost, it is no fault of the library's:
#: the first answer was lost with all that it told of, and the operation was run again.
CHANGED = "different answers"

#: What a run may be asked to have seen at least once.
Sight = Literal["take-over", "replay", "fenced zombie", "resolved unknown", "outcome unknown", "crash", "accepted"]

#: The refusal that a payment may end with if its outcome is unknown.
UNKNOWN_CODE = "outcome-unknown"


@dataclass(frozen=True, slots=True)
class Form:
    """What one form of payment leaves behind when it was made once."""

    #: The rows of the effects table, one of each.
    steps: tuple[str, ...]
    #: Whether the provider is charged.
    is_charged: bool = False
    #: Whether a payment may end as "outcome unknown": a plain handler can't know what a dead worker did.
    may_be_unknown: bool = False


FORMS = {
    "guard": Form(("paid",), may_be_unknown=True),
    "atomic": Form(("paid",)),
    "phase": Form(("ride",)),
    "effect": Form((), is_charged=True),
    "steps": Form(("ride", "receipt"), is_charged=True),
    # The same steps, taken by a worker once the client has gone.
    "accepted": Form(("ride", "receipt"), is_charged=True),
    # An order, written with its message; and what a consumer makes of the message.
    "parcel": Form(("ordered", "parcel")),
}

#: The answer to the client of an operation that will be run later.
ACCEPTED = 202


@dataclass(frozen=True, slots=True)
class Effect:
    """One row of the effects table. It has no unique constraint, so that duplicates show."""

    key: str
    step: str
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True)
class Charge:
    """One call that the provider saw."""

    idempotency_key: str
    key: str
    #: Whether it was the first with its idempotency key, and money moved.
    is_first: bool


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a history, as a client or a worker saw it."""

    #: "sent": a request went out. "answer": it was answered. "error": its server died. "swallowed": the reply to a
    #: COMMIT of it was lost on purpose.
    what: str
    key: str
    form: str = ""
    status: int = 0
    body: str = ""
    #: Whether the answer says that it is a repeated one.
    is_replay: bool = False
    #: Whether the handler had run in the process that answered.
    has_run: bool = False
    #: The process of the client that was answered.
    pid: int = 0

    @property
    def is_success(self) -> bool:
        """Whether the client was told that the payment is made."""
        return self.what == "answer" and self.status in range(200, 300) and self.status != ACCEPTED

    @property
    def is_accepted(self) -> bool:
        """Whether the client was told that the payment will be made."""
        return self.what == "answer" and self.status == ACCEPTED

    @property
    def is_unknown(self) -> bool:
        """Whether the client was told that the outcome is unknown."""
        return self.what == "answer" and _read(self.body).get("code") == UNKNOWN_CODE

    @property
    def is_fenced(self) -> bool:
        """Whether a worker that had run the handler was refused its answer."""
        return self.what == "answer" and self.has_run and self.status == 409 and not self.is_unknown


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of the guarantees."""

    kind: Kind
    key: str
    why: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.kind}: {self.why}" + (f" (key {self.key})" if self.key else "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker found."""

    violations: tuple[Violation, ...]
    #: Payments that were asked for, and those that a client knows to be made.
    keys: int
    answered: int
    seen: Counter[str] = field(default_factory=Counter)

    def count(self, kind: Kind) -> int:
        """Count the violations of one kind."""
        return sum(violation.kind == kind for violation in self.violations)


def check(
    effects: Iterable[Effect], charges: Iterable[Charge], events: Iterable[Event], wanted: Sequence[Sight] = ()
) -> Verdict:
    """Judge a whole run; *wanted* are the events that it must have seen."""
    rows, calls, histories = _by_key(effects), _by_key(charges), _by_key(events)
    violations = [
        Violation("doubled", key, "an effect that no request asked for")
        for key in sorted((rows.keys() | calls.keys()) - histories.keys())
    ]
    seen: Counter[str] = Counter()
    for key, history in histories.items():
        violations += _judge(key, rows[key], calls[key], history)
        seen += _sights(rows[key], history)
    answered = sum(any(event.is_success for event in history) for history in histories.values())
    if not answered:
        violations.append(Violation("idle", "", "no payment was made: the run proves nothing"))
    violations += [Violation("idle", "", f"never happened: {sight}") for sight in wanted if not seen[sight]]
    return Verdict(tuple(violations), len(histories), answered, seen)


def _judge(key: str, rows: list[Effect], calls: list[Charge], history: list[Event]) -> list[Violation]:
    form = FORMS[next(event.form for event in history if event.form)]
    successes = [event for event in history if event.is_success]
    is_made = bool(successes)
    # A client that was told so may never retry: the payment must be made anyway.
    is_owed = is_made or any(event.is_accepted for event in history)
    told = "it is paid" if is_made else "it will be paid"
    found: list[Violation] = []

    def expect(truth: bool, kind: Kind, why: str) -> None:  # noqa: FBT001 - reads as a sentence at the call
        if not truth:
            found.append(Violation(kind, key, why))

    counts = Counter(row.step for row in rows)
    for step in sorted(counts.keys() | set(form.steps)):
        number = counts[step]
        expect(number <= 1, "doubled", f"{step} was done {number} times, {_by_whom(rows, step)}")
        expect(step in form.steps, "doubled", f"{step} is no part of this payment")
        expect(number >= 1 or not is_owed, "lost", f"a client was told that {told}, and {step} was never done")
    charged = len({call.idempotency_key for call in calls})
    firsts = sum(call.is_first for call in calls)
    expect(charged <= 1, "doubled", f"charged {charged} times, under {charged} idempotency keys")
    expect(firsts == charged, "doubled", f"the provider says that {firsts} charges were the first of {charged}")
    if form.is_charged:
        expect(charged >= 1 or not is_owed, "lost", f"a client was told that {told}, and nothing was charged")
    else:
        expect(not calls, "doubled", "charged, and it is no part of this payment")
    answers = {event.body for event in successes}
    expect(len(answers) <= 1, "doubled", f"{len(answers)} {CHANGED}: {' and '.join(sorted(answers))}")
    for answer in sorted(answers):
        told_of = _read(answer).get("key", key)
        expect(told_of == key, "wrong", f"the answer to the request for {told_of}")
    is_ended = is_made or (form.may_be_unknown and any(event.is_unknown for event in history))
    expect(is_ended, "stuck", f"no final answer; the last was {_last(history)}")
    return found


def _sights(rows: list[Effect], history: list[Event]) -> Counter[str]:
    attempts = [row.attempt for row in rows]
    attempts += [_read(event.body).get("attempt", 1) for event in history if event.is_success]
    is_swallowed = False
    resolved = 0
    for event in history:
        is_swallowed = (is_swallowed and event.what != "sent") or event.what == "swallowed"
        resolved += is_swallowed and event.is_success and event.has_run and not event.is_replay
    return Counter(
        {
            "take-over": int(max(attempts, default=1) > 1),
            "replay": sum(event.is_replay for event in history),
            "fenced zombie": sum(event.is_fenced for event in history),
            "resolved unknown": resolved,
            "outcome unknown": sum(event.is_unknown for event in history),
            "crash": sum(event.what == "error" for event in history),
            "accepted": sum(event.is_accepted for event in history),
        }
    )


def _by_key(things: Iterable[Any]) -> defaultdict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for thing in things:
        found[thing.key].append(thing)
    return found


def _read(body: str) -> dict[str, Any]:
    try:
        read = json.loads(body)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _by_whom(rows: list[Effect], step: str) -> str:
    return "by " + ", ".join(f"{row.worker} at attempt {row.attempt}" for row in rows if row.step == step)


def _last(history: list[Event]) -> str:
    last = history[-1]
    return f"{last.status} {last.body}" if last.what == "answer" else last.what

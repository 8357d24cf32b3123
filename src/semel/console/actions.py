"""What an operator can do in the console: which actions apply, what each means, and carrying one out. It makes no HTML.

Each is carried out only if the record is still the one that was seen, and leaves a line in the audit trail with the
user's name and reason.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from semel.console.reading import Operation, Reader
from semel.core.commands import Note, Unpark, Verdict
from semel.core.delivery import Endpoint
from semel.core.inbox import AFTER_REQUEUE, ReceiptState
from semel.core.message import one_line
from semel.core.operator import (
    MAX_REASON,
    ReasonNotKept,
    ResultUnreadable,
    again_means,
    explanation,
    may_run_again,
    read_result,
    release_means,
    resolving_commands,
    resolving_means,
)
from semel.core.record import NO_TOKEN, Hold, Record
from semel.core.recovery import read_back
from semel.core.state import TERMINAL, State
from semel.core.value import value
from semel.errors import ConfigurationError, SemelError
from semel.flows import upkeep
from semel.guard.running import run
from semel.stores.dialect import messages_of
from semel.stores.forks import start_afresh_in_children
from semel.stores.inbox import Change, InboxStatements, Listed
from semel.stores.outbox import OutboxStatements, Whole
from semel.stores.webhooks import EndpointStatements, note_endpoint
from semel.work.service import ServicePorts


class ChangedMeanwhile(SemelError):
    """It has changed since you looked, and nothing was done. Look at it again."""


class FormIncomplete(SemelError):
    """The form is not complete."""


@value
class Action:
    """One action that applies to what is shown."""

    name: str
    #: On its button, and as a question.
    title: str
    question: str
    #: What will happen, sentence by sentence.
    means: tuple[str, ...]
    #: Whether it may repeat or lose something.
    is_risky: bool = False
    needs_result: bool = False
    #: The same on the command line.
    command: str = ""


def on_operation(operation: Operation, name: str) -> tuple[Action, ...]:
    """Return the actions that apply to *operation*; *name* is how the command line calls it."""
    record = operation.record
    if record is None or record.state in TERMINAL:
        return ()
    actions = []
    if record.state is State.UNKNOWN:
        step = read_back(record.steps).unknown
        what = step.name if step else "the operation"
        happened, not_happened = resolving_commands(record)
        means = [resolving_means(record, is_applied=True)]
        if step is None:
            means.append(
                "An answer with another status, or with headers such as Location, is given on the command line."
            )
        actions += [
            Action(
                "applied",
                "It happened…",
                f"Did {what} happen?",
                tuple(means),
                needs_result=True,
                command=happened,
            ),
            Action(
                "not-applied",
                "It did not happen…",
                f"Did {what} not happen?",
                (
                    resolving_means(record, is_applied=False),
                    "If it did happen after all, it will happen twice: the card may be charged again.",
                ),
                is_risky=True,
                command=not_happened,
            ),
        ]
    if may_run_again(record, has_request=operation.request is not None):
        actions.append(Action("again", "Run it again now…", "Run it again?", tuple(again_means(record)), is_risky=True))
    actions.append(
        Action(
            "release",
            "Free the key…",
            "Free this key?",
            tuple(release_means(record)),
            is_risky=True,
            command=f"semel keys release {name}",
        )
    )
    return tuple(actions)


def on_message(whole: Whole) -> tuple[Action, ...]:
    """Return the actions that apply to a message."""
    if whole.stored.state != "dead":
        return ()
    requeued = (
        "It gets another series of tries, beginning now. Its destination may have got it before: ids tell duplicates."
    )
    return (
        Action(
            "requeue",
            "Send it again…",
            "Requeue this message?",
            (requeued,),
            command=f"semel outbox requeue {whole.stored.id}",
        ),
        Action(
            "drop",
            "Drop it…",
            "Drop this message?",
            ("It is deleted for good, and will never be sent. The audit trail keeps a line.",),
            is_risky=True,
            command=f"semel outbox drop {whole.stored.id}",
        ),
    )


def on_receipt(listed: Listed, name: str) -> tuple[Action, ...]:
    """Return the actions that apply to a message of the inbox; *name* is how the command line calls it."""
    if listed.receipt.state is not ReceiptState.PARKED:
        return ()
    handled = ("The next delivery of it is handled, from its first try on.", AFTER_REQUEUE)
    return (
        Action(
            "requeue", "Let it be tried again…", "Requeue this message?", handled, command=f"semel inbox requeue {name}"
        ),
        Action(
            "drop",
            "Drop it…",
            "Drop this message?",
            ("It is never handled by this consumer, whatever is delivered again. The audit trail keeps a line.",),
            is_risky=True,
            command=f"semel inbox drop {name}",
        ),
    )


def on_endpoint(endpoint: Endpoint, name: str) -> tuple[Action, ...]:
    """Return the actions that apply to an endpoint of webhooks."""
    if endpoint.is_on:
        means = "Nothing more is sent to it. Its messages wait in the outbox, and are sent when it is on again."
        return (
            Action(
                "disable", "Turn it off…", "Turn this endpoint off?", (means,), command=f"semel webhooks disable {name}"
            ),
        )
    means = "What waits for it is sent now, oldest first, and then what comes."
    return (
        Action("enable", "Turn it on…", "Turn this endpoint on?", (means,), command=f"semel webhooks enable {name}"),
    )


def seen_operation(record: Record) -> str:
    """Return what a record was like, for a form: if it is not so any more, nothing is done."""
    return _digest(record.state, record.attempt, record.token.hex(), record.steps)


def seen_message(whole: Whole) -> str:
    """The same for a message."""
    return _digest(whole.stored.id, whole.stored.state, whole.stored.attempts, whole.stored.ended_at)


def seen_receipt(listed: Listed) -> str:
    """The same for a message of the inbox."""
    return _digest(listed.receipt.state, listed.receipt.attempts, listed.changed_at)


def seen_endpoint(endpoint: Endpoint) -> str:
    """The same for an endpoint."""
    return _digest(endpoint.name, endpoint.url, endpoint.is_on, endpoint.reason, endpoint.created_at)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


class Actor:
    """Carries actions out in the name of a user, one at a time: the store has one actor for its audit trail."""

    def __init__(self, reader: Reader) -> None:
        """Act on the store of *reader*."""
        self._reader = reader
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Let no thread act: in a forked child, the one that did so does not exist."""
        self._mutex = threading.Lock()

    def operation(self, name: str, operation: Operation, form: dict[str, str], user: str) -> None:
        """Carry out an action on an operation."""
        record = operation.record
        if record is None or form.get("seen") != seen_operation(record):
            raise ChangedMeanwhile
        reason = reason_of(form)
        hold = upkeep.hold_of(record)
        result = _result(form) if name == "applied" else None
        with self._as(user):
            ports = ServicePorts(self._reader.store)
            if name == "applied":
                verdict = run(upkeep.resolve_applied, ports, record, result)
            elif name == "not-applied":
                verdict = run(upkeep.resolve_not_applied, ports, record)
            elif name == "again":
                verdict = self._reader.store.perform(Unpark(hold, read_back(record.steps)))
            else:
                verdict = run(upkeep.release, ports, hold)
            if verdict is Verdict.FENCED:
                raise ChangedMeanwhile
            self._explain(explanation(hold, reason))

    def message(self, name: str, whole: Whole, form: dict[str, str], user: str) -> None:
        """Carry out an action on a dead letter."""
        if form.get("seen") != seen_message(whole):
            raise ChangedMeanwhile
        reason, stored = reason_of(form), whole.stored
        statements = OutboxStatements(messages_of(self._reader.store, "outbox"))
        change = statements.drop if name == "drop" else statements.requeue
        with self._as(user) as actor:
            if not self._reader.carry_out(change(id=stored.id, actor=actor, seen=stored)):
                raise ChangedMeanwhile
            hold = Hold(f"outbox:{stored.to}", stored.id, stored.attempts, NO_TOKEN)
            self._explain(explanation(hold, reason))

    def receipt(self, name: str, listed: Listed, form: dict[str, str], user: str) -> None:
        """Carry out an action on a parked message of the inbox."""
        if form.get("seen") != seen_receipt(listed):
            raise ChangedMeanwhile
        reason = reason_of(form)
        statements = InboxStatements(messages_of(self._reader.store, "inbox"))
        event = "dropped" if name == "drop" else "requeued"
        with self._as(user) as actor:
            if self._reader.carry_out(statements.change(event, listed, actor)) is not Change.DONE:
                raise ChangedMeanwhile
            hold = Hold(f"inbox:{listed.consumer}", listed.message_id, listed.receipt.attempts, NO_TOKEN)
            self._explain(explanation(hold, reason))

    def endpoint(self, name: str, endpoint: Endpoint, form: dict[str, str], user: str) -> None:
        """Turn an endpoint on or off."""
        if form.get("seen") != seen_endpoint(endpoint):
            raise ChangedMeanwhile
        reason = reason_of(form)
        statements = EndpointStatements(self._reader.store)
        if name == "disable":
            change = statements.disable(endpoint.name, f"{reason} ({user})", seen=endpoint)
        else:
            change = statements.enable(endpoint.name, endpoint)
        with self._as(user):
            if self._reader.run(change) is None:
                raise ChangedMeanwhile
            self._explain(note_endpoint(endpoint, f"{name}d", reason))

    def _explain(self, note: Note) -> None:
        """Keep the reason. The action is done by now, whatever happens here."""
        try:
            self._reader.store.perform(note)
        except Exception as error:
            raise ReasonNotKept(str(error)) from error

    @contextmanager
    def _as(self, user: str) -> Iterator[str]:
        store = self._reader.store
        with self._mutex:
            before = store.actor
            store.actor = actor = f"{user} (console)"
            try:
                yield actor
            finally:
                store.actor = before


def reason_of(form: dict[str, str]) -> str:
    """Return the reason that was typed; it is an error if there is none."""
    reason = one_line(form.get("reason", "").strip())[:MAX_REASON]
    if not reason:
        raise FormIncomplete("Say why, in a few words: the audit trail keeps it.")
    return reason


def _result(form: dict[str, str]) -> Any:
    try:
        return read_result(form.get("result", ""))
    except ResultUnreadable as error:
        raise FormIncomplete(f'{error} Write {{"id": 7}}, "text", 7 or null.') from None


def find(actions: Sequence[Action], name: str) -> Action:
    """Return the action of this name, if it applies."""
    for action in actions:
        if action.name == name:
            return action
    raise ConfigurationError("This action does not apply here, or not any more.")

"""The pages, one function each, from a request and its user to a response. Logins and errors are ``site.py``'s."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from uuid import UUID

from semel.console import actions, filters
from semel.console.access import User
from semel.console.actions import Action, Actor, ChangedMeanwhile, FormIncomplete
from semel.console.http import Request, Response, quoted, see_other
from semel.console.reading import CAP, EACH, MESSAGES, NEWEST, Operation, Reader
from semel.console.rendering import operation_name, seconds
from semel.console.sampling import Samples
from semel.core.commands import Now
from semel.core.delivery import Endpoint
from semel.core.derive import derive
from semel.core.inbox import ReceiptState
from semel.core.operator import ReasonNotKept, commands_for, outcome_of
from semel.core.place import read_place
from semel.core.recovery import read_back
from semel.core.text import as_typed, pasteable
from semel.core.trace import read_trace
from semel.errors import ConfigurationError, SemelError
from semel.stores.inbox import Listed

logger = logging.getLogger("semel.console")

OUTBOX_STATES = ("dead", "waiting", "behind", "ready", "sent")

#: What a page says after an action.
DONE = {
    "applied": "Resolved: it happened.",
    "not-applied": "Resolved: it did not happen.",
    "again": "A worker will run it now.",
    "release": "The key is free.",
    "requeue": "The message will be sent again.",
    "drop": "The message is deleted.",
    "disable": "The endpoint is off.",
    "enable": "The endpoint is on.",
}
RECEIPT_DONE = {"requeue": "The next delivery of the message will be handled.", "drop": "The message is given up."}


class Refused(SemelError):
    """A request that is answered by a page of its own."""

    def __init__(self, status: int, title: str, said: str) -> None:
        """Answer with *status*."""
        super().__init__(said)
        self.status = status
        self.title = title


class Views(ABC):
    """The pages about one store."""

    def __init__(self, reader: Reader) -> None:
        """Show what *reader* reads."""
        self.reader = reader
        self.samples = Samples(reader.count)
        self._actor = Actor(reader)
        self._lists: dict[str, Callable[[Request, User], Response]] = {
            "": self._overview,
            "operations": self._operations,
            "outbox": self._outbox,
            "inbox": self._inbox,
            "webhooks": self._webhooks,
        }
        self._sheets: dict[str, Callable[[Request, User, str], Response]] = {
            "operation": self._operation,
            "message": self._message,
        }
        self._forms: dict[str, Callable[[Request, User, str, str], Response]] = {
            "operation": self._act_on_operation,
            "message": self._act_on_message,
            "receipt": self._act_on_receipt,
            "webhook": self._act_on_endpoint,
        }

    @abstractmethod
    def html(self, request: Request, user: User | None, template: str, status: int = 200, **values: Any) -> Response:
        """Make a page of a template."""

    @abstractmethod
    def refusal(
        self, request: Request, status: int, title: str, said: str, *, user: User | None = None, here: str | None = None
    ) -> Response:
        """Make a page that says why something was not done."""

    def page(self, request: Request, user: User, parts: list[str]) -> Response:
        """Answer with the page at a path."""
        kind, *names = parts
        if not names and kind in self._lists:
            _only_read(request)
            return self._lists[kind](request, user)
        if len(names) == 1 and kind in self._sheets:
            _only_read(request)
            return self._sheets[kind](request, user, names[0])
        if len(names) == len(("name", "action")) and kind in self._forms:
            return self._forms[kind](request, user, names[0], names[1])
        if parts == ["login"]:
            return see_other(f"{quoted(request.base)}/")
        raise Refused(404, "No such page", "There is nothing at this address.")

    def _overview(self, request: Request, user: User) -> Response:
        counts = self.samples.now()
        return self.html(
            request,
            user,
            "overview.html",
            title="Overview",
            overview=self.reader.overview(counts),
            series=self.samples.series(),
            cap=CAP,
            most_each=EACH,
            newest=NEWEST,
        )

    def _operations(self, request: Request, user: User) -> Response:
        asked = filters.read(request.asked)
        self._check_text(*map(as_typed, asked.typed.values()), *(read_place(asked.after)[1:] if asked.after else ()))
        page = None if asked.wrong else self.reader.operations(asked)
        status = 400 if asked.wrong else 200
        return self.html(
            request,
            user,
            "operations.html",
            status,
            title="Operations",
            asked=asked,
            page=page,
            states=filters.STATES,
            further=min(asked.scan * filters.FURTHER, filters.MAX_SCAN),
        )

    def _operation(self, request: Request, user: User, name: str) -> Response:
        operation = self._found(name)
        record = operation.record
        shown = f"{pasteable(operation.key)} --scope {pasteable(operation.scope)}"
        steps = [
            {
                "step": step,
                "outcome": outcome_of(record, step),
                "key": derive(record.scope, record.key, step.name) if step.kind == "effect" else None,
            }
            for step in (read_back(record.steps).steps if record else ())
            if record is not None
        ]
        return self.html(
            request,
            user,
            "operation.html",
            trace=read_trace(record.traceparent) if record else None,
            title="Operation",
            operation=operation,
            record=record,
            steps=steps,
            name=name,
            actions=actions.on_operation(operation, shown) if user.may("act") else (),
            commands=[f"semel keys show {shown}"] if record is None else commands_for(record),
            done=DONE.get(request.asked.get("done", "")),
        )

    def _outbox(self, request: Request, user: User) -> Response:
        self._need_messages("outbox")
        state = request.asked.get("state") or None
        if state is not None and state not in OUTBOX_STATES:
            raise Refused(400, "No such state", f"States of messages are {', '.join(OUTBOX_STATES)}.")
        to = request.asked.get("to") or None
        self._check_text(to or "")
        wanted = (state,) if state else OUTBOX_STATES[:-1]
        lag, found = self.reader.waiting(wanted, to)
        return self.html(
            request,
            user,
            "outbox.html",
            title="Outbox",
            lag=lag,
            lists=list(zip(wanted, found, strict=True)),
            state=state,
            to=to,
            states=OUTBOX_STATES,
            cap=CAP,
            most=MESSAGES,
            now=seconds(lag.now),
            hints=self.reader.hints([each for messages in found for each in messages], lag.now),
            done=DONE.get(request.asked.get("done", "")),
        )

    def _message(self, request: Request, user: User, name: str) -> Response:
        whole, trail = self._message_found(name)
        now = self._now()
        return self.html(
            request,
            user,
            "message.html",
            title="Message",
            whole=whole,
            stored=whole.stored,
            trail=trail,
            actions=actions.on_message(whole) if user.may("act") else (),
            hint=self.reader.hints([whole.stored], now.timestamp()).get(whole.stored.to),
            now=now,
            done=DONE.get(request.asked.get("done", "")),
        )

    def _inbox(self, request: Request, user: User) -> Response:
        self._need_messages("inbox")
        listed = [
            (each, actions.on_receipt(each, _shown(each)) if user.may("act") else ()) for each in self.reader.inbox()
        ]
        return self.html(
            request,
            user,
            "inbox.html",
            title="Inbox",
            listed=listed,
            most=MESSAGES,
            parked=ReceiptState.PARKED,
            done=RECEIPT_DONE.get(request.asked.get("done", "")),
        )

    def _webhooks(self, request: Request, user: User) -> Response:
        self._need_messages("webhooks")
        endpoints = [
            (each, actions.on_endpoint(each, pasteable(each.name)) if user.may("act") else ())
            for each in self.reader.endpoints()
        ]
        done = DONE.get(request.asked.get("done", ""))
        return self.html(request, user, "webhooks.html", title="Webhooks", endpoints=endpoints, done=done)

    def _act_on_operation(self, request: Request, user: User, name: str, action: str) -> Response:
        operation = self._found(name)
        shown = f"{pasteable(operation.key)} --scope {pasteable(operation.scope)}"
        return self._act(
            request,
            user,
            lambda: actions.find(actions.on_operation(operation, shown), action),
            lambda: self._actor.operation(action, operation, request.form, user.name),
            back=f"/operation/{name}",
            seen=actions.seen_operation(operation.record) if operation.record else "",
            what="operation",
            operation=operation,
        )

    def _act_on_message(self, request: Request, user: User, name: str, action: str) -> Response:
        whole, _ = self._message_found(name)
        return self._act(
            request,
            user,
            lambda: actions.find(actions.on_message(whole), action),
            lambda: self._actor.message(action, whole, request.form, user.name),
            back=f"/message/{name}" if action == "requeue" else "/outbox",
            seen=actions.seen_message(whole),
            what="message",
            stored=whole.stored,
        )

    def _act_on_receipt(self, request: Request, user: User, name: str, action: str) -> Response:
        listed = self._receipt_found(name)
        return self._act(
            request,
            user,
            lambda: actions.find(actions.on_receipt(listed, _shown(listed)), action),
            lambda: self._actor.receipt(action, listed, request.form, user.name),
            back="/inbox",
            seen=actions.seen_receipt(listed),
            what="receipt",
            listed=listed,
        )

    def _act_on_endpoint(self, request: Request, user: User, name: str, action: str) -> Response:
        endpoint = self._endpoint_found(name)
        return self._act(
            request,
            user,
            lambda: actions.find(actions.on_endpoint(endpoint, pasteable(endpoint.name)), action),
            lambda: self._actor.endpoint(action, endpoint, request.form, user.name),
            back="/webhooks",
            seen=actions.seen_endpoint(endpoint),
            what="endpoint",
            endpoint=endpoint,
        )

    def _act(
        self,
        request: Request,
        user: User,
        find: Callable[[], Action],
        carry_out: Callable[[], None],
        *,
        back: str,
        **values: Any,
    ) -> Response:
        """Show what an action means; or carry it out, if its form was sent."""
        if not user.may("act"):
            raise Refused(403, "Not for you", f"{user.name} may look, but not act: the role act is missing.")
        here = f"{quoted(request.base)}{back}"
        said, status = "", 200
        if request.method == "POST":
            try:
                if request.form.get("seen") != values["seen"]:
                    raise ChangedMeanwhile  # noqa: TRY301 - as the store says it
                action = find()
                carry_out()
            except ChangedMeanwhile as error:
                return self.refusal(request, 409, "Nothing was done", str(error), user=user, here=here)
            except ReasonNotKept as error:
                logger.exception("%s: %s %s is done, but the reason could not be kept.", user.name, action.name, back)
                title = "Done, but the reason could not be kept"
                told = RECEIPT_DONE if values["what"] == "receipt" else DONE
                return self.refusal(request, 200, title, f"{told[action.name]} {error}", user=user, here=here)
            except FormIncomplete as error:
                said, status = str(error), 422
            else:
                logger.info("%s: %s %s", user.name, action.name, back)
                return see_other(f"{here}?done={action.name}")
        return self.html(
            request,
            user,
            "action.html",
            status,
            title="Confirm",
            action=find(),
            said=said,
            here=here,
            form=request.form if request.method == "POST" else {},
            **values,
        )

    def _found(self, name: str) -> Operation:
        try:
            _, scope, key = read_place(name)
        except ConfigurationError:
            raise Refused(404, "No such operation", "This address names no operation.") from None
        if not self.reader.can_hold(scope + key):
            raise Refused(404, "No such operation", "This store can't hold such a key or scope.")
        operation = self.reader.operation(scope, key)
        if operation.record is None and not operation.trail:
            said = "The store has no such key, and no audit trail of it. It may have been reaped, or freed."
            raise Refused(404, "No such operation", said)
        return operation

    def _message_found(self, name: str) -> Any:
        self._need_messages("outbox")
        found = self.reader.message(name) if _is_uuid(name) else None
        if found is None:
            raise Refused(
                404, "No such message", "There is no such message. What was sent is deleted, unless it is kept."
            )
        return found

    def _receipt_found(self, name: str) -> Listed:
        self._need_messages("inbox")
        try:
            _, consumer, message = read_place(name)
        except ConfigurationError:
            consumer = message = ""
        found = self.reader.receipt(consumer, message) if self.reader.can_hold(consumer + message) else None
        if found is None:
            raise Refused(404, "No such message", "The inbox has no such message. Receipts are deleted by age.")
        return found

    def _endpoint_found(self, name: str) -> Endpoint:
        self._need_messages("webhooks")
        found = next((each for each in self.reader.endpoints() if operation_name("", each.name) == name), None)
        if found is None:
            raise Refused(404, "No such endpoint", "There is no endpoint of this name.")
        return found

    def _check_text(self, *texts: str) -> None:
        if not all(map(self.reader.can_hold, texts)):
            raise Refused(400, "Nothing is called so", "What was typed has a character that this store can't hold.")

    def _need_messages(self, what: str) -> None:
        if not self.reader.has_messages:
            said = f"This store has no {what}: messages are kept in PostgreSQL and SQLite."
            raise Refused(404, "No messages here", said)

    def _now(self) -> Any:
        return self.reader.store.perform(Now())


def _only_read(request: Request) -> None:
    if request.method == "POST":
        raise Refused(405, "Method not allowed", "This page takes no form.")


def _shown(listed: Listed) -> str:
    """Return how the command line calls a message of the inbox."""
    return f"{pasteable(listed.message_id)} --consumer {pasteable(listed.consumer)}"


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False

"""``semel outbox``: shows messages that wait or can't be sent, and lets an operator requeue or drop dead letters.
Sending is the relay's (``relay.py``).

Payloads may hold personal data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from uuid import UUID

import typer
from rich.table import Table
from rich.text import Text

from semel.cli.address import StoreOption, opened
from semel.cli.lists import Listing, WatchOption, show_list
from semel.cli.output import JsonOption, as_text, brief, hex_dump, iso, put, safe
from semel.cli.resolving import YesOption
from semel.cli.showing import Line, next_steps_of, sheet_of, trail_facts
from semel.core.commands import Now, ReadTrail
from semel.core.outbox import check_name
from semel.core.record import Entry
from semel.errors import ConfigurationError, SemelError
from semel.stores import Store
from semel.stores.base import this_user
from semel.stores.dialect import messages_of
from semel.stores.outbox import OutboxStatements, Statements, Stored, Whole, carry_out
from semel.stores.transaction import at_once
from semel.stores.webhooks import unsent
from semel.work.plan import duration

T = TypeVar("T")


class State(StrEnum):
    """What a list can be filtered by."""

    READY = "ready"
    WAITING = "waiting"
    BEHIND = "behind"
    DEAD = "dead"
    SENT = "sent"


STYLES = {
    State.READY: "cyan",
    State.WAITING: "yellow",
    State.BEHIND: "yellow",
    State.DEAD: "bold red",
    State.SENT: "green",
}
#: What is listed where no state is asked for: first what needs a person.
UNSENT = (State.DEAD, State.WAITING, State.BEHIND, State.READY)

ToOption = Annotated[str | None, typer.Option("--to", metavar="NAME", help="Only messages to this destination.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="Only those that died within this time: 2h, 3d.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All dead letters.")]
IdArgument = Annotated[str | None, typer.Argument(metavar="[ID]", help="The message's id.")]

app = typer.Typer(help="Look at messages to be sent, and requeue or drop dead letters.", no_args_is_help=True)


class MessageNotFound(SemelError):
    """There is no such message."""


class MessageChanged(SemelError):
    """This message has changed since it was shown, and nothing was done. Look at it again: semel outbox show."""


@app.command("list")
def list_messages(
    *,
    store: StoreOption = None,
    state: Annotated[State | None, typer.Option(help="Only these. Without: all that are not sent.")] = None,
    to: ToOption = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """List messages: dead letters first, then those that wait for another try, then those that are ready."""
    with opened(store) as keys:
        statements = OutboxStatements(messages_of(keys, "outbox"))

        def read() -> Listing:
            messages: list[Stored] = []
            for each in (state,) if state else UNSENT:
                if left := limit - len(messages):
                    messages += _carry_out(keys, statements.browse(each, to, left))
            now = keys.perform(Now()).timestamp()
            hints = _hints(keys, messages, now)
            facts = [_facts(each) | {"read_at": iso(now), "hint": _hint(each, now, hints)} for each in messages]
            return Listing(facts, _table(messages, now, hints) if messages else None, "No messages.")

        show_list(read, as_json=as_json, watch=watch)


@app.command()
def show(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message's id.")],
    store: StoreOption = None,
    body: Annotated[bool, typer.Option("--body", help="Show the payload, too.")] = False,  # noqa: FBT002 - typer makes an option of it
    as_json: JsonOption = False,  # noqa: FBT002 - as above
) -> None:
    """Show everything about one message, with the error of its last try and its audit trail."""
    with opened(store) as keys:
        whole = _carry_out(keys, OutboxStatements(messages_of(keys, "outbox")).look(_id(message_id)))
        if whole is None:
            raise MessageNotFound(f"There is no message {message_id}. What was sent is deleted, unless it is kept.")
        trail = keys.perform(ReadTrail(f"outbox:{whole.stored.to}", whole.stored.id))
        now = keys.perform(Now()).timestamp()
        hint = _hint(whole.stored, now, _hints(keys, [whole.stored], now))
    if as_json:
        print(json.dumps(_all_facts(whole, trail, with_body=body) | {"read_at": iso(now), "hint": hint}, indent=2))
        return
    said, commands = next_steps_of(hint) if hint else _next(whole.stored)
    put(sheet_of([*_lines(whole, trail, now), *said]), *commands)
    if body:
        text = as_text(whole.payload)
        print(text if text is not None else hex_dump(whole.payload))


@app.command()
def requeue(
    message_id: IdArgument = None,
    store: StoreOption = None,
    to: ToOption = None,
    since: SinceOption = None,
    everything: AllOption = False,  # noqa: FBT002 - as above
) -> None:
    """Give dead letters another series of tries: one by its id, or those of a destination or a time."""
    which = _which(message_id, to, since, everything=everything)
    with opened(store) as keys:
        count = _repeated(keys, OutboxStatements(messages_of(keys, "outbox")).requeue, which, keys.perform(Now()))
    _tell(count, "requeued", message_id)


@app.command()
def drop(  # noqa: PLR0917 - typer makes options of them
    message_id: IdArgument = None,
    store: StoreOption = None,
    to: ToOption = None,
    since: SinceOption = None,
    everything: AllOption = False,  # noqa: FBT002 - as above
    yes: YesOption = False,  # noqa: FBT002 - as above
) -> None:
    """Delete dead letters for good: one by its id, or those of a destination or a time. The audit trail has a line."""
    which = _which(message_id, to, since, everything=everything)
    with opened(store) as keys:
        statements, began = OutboxStatements(messages_of(keys, "outbox")), keys.perform(Now())
        if message_id is not None and not yes:
            whole = _carry_out(keys, statements.look(which["id"]))
            if whole is None or whole.stored.state != State.DEAD:
                return _tell(0, "dropped", message_id)
            which["seen"] = whole.stored
            put(sheet_of(_lines(whole, (), began.timestamp())))
            print()
        if not yes:
            what, them = ("It", "it") if message_id else ("They", "them")
            typer.confirm(f"{what} will never be sent. Drop {them}?", abort=True)
        count = _repeated(keys, statements.drop, which, began)
    if not count and "seen" in which:
        raise MessageChanged
    return _tell(count, "dropped", message_id)


def _carry_out(keys: Store, statements: Statements[T]) -> T:
    return at_once(carry_out(keys, statements))


def _hints(keys: Store, messages: list[Stored], now: float) -> dict[str, str]:
    """Return what to do about destinations that no relay seems to serve."""
    with suppress(SemelError):  # The table of endpoints may be for other roles; the list is not.
        return _carry_out(keys, unsent(keys, messages, now))
    return {}


def _hint(stored: Stored, now: float, hints: dict[str, str]) -> str | None:
    return hints.get(stored.to) if stored.is_overdue(now) else None


def _which(message_id: str | None, to: str | None, since: str | None, *, everything: bool) -> dict[str, Any]:
    # An empty text is no wildcard: it is what a script types where its variable is not set.
    is_filtered = to is not None or since is not None or everything
    if message_id is not None and is_filtered:
        raise ConfigurationError("Give an ID, or --to, --since or --all.")
    if message_id is None and not is_filtered:
        raise ConfigurationError("Which dead letters? Give an ID, --to NAME, --since TIME, or --all.")
    return {
        "id": None if message_id is None else _id(message_id),
        "to": None if to is None else check_name("--to", to),
        "since": None if since is None else duration(since),
    }


def _id(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise ConfigurationError(
            f"{text!a} is not the id of a message: that is a UUID, as `semel outbox list` shows."
        ) from None


def _repeated(keys: Store, change: Callable[..., Statements[int]], which: dict[str, Any], began: datetime) -> int:
    if which["id"] is not None:
        return _carry_out(keys, change(**which, actor=this_user()))
    # What is requeued may be dead again before this ends, where a relay runs and nothing was corrected; and what dies
    # while the operator is asked was not meant.
    total = 0
    while count := _carry_out(keys, change(**which, before=began.timestamp(), actor=this_user())):
        total += count
    return total


def _tell(count: int, what: str, message_id: str | None) -> None:
    if not count and message_id is not None:
        raise MessageNotFound(f"{message_id} is not a dead letter, so nothing was {what}.")
    print(f"{count} {what}.")


def _table(messages: list[Stored], now: float, hints: dict[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("id", no_wrap=True)
    for name in ("to", "type", "key"):
        table.add_column(name, overflow="fold")
    for name in ("state", "tries", "age"):
        table.add_column(name, no_wrap=True)
    table.add_column("error", overflow="fold")
    for each in messages:
        table.add_row(
            each.id,
            Text(safe(each.to)),
            Text(safe(each.type)),
            Text(safe(each.key or "")),
            _state(each),
            str(each.attempts),
            brief(timedelta(seconds=now - each.created_at)),
            Text(safe(each.error or _hint(each, now, hints) or "")),
        )
    return table


def _state(stored: Stored) -> Text:
    return Text("in flight", "cyan") if stored.is_taken else Text(stored.state, STYLES[State(stored.state)])


def _lines(whole: Whole, trail: tuple[Entry, ...], now: float) -> Iterator[tuple[str, Text]]:
    stored = whole.stored
    yield "id", Text(stored.id)
    yield "type", Text(safe(stored.type))
    yield "to", Text(safe(stored.to))
    if stored.key is not None:
        yield "key", Text(safe(stored.key))
    yield "state", _state(stored)
    yield "failed tries", Text(str(stored.attempts))
    yield "added", Text(f"{brief(timedelta(seconds=now - stored.created_at))} ago")
    if stored.state == State.WAITING and stored.due_at is not None:
        left = stored.due_at - now
        yield "next try", Text(f"in {brief(timedelta(seconds=left))}" if left > 0 else "now")
    if stored.error:
        yield "error", Text(safe(stored.error))
    yield "content type", Text(safe(whole.content_type))
    for number, (name, text) in enumerate(whole.headers):
        yield "" if number else "headers", Text(safe(f"{name}: {text}"))
    if whole.traceparent:
        yield "trace", Text(safe(whole.traceparent))
    yield "payload", Text(f"{stored.size} bytes (to see it: --body)")
    for number, entry in enumerate(trail):
        text = f"{entry.at:%Y-%m-%d %H:%M:%S} {entry.event} by {entry.actor}"
        yield "" if number else "trail", Text(safe(f"{text}: {entry.detail}" if entry.detail else text))


def _next(stored: Stored) -> tuple[list[Line], list[Text]]:
    """Say what can be done about a message."""
    if stored.state == State.DEAD:
        said = "Correct what the error says. Then type one of:"
        return next_steps_of(said, f"semel outbox requeue {stored.id}", f"semel outbox drop {stored.id}")
    if stored.state == State.BEHIND:
        return next_steps_of("Another message with the same key has to be sent before. To see it:", "semel outbox list")
    return [], []


def _facts(stored: Stored) -> dict[str, Any]:
    return {
        "id": stored.id,
        "to": stored.to,
        "key": stored.key,
        "type": stored.type,
        "state": stored.state,
        "is_taken": stored.is_taken,
        "attempts": stored.attempts,
        "created_at": iso(stored.created_at),
        "due_at": iso(stored.due_at),
        "ended_at": iso(stored.ended_at),
        "error": stored.error,
        "size": stored.size,
    }


def _all_facts(whole: Whole, trail: tuple[Entry, ...], *, with_body: bool) -> dict[str, Any]:
    facts = _facts(whole.stored) | {
        "content_type": whole.content_type,
        "headers": [list(pair) for pair in whole.headers],
        "traceparent": whole.traceparent,
        "trail": trail_facts(trail),
    }
    if with_body:
        facts["payload"] = as_text(whole.payload)
        facts["payload_hex"] = whole.payload.hex()
    return facts

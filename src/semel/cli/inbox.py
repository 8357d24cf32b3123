"""``semel inbox``: shows the messages that wait for another try or for a person, and changes what becomes of one. It
handles none of them: that takes a delivery, and the consumer's own program.

Message ids and errors may hold personal data. The audit trail has the operator's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from semel.cli.address import StoreOption, opened
from semel.cli.finding import spellings
from semel.cli.lists import Listing, WatchOption, show_list
from semel.cli.output import JsonOption, brief, iso, pasteable, put, relative, safe, typed
from semel.cli.resolving import YesOption
from semel.cli.showing import STUCK_STYLE, Line, next_steps_of, sheet_of, trail_facts, trail_lines
from semel.core.commands import Open, ReadTrail, Undo
from semel.core.inbox import AFTER_REQUEUE, ReceiptState
from semel.core.record import Entry
from semel.errors import ConfigurationError, SemelError
from semel.stores import Store
from semel.stores.base import this_user
from semel.stores.dialect import durable_of, messages_of
from semel.stores.inbox import Change, InboxStatements, Listed
from semel.stores.outbox import carry_out
from semel.stores.transaction import Transaction, at_once

#: A list shows the beginning of an error; ``show`` has all of it.
ERROR_CHARACTERS = 60

STYLES = {ReceiptState.FAILING: "yellow", ReceiptState.PARKED: STUCK_STYLE, ReceiptState.DONE: "green"}

app = typer.Typer(
    help="Look at the messages that a consumer can't handle, and requeue or drop one.", no_args_is_help=True
)

MessageArgument = Annotated[str, typer.Argument(metavar="MESSAGE", help="The message's id.")]
ConsumerOption = Annotated[str | None, typer.Option(help="The consumer, if several have the message.")]


class Shown(StrEnum):
    """What a list can be filtered by."""

    FAILING = ReceiptState.FAILING
    PARKED = ReceiptState.PARKED


class MessageNotFound(SemelError):
    """The inbox has no such message."""


class CantBeChanged(SemelError):
    """This message was handled, and that stays so."""


class MessageChanged(SemelError):
    """This message has changed since it was shown, and nothing was done. Look at it again: semel inbox show."""


class MessageBusy(SemelError):
    """This message is being handled just now, and nothing was changed. Look at it again: semel inbox show."""


@app.command("list")
def list_messages(
    *,
    store: StoreOption = None,
    consumer: Annotated[str | None, typer.Option(help="Only messages of this consumer.")] = None,
    state: Annotated[
        Shown | None, typer.Option(help="Only these: parked wait for a person, failing for their next delivery.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, the last changed first.")] = 20,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """List the messages that have failed: those that are parked, and those that will be tried again."""
    wanted = None if state is None else ReceiptState(state.value)
    with opened(store) as keys:

        def read() -> Listing:
            with _transaction(keys) as (transaction, statements):
                found = transaction.run(statements.list(consumer, wanted, limit))
            return Listing([_facts(each) for each in found], _table(found) if found else None, "No messages.")

        show_list(read, as_json=as_json, watch=watch)


@app.command()
def show(
    message: MessageArgument,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    as_json: JsonOption = False,  # noqa: FBT002 - typer makes an option of it
) -> None:
    """Show everything about one message: its receipt, its last error, and what operators did."""
    with opened(store) as keys:
        with _transaction(keys) as (transaction, statements):
            found = _find(transaction, statements, message, consumer)
        trail = keys.perform(ReadTrail(f"inbox:{found.consumer}", found.message_id))
    if as_json:
        print(json.dumps(_facts(found) | {"trail": trail_facts(trail)}, indent=2))
    else:
        said, commands = _next(found)
        put(sheet_of([*_lines(found, trail), *said]), *commands)


@app.command()
def requeue(
    message: MessageArgument,
    *,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    yes: YesOption = False,
) -> None:
    """Let a message be tried again, from its first try on. Its broker, or its producer, has to deliver it again."""
    means = f"The next delivery of it is handled. {AFTER_REQUEUE}"
    _change(store, message, consumer, means=means, event="requeued", yes=yes)


@app.command()
def drop(
    message: MessageArgument,
    *,
    store: StoreOption = None,
    consumer: ConsumerOption = None,
    yes: YesOption = False,
) -> None:
    """Give a message up: it is not handled, and a delivery of it counts as a duplicate until its receipt expires."""
    means = "It is never handled by this consumer, whatever is delivered again."
    _change(store, message, consumer, means=means, event="dropped", yes=yes)


def _change(store: str | None, message: str, consumer: str | None, *, means: str, event: str, yes: bool) -> None:
    with opened(store) as keys:
        with _transaction(keys) as (transaction, statements):
            found = _find(transaction, statements, message, consumer)
        if found.receipt.state is ReceiptState.DONE:
            raise CantBeChanged
        put(sheet_of(_lines(found)))
        print()
        print(means)
        if not yes:
            typer.confirm("Is that right?", abort=True)
        done = at_once(carry_out(durable_of(keys), statements.change(event, found, this_user())))
        if done is not Change.DONE:
            raise MessageBusy if done is Change.BUSY else MessageChanged
    print(f"{event.capitalize()}.")


@contextmanager
def _transaction(keys: Store) -> Iterator[tuple[Transaction, InboxStatements]]:
    """Open a transaction, and roll back what was not committed in it."""
    statements = InboxStatements(messages_of(keys, "inbox"))
    transaction = durable_of(keys).transaction()
    transaction.perform(Open())
    try:
        yield transaction, statements
    finally:
        transaction.perform(Undo())


def _find(transaction: Transaction, statements: InboxStatements, message: str, consumer: str | None) -> Listed:
    consumers = spellings(consumer) if consumer is not None else transaction.run(statements.consumers())
    for spelled in spellings(message):
        found = [each for name in consumers for each in transaction.run(statements.find(name, spelled))]
        if len(found) > 1:
            names = ", ".join(pasteable(each.consumer) for each in found)
            raise ConfigurationError(f"Several consumers have this message. Name one with --consumer: {names}.")
        if found:
            return found[0]
    raise MessageNotFound(f"The inbox has no message {pasteable(message)}" + (f" of {consumer}." if consumer else "."))


def _table(found: tuple[Listed, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("message", overflow="fold")
    for name in ("consumer", "state", "tries", "last"):
        table.add_column(name, no_wrap=True)
    table.add_column("error", overflow="fold")
    for each in found:
        receipt = each.receipt
        table.add_row(
            Text(typed(each.message_id)),
            Text(typed(each.consumer)),
            Text(receipt.state, STYLES[receipt.state]),
            Text(str(receipt.attempts)),
            Text(brief(timedelta(seconds=each.now - each.changed_at))),
            Text(_shortened(receipt.error or "")),
        )
    return table


def _lines(listed: Listed, trail: tuple[Entry, ...] = ()) -> Iterator[Line]:
    receipt = listed.receipt
    yield "message", Text(typed(listed.message_id))
    yield "consumer", Text(typed(listed.consumer))
    yield "state", Text(receipt.state, STYLES[receipt.state])
    yield "failed tries", Text(str(receipt.attempts))
    yield "received", _time(listed, listed.received_at)
    yield "changed", _time(listed, listed.changed_at)
    if receipt.digest is not None:
        yield "payload", Text(f"digest {receipt.digest.hex()}")
    if receipt.error is not None:
        yield "error", Text(safe(receipt.error))
    yield from trail_lines(trail)


def _next(listed: Listed) -> tuple[list[Line], list[Text]]:
    """Say what can be done about a message."""
    if listed.receipt.state is not ReceiptState.PARKED:
        return [], []
    name = f"{pasteable(listed.message_id)} --consumer {pasteable(listed.consumer)}"
    said = "Correct what the error says. Then type one of:"
    return next_steps_of(said, f"semel inbox requeue {name}", f"semel inbox drop {name}")


def _facts(listed: Listed) -> dict[str, Any]:
    receipt = listed.receipt
    return {
        "message": listed.message_id,
        "consumer": listed.consumer,
        "state": receipt.state,
        "attempts": receipt.attempts,
        "error": receipt.error,
        "digest": None if receipt.digest is None else receipt.digest.hex(),
        "received_at": iso(listed.received_at),
        "changed_at": iso(listed.changed_at),
        "read_at": iso(listed.now),
    }


def _shortened(text: str) -> str:
    return safe(text if len(text) <= ERROR_CHARACTERS else f"{text[:ERROR_CHARACTERS]}...")


def _time(listed: Listed, moment: float) -> Text:
    return Text(f"{iso(moment)} ({relative(timedelta(seconds=moment - listed.now))})")

"""``semel journal``: shows what a client has written down, sends what is pending after a crash, and forgets entries.
The keys of a server are in ``keys.py``.

Nothing is decided here: what may be sent again, the journal says, and what an answer means, the client.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table
from rich.text import Text

from semel.cli.lists import Listing, WatchOption, show_list
from semel.cli.output import JsonOption, brief, iso, relative, safe
from semel.cli.resolving import YesOption
from semel.client import Entry, Journal, Resumed, resuming
from semel.client.httpx import IdempotentTransport
from semel.errors import ConfigurationError, SemelError
from semel.work.plan import duration


class State(StrEnum):
    """What a list can be filtered by."""

    PENDING = "pending"
    DONE = "done"
    UNKNOWN = "unknown"


STYLES = {State.PENDING: "yellow", State.DONE: "green", State.UNKNOWN: "bold red"}

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The journal.")]

app = typer.Typer(help="The journal of a client: what it meant to send.", no_args_is_help=True)


class NotEnded(SemelError):
    """Some entries have no answer yet."""


class EntryNotFound(SemelError):
    """There is no such entry."""


@app.command("list")
def list_entries(
    *,
    file: FileArgument,
    state: Annotated[State | None, typer.Option(help="Only these. Without: all.")] = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """List what a client has written down: pending, done, or with an unknown outcome."""
    with _opened(file) as journal:

        def read() -> Listing:
            entries = journal.entries(state.value if state else None)
            facts = [_facts(entry) for entry in entries]
            return Listing(facts, _table(entries, time.time()) if entries else None, "No entries.")

        show_list(read, as_json=as_json, watch=watch)


@app.command()
def resume(
    file: FileArgument,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            metavar="'NAME: VALUE'",
            help="A header to send: no journal has credentials. 'Authorization: Bearer env:NAME' reads a variable.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only what is for this host, as name or name:port; repeatable. Needed with --header where several "
            "have something pending: a credential is not for all of them.",
        ),
    ] = None,
    account: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The account of the credentials, where the client that wrote it down has one."
        ),
    ] = None,
    deadline: Annotated[str, typer.Option(metavar="TIME", help="How long to try each of them.")] = "2m",
) -> None:
    """Send what is pending, with its own keys and bytes, and write the answers down."""
    library = _library()
    given = dict(_header(each) for each in header or [])
    ended: list[Resumed] = []
    with _opened(file) as journal:
        # Without a header, there is nothing that a host should not get.
        every = {urlsplit(entry.url).netloc for entry in journal.pending()}
        hosts = host or (None if given else every)
        for name in sorted({entry.header for entry in resuming.pending_for(journal, hosts)}):
            transport = IdempotentTransport(
                library.HTTPTransport(), journal=journal, deadline=duration(deadline), header=name, account=account
            )
            with library.Client(transport=transport, headers=given) as client:
                ended += resuming.resume(journal, client, hosts=hosts, header=name)
        left = len(resuming.pending_for(journal, hosts))
    for each in ended:
        print(_line(each))
    if left:
        raise NotEnded(f"{left} of {len(ended)} have no answer yet, and stay pending.")
    print(f"{len(ended)} resumed.")


@app.command()
def forget(
    file: FileArgument,
    intent: Annotated[str | None, typer.Argument(metavar="[INTENT]", help="The entry's intent.")] = None,
    done_before: Annotated[
        str | None, typer.Option("--done-before", metavar="TIME", help="All that were done longer ago: 30d, 12h.")
    ] = None,
    yes: YesOption = False,  # noqa: FBT002 - as above
) -> None:
    """Remove an entry, or old ones that are done. The same intent is then a new operation, with a new key."""
    if (intent is None) == (done_before is None):
        raise ConfigurationError("Which entries? Give an INTENT, or --done-before TIME.")
    with _opened(file) as journal:
        if done_before is not None:
            before = time.time() - duration(done_before).total_seconds()
            which = [each.intent for each in journal.entries("done") if (each.ended_at or before) < before]
        else:
            which = [each.intent for each in journal.entries() if each.intent == intent]
            if not which:
                raise EntryNotFound(f"There is no entry {intent!a} in {file}.")
        if not yes and which:
            typer.confirm(f"{len(which)} will be new operations if they are sent again. Forget?", abort=True)
        count = sum(journal.forget(each) for each in which)
    if count < len(which):
        raise EntryNotFound(f"{count} of {len(which)} forgotten: the others are being sent at this moment.")
    print(f"{count} forgotten.")


def _opened(file: Path) -> Journal:
    if not file.exists():
        raise ConfigurationError(f"There is no journal {file}.")
    return Journal(file)


def _library() -> Any:
    for name in ("httpx2", "httpx"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ImportError("Sending needs httpx2, or httpx. Run: pip install httpx2")


def _header(given: str) -> tuple[str, str]:
    name, colon, said = given.partition(":")
    name, said = name.strip(), said.strip()
    if not name or not colon:
        raise ConfigurationError("--header is 'Name: value', or 'Name: env:VARIABLE'.")
    before, found, variable = said.partition("env:")
    if found and variable not in os.environ:
        raise ConfigurationError(f"--header names the variable {variable!a}, which is not set.")
    return name, before + os.environ[variable] if found else said


def _facts(entry: Entry) -> dict[str, Any]:
    facts = dataclasses.asdict(entry)
    return facts | {name: iso(facts[name]) for name in ("first_at", "not_after", "ended_at")}


def _line(resumed: Resumed) -> str:
    came = resumed.status if resumed.error is None else f"{type(resumed.error).__name__}: {resumed.error}"
    return safe(f"{resumed.intent}  {resumed.key}  {came}")


def _table(entries: list[Entry], now: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("intent", "key", "state", "request", "tries", "age", "can be sent", "answer"):
        table.add_column(name, overflow="fold")
    for each in entries:
        is_pending = each.state == "pending"
        table.add_row(
            Text(safe(each.intent)),
            Text(safe(each.key)),
            Text("being sent", "cyan") if each.is_leased else Text(each.state, STYLES[State(each.state)]),
            Text(safe(f"{each.method} {each.url}")),
            str(each.attempts),
            brief(timedelta(seconds=now - each.first_at)),
            relative(timedelta(seconds=each.not_after - now)).replace("in ", "for ") if is_pending else "",
            "" if each.status is None else str(each.status),
        )
    return table

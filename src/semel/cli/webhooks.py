"""``semel webhooks``: the endpoints that webhooks are sent to, and fresh secrets. Nothing is sent here.

A secret is printed once, by ``secret``, and is kept where you put it; the store has the place only.
"""

from __future__ import annotations

import json
import secrets as chance
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
from semel.cli.output import JsonOption, brief, iso, safe, typed
from semel.core.delivery import Endpoint
from semel.core.operator import ReasonNotKept
from semel.core.webhook import KEY_BYTES, new_keys, new_secret
from semel.errors import SemelError
from semel.stores import Store
from semel.stores.base import this_user
from semel.stores.webhooks import note_endpoint
from semel.webhooks import Endpoints

#: Of the bytes that the specification allows, as many as the hash has.
SECRET_BYTES = 32

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The endpoint's name: the destination of its messages.")
]


class Kind(StrEnum):
    """How webhooks are signed."""

    V1 = "v1"
    V1A = "v1a"


app = typer.Typer(help="The endpoints that webhooks are sent to.", no_args_is_help=True)


@app.command("list")
def list_endpoints(
    *,
    store: StoreOption = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """List all endpoints: whether each is on, since when it fails, and where its secrets are."""
    with _endpoints(store) as endpoints:

        def read() -> Listing:
            found = endpoints.list()
            return Listing([_facts(each) for each in found], _table(found) if found else None, "No endpoints.")

        show_list(read, as_json=as_json, watch=watch)


@app.command()
def add(
    name: NameArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to send to: https://host/path.")],
    *,
    secret: Annotated[
        list[str],
        typer.Option(
            metavar="PLACE", help="Where a signing secret is: env:NAME or file:PATH. Repeat it to rotate, newest first."
        ),
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of the endpoint that there is.")] = False,
    store: StoreOption = None,
) -> None:
    """Add an endpoint, or with --replace give one another URL or other secrets."""
    with _endpoints(store) as endpoints:
        endpoints.add(name, url, secrets=secret, replace=replace)
    print(f"{safe(name)} is in the table. The relay reads it every ten seconds.")


@app.command()
def enable(name: NameArgument, store: StoreOption = None) -> None:
    """Send to an endpoint again: what waits for it, and what comes."""
    with opened(store) as keys:
        endpoints = Endpoints(keys)
        name = _name(endpoints, name)
        endpoint = endpoints.enable(name)
        print(f"{safe(name)} is on.")
        _note(keys, endpoint, "enabled", None)


@app.command()
def disable(
    name: NameArgument,
    reason: Annotated[str, typer.Option(help="Why, for those who look at the list.")] = "by an operator",
    store: StoreOption = None,
) -> None:
    """Send nothing more to an endpoint. Its messages wait in the outbox."""
    with opened(store) as keys:
        endpoints = Endpoints(keys)
        name = _name(endpoints, name)
        endpoint = endpoints.disable(name, reason)
        print(f"{safe(name)} is off. Its messages wait.")
        _note(keys, endpoint, "disabled", reason)


@app.command()
def remove(name: NameArgument, store: StoreOption = None) -> None:
    """Forget an endpoint. Its messages stay in the outbox, and wait for one of the same name."""
    with _endpoints(store) as endpoints:
        name = _name(endpoints, name)
        endpoints.remove(name)
    print(f"{safe(name)} is removed.")


@app.command()
def secret(
    kind: Annotated[
        Kind, typer.Option(help="v1: one secret for both sides. v1a: a private and a public key.")
    ] = Kind.V1,
    as_json: JsonOption = False,  # noqa: FBT002 - typer makes an option of it
) -> None:
    """Print a fresh signing secret, or a pair of keys. It is kept nowhere."""
    if kind is Kind.V1:
        made = {"secret": new_secret(chance.token_bytes(SECRET_BYTES))}
    else:
        private, public = new_keys(chance.token_bytes(KEY_BYTES))
        made = {"private": private, "public": public}
    print(json.dumps(made) if as_json else "\n".join(made.values()))


@contextmanager
def _endpoints(url: str | None) -> Iterator[Endpoints]:
    with opened(url) as keys:
        yield Endpoints(keys)


def _note(keys: Store, endpoint: Endpoint, event: str, reason: str | None) -> None:
    keys.actor = this_user()
    try:
        keys.perform(note_endpoint(endpoint, event, reason))
    except SemelError as error:
        raise ReasonNotKept(f"It is done, but the audit trail has no line of it: {error}") from error


def _name(endpoints: Endpoints, shown: str) -> str:
    """Return the name of an endpoint as it is, from the way in which commands show it."""
    names = {each.name for each in endpoints.list()}
    return next((each for each in spellings(shown) if each in names), shown)


def _table(endpoints: list[Endpoint]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("failing", no_wrap=True, justify="right")
    for name in ("url", "secrets", "reason"):
        table.add_column(name, overflow="fold")
    for each in endpoints:
        table.add_row(
            Text(typed(each.name)),
            Text("on", "green") if each.is_on else Text("off", "bold red"),
            Text("-" if each.failing_since is None else brief(timedelta(seconds=each.now - each.failing_since))),
            Text(safe(each.url)),
            Text(safe(", ".join(each.secrets))),
            Text(safe(each.reason or "")),
        )
    return table


def _facts(endpoint: Endpoint) -> dict[str, Any]:
    """Return what is known of *endpoint*, under stable names."""
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "secrets": list(endpoint.secrets),
        "state": "on" if endpoint.is_on else "off",
        "reason": endpoint.reason,
        "failing_since": iso(endpoint.failing_since),
        "created_at": iso(endpoint.created_at),
        "read_at": iso(endpoint.now),
    }

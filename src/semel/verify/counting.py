"""Effect counters: a number that rises when the operation takes effect, read where the API does not answer for itself.
What a rise means is not judged here.

``URL#$.path`` is a value in JSON, or the length of a list; ``URL#header:NAME`` a header of the answer;
``sqlite:///file#SELECT …`` and ``postgresql://…#SELECT …`` a query that gives one number.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from semel.errors import ConfigurationError
from semel.verify.connection import Client
from semel.verify.message import Headers, NoAnswer, Request

_STEP = re.compile(r"\.([A-Za-z_][\w-]*)|\[(-?[0-9]+)\]|\[(?:'([^']*)'|\"([^\"]*)\")\]")
_LENGTH = re.compile(r"\.length(?:\(\))?\Z")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_READ_ONLY = re.compile(r"\s*(?:SELECT|WITH|VALUES|TABLE)\b", re.IGNORECASE)
_POSTGRES = ("postgres", "postgresql")


class CountFailed(Exception):
    """The counter could not be read. The message says why."""


class Counter(Protocol):
    """Something that counts effects."""

    #: How it is called in a report. It has no password in it.
    name: str

    async def read(self) -> int:
        """Return the number of effects so far."""


class WebCounter:
    """A number in an answer to GET."""

    def __init__(self, name: str, client: Client, request: Request, fragment: str) -> None:
        self.name = name
        self._client = client
        self._request = request
        self._fragment = fragment

    async def read(self) -> int:
        """Ask for it."""
        outcome = await self._client.send(self._request)
        if isinstance(outcome, NoAnswer):
            raise CountFailed(outcome.reason)
        if not outcome.is_success:
            # Without its query: that may hold a credential.
            raise CountFailed(f"GET {self._request.target.partition('?')[0]} is answered with {outcome.status}")
        if self._fragment.lower().startswith("header:"):
            header = self._fragment.partition(":")[2].strip()
            value = outcome.header(header)
            if value is None:
                raise CountFailed(f"the answer has no header {header}")
            return _number(value, f"the header {header}", is_text=True)
        try:
            content = json.loads(outcome.body)
        except (ValueError, RecursionError):
            raise CountFailed("the answer is no JSON") from None
        return _number(at(content, self._fragment), self._fragment)


class QueryCounter:
    """The result of an SQL query."""

    def __init__(self, name: str, query: Callable[[], Any]) -> None:
        self.name = name
        self._query = query

    async def read(self) -> int:
        """Run the query, in a thread: it must not hold up what runs on the loop."""
        try:
            row = await asyncio.to_thread(self._query)
        except Exception as error:  # noqa: BLE001 - a driver's own errors, known to the driver only
            raise CountFailed(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
        if row is None or len(row) != 1:
            raise CountFailed("the query gives no single number")
        return _number(row[0], "the result of the query")


def counter(text: str, base: str, headers: Headers, client_for: Callable[[str], tuple[Client, str]]) -> Counter:
    """Return the counter that *text* describes; a path alone is relative to the URL *base*."""
    address, mark, fragment = text.partition("#")
    if not mark or not fragment.strip():
        raise ConfigurationError(
            "--count is URL#$.path, URL#header:NAME, or a database and a query: sqlite:///shop.db#SELECT …"
        )
    scheme = urlsplit(address).scheme
    if scheme == "sqlite" or scheme.partition("+")[0] in _POSTGRES:
        if not _READ_ONLY.match(fragment):
            raise ConfigurationError("The query of --count only reads: it begins with SELECT.")
        query = _sqlite(address, fragment) if scheme == "sqlite" else _postgres(address, fragment)
        return QueryCounter(f"{scheme} {fragment.strip()}", query)
    if address.startswith("/") or not address:
        address = base.rstrip("/") + address
    if not fragment.lower().startswith("header:"):
        fragment = _path(fragment)
    client, target = client_for(address)
    # Credentials are for the server that they were given for.
    sent = headers if urlsplit(base).netloc == client.place.authority else ()
    shown = urlunsplit(urlsplit(address)._replace(netloc=client.place.authority, query=""))
    return WebCounter(f"{shown}#{fragment}", client, Request("GET", target, sent).lacking("content-type"), fragment)


def at(content: Any, path: str) -> Any:
    """Return what is in *content* at *path*: ``$.items[0].total``, ``$['a b']``, ``$.items.length()``."""
    found, rest = content, path.removeprefix("$")
    while rest:
        if _LENGTH.fullmatch(rest) and isinstance(found, list):
            return len(found)
        step = _STEP.match(rest)
        if not step:
            raise CountFailed(f"{path} is no path")
        name = next((each for each in (step[1], step[3], step[4]) if each is not None), None)
        try:
            found = found[int(step[2])] if name is None else found[name]
        except (KeyError, IndexError, TypeError):
            raise CountFailed(f"there is no {path} in the answer") from None
        rest = rest[step.end() :]
    return found


def _path(text: str) -> str:
    path = text.strip()
    path = path if path.startswith("$") else f"$.{path}"
    rest = _LENGTH.sub("", path[1:])
    while rest:
        step = _STEP.match(rest)
        if not step:
            raise ConfigurationError(f"--count: {text!r} is no path into JSON. Write $.total or $.items[0].count")
        rest = rest[step.end() :]
    return path


def _number(value: Any, what: str, *, is_text: bool = False) -> int:
    if isinstance(value, list):
        return len(value)
    if isinstance(value, str) and is_text and _WHOLE.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise CountFailed(f"{what} is {json.dumps(value, default=str)[:40]}, and not a whole number")
    return int(value)


def _sqlite(address: str, query: str) -> Callable[[], Any]:
    path = unquote(urlsplit(address).path)[1:]
    if not Path(path).exists():
        raise ConfigurationError(f"--count: there is no file {path}.")
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"

    def read() -> Any:
        with closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
            return connection.execute(query).fetchone()

    return read


def _postgres(address: str, query: str) -> Callable[[], Any]:
    # urlunsplit leaves the slashes out where there is no host.
    plain = "postgresql:" + address.partition(":")[2]
    try:
        psycopg = import_module("psycopg")
    except ModuleNotFoundError:
        raise ConfigurationError("--count on PostgreSQL needs psycopg. Run: pip install 'semel[postgres]'") from None

    def read() -> Any:
        with psycopg.connect(plain, autocommit=True, connect_timeout=10) as connection:
            connection.execute("SET default_transaction_read_only = on")
            return connection.execute(query).fetchone()

    return read

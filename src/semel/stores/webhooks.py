"""The statements about endpoints of webhooks, for the database that a store is in. It runs nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from semel.core.commands import Note
from semel.core.delivery import Endpoint
from semel.core.message import one_line
from semel.core.operator import why_unsent
from semel.core.record import NO_TOKEN, Hold
from semel.stores.base import AsyncStore, Store
from semel.stores.dialect import PACKAGES, messages_of
from semel.stores.outbox import OutboxStatements, Statements, Stored
from semel.stores.statement import Joined, load_queries


def note_endpoint(endpoint: Endpoint, event: str, reason: str | None) -> Note:
    """Return the line of the audit trail about what an operator did to an endpoint: *enabled*, *disabled*."""
    detail = None if reason is None else one_line(reason)
    return Note(Hold(f"webhook:{endpoint.name}", endpoint.url, 1, NO_TOKEN), event, detail)


def unsent(store: Store | AsyncStore, messages: Iterable[Stored], now: float) -> Statements[dict[str, str]]:
    """Say of which destinations of *messages* nothing shows that a relay serves them, and what to do."""
    outbox = OutboxStatements(messages_of(store, "outbox"))
    quiet = []
    for to in sorted({each.to for each in messages if each.is_overdue(now)}):
        if (yield from outbox.is_quiet(to)):
            quiet.append(to)  # noqa: PERF401 - a comprehension can't yield
    if not quiet:
        return {}
    endpoints = {each.name: each.is_on for each in (yield EndpointStatements(store).list())}
    return {to: why_unsent(to, endpoints) for to in quiet}


class EndpointStatements:
    """Builds them for one store. Each returns the endpoint as it is afterwards; None: there is none, or it stays."""

    def __init__(self, store: Store | AsyncStore) -> None:
        """Speak to the table beside that of *store*'s keys."""
        where = messages_of(store, "endpoints of webhooks")
        self._queries = load_queries(PACKAGES[where.name], where.names, "webhooks.sql")

    def add(self, name: str, url: str, secrets: Sequence[str], *, replace: bool) -> Joined[Endpoint | None]:
        """Add an endpoint, or put it in the place of another."""
        return self._joined("replace" if replace else "add", name=name, url=url, secrets=json.dumps(list(secrets)))

    def list(self) -> Joined[tuple[Endpoint, ...]]:
        """Read all of them, by name."""
        return Joined(self._queries["list"], {}, _endpoints)

    def enable(self, name: str, seen: Endpoint | None = None) -> Joined[Endpoint | None]:
        """Send to it again; with *seen*, only if it is still so."""
        return self._joined("enable", name=name, **_guard(seen))

    def disable(
        self, name: str, reason: str, url: str | None = None, seen: Endpoint | None = None
    ) -> Joined[Endpoint | None]:
        """Send nothing more to it; with *url*, only if it is still there; with *seen*, only if it is still so."""
        return self._joined(
            "disable", name=name, reason=_stored(reason), **_guard(seen) | ({"url": url} if url else {})
        )

    def remove(self, name: str) -> Joined[Endpoint | None]:
        """Forget it."""
        return self._joined("remove", name=name)

    def note_failure(self, name: str, url: str, patience: timedelta, reason: str) -> Joined[Endpoint | None]:
        """Note a failure; one that comes later than *patience* after the first turns the endpoint off."""
        seconds = patience.total_seconds()
        return self._joined("note_failure", name=name, url=url, patience=seconds, reason=_stored(reason))

    def note_success(self, name: str, url: str) -> Joined[Endpoint | None]:
        """Note that failures are over."""
        return self._joined("note_success", name=name, url=url)

    def _joined(self, query: str, /, **values: object) -> Joined[Endpoint | None]:
        return Joined(self._queries[query], values, _endpoint)


def _guard(seen: Endpoint | None) -> dict[str, object]:
    """Return what an endpoint must still be like."""
    if seen is None:
        return {"url": None, "was": None, "why": None}
    return {"url": seen.url, "was": "on" if seen.is_on else "off", "why": seen.reason or ""}


def _endpoints(rows: Sequence[Sequence[Any]]) -> tuple[Endpoint, ...]:
    return tuple(_read(row) for row in rows)


def _endpoint(rows: Sequence[Sequence[Any]]) -> Endpoint | None:
    return _read(rows[0]) if rows else None


def _read(row: Sequence[Any]) -> Endpoint:
    name, url, secrets, state, reason, failing_since, created_at, now = row
    return Endpoint(name, url, tuple(json.loads(secrets)), state == "on", reason, failing_since, created_at, now)


def _stored(text: str) -> str:
    # PostgreSQL stores no NUL, and no half of a surrogate pair.
    return text.replace("\0", "").encode("utf-8", "replace").decode()

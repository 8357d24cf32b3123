"""A small payment API in several forms, behind both entry points. What it must leave behind, ``checker.FORMS`` says.

``guard`` writes on a connection of its own; ``atomic`` through the request's transaction; ``phase``, ``effect`` and
``steps`` take steps, and so does ``accepted``, when a worker comes to it. A run may have the process die or stop at a
named point of a handler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from wsgiref.types import StartResponse, WSGIEnvironment

import psycopg

import semel
from semel.asgi import IdempotencyMiddleware as AsyncEntry
from semel.asgi.protocol import ASGIScope, ASGISend, Receive
from semel.guard.request import RequestView
from semel.stores import AsyncStore, Store
from semel.wsgi import IdempotencyMiddleware as Entry
from torture.checker import FORMS
from torture.job import Job
from torture.provider import charge
from torture.witness import open_sqlite

#: The points of the handlers, in order. Each form passes some of them.
POINTS = ("entered", "ride written", "ride committed", "charged", "charge kept", "paid", "answering")

#: The forms of two phases and a charge between them.
STEPS = frozenset({"steps", "accepted"})

_INSERT = {
    "psycopg": "INSERT INTO effects (key, step, attempt, worker) VALUES (%s, %s, %s, %s)",
    "sqlite3": "INSERT INTO effects (key, step, attempt, worker) VALUES (?, ?, ?, ?)",
    "asyncpg": "INSERT INTO effects (key, step, attempt, worker) VALUES ($1, $2, $3, $4)",
}


class Api:
    """The handlers, in one process that may fail at a point."""

    def __init__(self, job: Job) -> None:
        """Pay in the database of *job*, through its provider."""
        self._job = job
        self._is_postgres = urlsplit(job.url).scheme != "sqlite"
        self._own: Any = None
        #: The keys with a handler that has run in this process.
        self.has_run: set[str] = set()

    def point(self, name: str) -> None:
        """Pass a named point: the fault of this job may be there."""
        fault = self._job.fault
        if fault is not None and fault.point == name:
            os.kill(os.getpid(), fault.signal)

    def wsgi(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a payment in a thread."""
        form = environ["PATH_INFO"].removeprefix("/")
        body = json.dumps(self._pay(form)).encode()
        start_response("201 Created", [("Content-Type", "application/json")])
        return [body]

    async def asgi(self, scope: ASGIScope, _receive: Receive, send: ASGISend) -> None:
        """Serve a payment on an event loop."""
        body = json.dumps(await self._apay(scope["path"].removeprefix("/"))).encode()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _pay(self, form: str) -> dict[str, Any]:
        operation = self._enter()
        made: dict[str, Any] = {}
        if form == "guard":
            self._write_alone("paid")
        elif form == "atomic":
            self._write(operation.connection, "paid")
            self.point("paid")
        elif form == "parcel":
            self._write(operation.connection, "ordered")
            self._publish(operation)
        if form in {"phase", *STEPS}:
            made["ride"] = operation.phase("ride", self._write, "ride")
            self.point("ride committed")
        if form in {"effect", *STEPS}:
            made["charge"] = operation.effect("charge", self._charge, operation.key)
            self.point("charge kept")
        if form in STEPS:
            made["receipt"] = operation.phase("receipt", self._write, "receipt")
        return self._answer(form, made)

    async def _apay(self, form: str) -> dict[str, Any]:
        operation = self._enter()
        write: Callable[..., Any] = self._awrite if self._is_postgres else self._write
        made: dict[str, Any] = {}
        if form == "guard":
            self._write_alone("paid")
        elif form == "atomic":
            written = write(operation.connection, "paid")
            if self._is_postgres:
                await written
            self.point("paid")
        elif form == "parcel":
            written = write(operation.connection, "ordered")
            if self._is_postgres:
                await written
            published = self._publish(operation)
            if self._is_postgres:
                await published
        if form in {"phase", *STEPS}:
            made["ride"] = await operation.phase("ride", write, "ride")
            self.point("ride committed")
        if form in {"effect", *STEPS}:
            made["charge"] = await operation.effect("charge", semel.in_thread(self._charge), operation.key)
            self.point("charge kept")
        if form in STEPS:
            made["receipt"] = await operation.phase("receipt", write, "receipt")
        return self._answer(form, made)

    def _publish(self, operation: semel.Operation) -> Any:
        """Orders with the same last word in their key are to be sent in their order."""
        group = operation.key.rpartition("-")[2]
        to = self._job.to or operation.key
        return operation.publish("order.paid", {"order": operation.key}, key=group, to=to)

    def _enter(self) -> semel.Operation:
        operation = semel.current()
        self.has_run.add(operation.key)
        self.point("entered")
        return operation

    def _answer(self, form: str, made: dict[str, Any]) -> dict[str, Any]:
        """Name the attempt and the worker: so a replayed answer differs from one of a second run."""
        operation = semel.current()
        self.point("answering")
        return {"key": operation.key, "form": form, "attempt": operation.attempt, "worker": _worker(), **made}

    # Both return the same for every worker, as most phases do: so results do not tell workers apart.
    def _write(self, connection: Any, step: str) -> str:
        connection.execute(_INSERT["psycopg" if self._is_postgres else "sqlite3"], _row(step))
        self.point(f"{step} written")
        return step

    async def _awrite(self, connection: Any, step: str) -> str:
        await connection.execute(_INSERT["asyncpg"], *_row(step))
        self.point(f"{step} written")
        return step

    def _write_alone(self, step: str) -> None:
        if self._own is None:
            url = self._job.url
            self._own = psycopg.connect(url, autocommit=True) if self._is_postgres else open_sqlite(url)
        self._own.execute(_INSERT["psycopg" if self._is_postgres else "sqlite3"], _row(step))
        self.point(step)

    def _charge(self, key: str, *, idempotency_key: str) -> str:
        number = charge(self._job.provider, key, idempotency_key)
        self.point("charged")
        return number


def given(job: Job) -> Any:
    """Return what a store is made of."""
    if not job.cache:
        return job.store or job.url
    from semel.stores.tiered import Tiered  # noqa: PLC0415 - few jobs have Redis in front of their store

    # Nothing is kept in the process: every replay has to come from Redis. It has a long time-out: on a busy
    # machine it would count as too slow, and the run would show nothing.
    return Tiered(durable=job.store or job.url, cache=job.cache, memory=0, cache_timeout=timedelta(seconds=1))


def wsgi_entry(api: Api, job: Job, store: Store) -> Entry:
    """Put the API behind the WSGI entry point."""
    return Entry(api.wsgi, store=store, scope=_owner, paths=_paths(job))


def asgi_entry(api: Api, job: Job, store: AsyncStore) -> AsyncEntry:
    """Put the API behind the ASGI entry point."""
    return AsyncEntry(api.asgi, store=store, scope=_owner, paths=_paths(job))


def _paths(job: Job) -> dict[str, semel.Policy]:
    lease = timedelta(seconds=job.lease_seconds)
    policies = {form: semel.Policy(lease=lease, required=True) for form in FORMS if form != "accepted"}
    policies["guard"] = semel.Policy(lease=lease, required=True, on_crash=job.on_crash)
    for form in ("atomic", "parcel"):
        if job.store.startswith("redis:"):
            del policies[form]  # An entry point refuses this mode where its store has no transactions.
        else:
            policies[form] = semel.Policy(lease=lease, required=True, mode="atomic")
    if job.accepts:
        policies["accepted"] = semel.Policy(lease=lease, required=True, in_progress="accept")
    return {f"/{form}": policy for form, policy in policies.items()}


def _owner(_request: RequestView) -> str:
    return "torture"


def _worker() -> str:
    return f"worker {os.getpid()}"


def _row(step: str) -> tuple[str, str, int, str]:
    operation = semel.current()
    return operation.key, step, operation.attempt, _worker()

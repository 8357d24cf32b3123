"""The work of a forked child: one job, as client and server in one process. It reports what it saw, and ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import semel
from semel.asgi import IdempotencyMiddleware
from semel.stores import AsyncStore, Store, async_store, store
from semel.work import AsyncCompleter, AsyncReaper, AsyncSweeper, Completer, Reaper, Report, Sweeper
from torture import clock, messaging, planted
from torture.checker import FORMS, Event
from torture.job import Job
from torture.tracing import Lines
from torture.witness import History
from torture.workload import Api, asgi_entry, given, wsgi_entry

#: A client that insists looks again this soon.
RETRY_SECONDS = 0.02
#: And gives up after this long: the checker then finds the key stuck.
INSIST_SECONDS = 15.0


def work(job: Job) -> dict[str, Any]:
    """Do *job*; return the report."""
    if job.clock_seconds:
        clock.set_off(job.clock_seconds)
    if job.action in {"relay", "consume"}:
        return messaging.work(job)
    with planted.bug(job.planted):
        return asyncio.run(_Async(job).work()) if job.entry == "asgi" else _Sync(job).work()


class _Child:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.api = Api(job)
        self.history = History(Path(job.history))
        self.lines = Lines(job.fault, job.only_files)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count lines inside the block, where the job says so."""
        if self.job.counts_lines or (self.job.fault and self.job.fault.line):
            self.lines.start()
        try:
            yield
        finally:
            self.lines.stop()

    def said(self, report: object = "") -> dict[str, Any]:
        """Return the report for the parent."""
        return {"lines": self.lines.count, "report": str(report)}

    def sent(self, form: str, key: str) -> None:
        """Write down that a request goes out."""
        self.history.add(Event("sent", key, form))

    def answered(self, form: str, key: str, status: int, headers: dict[str, str], body: bytes) -> Event:
        """Write down an answer, the moment it is here."""
        is_replay = headers.get("idempotent-replayed") == "true"
        has_run = key in self.api.has_run
        answer = Event("answer", key, form, status, body.decode(), is_replay, has_run, os.getpid())
        self.history.add(answer)
        self.api.point("answered")
        return answer


class _Sync(_Child):
    """By the WSGI entry point."""

    def work(self) -> dict[str, Any]:
        opened: Store = planted.spoiled(self.job.planted, store(given(self.job)), self.job)
        entry = wsgi_entry(self.api, self.job, opened)
        report: object = ""
        with self.counted():
            if self.job.action == "sweep":
                report = Sweeper(opened).run_once()
            elif self.job.action == "reap":
                report = Reaper(opened).run_once()
            while self.job.action == "work" and not (report := Completer(opened, entry.finish).run_once()).is_idle:
                pass
            for form, key in self.job.payments:
                self._pay(entry, form, key)
        return self.said(report)

    def _pay(self, entry: Callable[..., Any], form: str, key: str) -> None:
        for _ in _tries(self.job):
            self.sent(form, key)
            if is_final(self._send(entry, form, key)):
                break

    def _send(self, entry: Callable[..., Any], form: str, key: str) -> Event:
        body = request_body(form)
        began: list[Any] = []
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": f"/{form}",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_IDEMPOTENCY_KEY": key,
            "wsgi.input": io.BytesIO(body),
        }
        chunks = entry(environ, lambda status, fields, _error=None: began.extend([status, fields]))
        try:
            got = b"".join(chunks)
            headers = {name.lower(): value for name, value in began[1]}
            return self.answered(form, key, int(began[0].split()[0]), headers, got)
        finally:
            chunks.close()


class _Async(_Child):
    """By the ASGI entry point."""

    async def work(self) -> dict[str, Any]:
        opened: AsyncStore = async_store(given(self.job))
        entry = asgi_entry(self.api, self.job, opened)
        report: object = ""
        # From before the store is opened: its threads are counted too, and they begin with it.
        with self.counted():
            async with opened:
                if self.job.action == "sweep":
                    report = await AsyncSweeper(opened).run_once()
                elif self.job.action == "reap":
                    report = await AsyncReaper(opened).run_once()
                while self.job.action == "work" and not (report := await self._complete(opened, entry)).is_idle:
                    pass
                for form, key in self.job.payments:
                    await self._pay(entry, form, key)
        return self.said(report)

    async def _complete(self, opened: AsyncStore, entry: IdempotencyMiddleware) -> Report:
        return await AsyncCompleter(opened, entry.finish).run_once()

    async def _pay(self, entry: Callable[..., Any], form: str, key: str) -> None:
        for _ in _tries(self.job):
            self.sent(form, key)
            if is_final(await self._send(entry, form, key)):
                break

    async def _send(self, entry: Callable[..., Any], form: str, key: str) -> Event:
        body = request_body(form)
        messages: list[dict[str, Any]] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/{form}",
            "raw_path": f"/{form}".encode(),
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"idempotency-key", key.encode()),
            ],
        }
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            for message in asked:
                return message
            await asyncio.Event().wait()  # The client stays connected.
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.append(self._read(form, key, messages))

        ended: list[Event] = []
        await entry(scope, receive, send)
        return ended[0]

    def _read(self, form: str, key: str, messages: list[dict[str, Any]]) -> Event:
        headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", ())}
        got = b"".join(message.get("body", b"") for message in messages[1:])
        return self.answered(form, key, messages[0]["status"], headers, got)


def is_final(answer: Event) -> bool:
    """Whether a client that insists may stop."""
    return answer.is_success or (FORMS[answer.form].may_be_unknown and answer.is_unknown)


def request_body(form: str) -> bytes:
    """Return the same body for every try: a retry is the same request."""
    return json.dumps({"form": form, "amount": 100}).encode()


def _tries(job: Job) -> Iterator[int]:
    yield 0
    ends = time.monotonic() + INSIST_SECONDS
    while job.action == "insist" and time.monotonic() < ends:
        time.sleep(RETRY_SECONDS)  # A client in its own process: there is no event to wait for.
        yield 1


def warm_up() -> None:
    """Import what a child would, so that it need not."""
    with suppress(semel.SemelError):
        store("memory://").close()
    for name in ("asyncpg", "psycopg_pool", "semel.stores.connections.psycopg", "semel.stores.connections.asyncpg"):
        __import__(name)
    for url in ("postgresql://nobody@nowhere/none", "sqlite:///none.db"):
        store(url)
        async_store(url)

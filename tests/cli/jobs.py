"""An app that accepts jobs of two phases, in both colours. What its workers did is in a file, a line for each phase.

A job waits between its phases until there is a file of the name of its key.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import semel.asgi
import semel.wsgi
from semel import Policy

POLL_SECONDS = 0.02
#: How long the job of a killed worker waits for the next.
LEASE = timedelta(milliseconds=1500)
POLICY = Policy.ietf(in_progress="accept", lease=LEASE)


def write_down(folder: Path, what: str) -> str:
    operation = semel.current()
    line = f"{os.getpid()} {operation.key} {operation.attempt} {what}\n".encode()
    file = os.open(folder / "done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    return what


def phase_of(folder: Path, what: str) -> Callable[[Any], Any]:
    def phase(_connection: Any) -> str:
        return write_down(folder, what)

    return phase


def async_phase_of(folder: Path, what: str) -> Callable[[Any], Any]:
    async def phase(_connection: Any) -> str:
        return write_down(folder, what)

    return phase


def answer() -> bytes:
    return json.dumps({"attempt": semel.current().attempt}).encode()


def make_asgi(store: str, folder: Path, **settings: Any) -> semel.asgi.IdempotencyMiddleware:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        if scope["method"] == "POST":
            operation = semel.current()
            phase_for = phase_of if store.startswith("sqlite:") else async_phase_of
            await operation.phase("one", phase_for(folder, "one"))
            await operation.progress(0.5, "half-way")
            while not (folder / operation.key).exists():  # noqa: ASYNC110 - a file is the only event that another process can make
                await asyncio.sleep(POLL_SECONDS)
            await operation.phase("two", phase_for(folder, "two"))
        body = answer() if scope["method"] == "POST" else b"{}"
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return semel.asgi.IdempotencyMiddleware(app, store=store, scope=semel.SINGLE_TENANT, policy=POLICY, **settings)


def make_wsgi(store: str, folder: Path, **settings: Any) -> semel.wsgi.IdempotencyMiddleware:
    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "POST":
            operation = semel.current()
            operation.phase("one", phase_of(folder, "one"))
            operation.progress(0.5, "half-way")
            while not (folder / operation.key).exists():
                time.sleep(POLL_SECONDS)
            operation.phase("two", phase_of(folder, "two"))
        start_response("201 Created", [("Content-Type", "application/json")])
        return [answer() if environ["REQUEST_METHOD"] == "POST" else b"{}"]

    return semel.wsgi.IdempotencyMiddleware(app, store=store, scope=semel.SINGLE_TENANT, policy=POLICY, **settings)


def __getattr__(name: str) -> Any:
    """Make the app that a server or ``semel work`` asks for, when it does."""
    if not name.startswith(("asgi", "wsgi")):
        raise AttributeError(name)
    make = make_asgi if name.startswith("asgi") else make_wsgi
    store, folder = os.environ["JOBS_STORE"], Path(os.environ["JOBS_FOLDER"])
    made = globals()[name] = make(store, folder, work=name.endswith("_working"))
    return made

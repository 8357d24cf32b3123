"""One tiny payment API for real servers, in both colours. What it is to do, the environment says; what it did, a file.

An effect is a line in a file: *process id, key, attempt*. It is appended in one write, so a checker can count them
whatever becomes of the process. What the body says, happens after the effect: "hold" makes the first attempt wait for a
file to appear, "block" makes every attempt do so without giving its event loop or thread free, "raise" raises, "large"
makes the answer a stream of 3 MB. How many wait in the process that answers is told at ``/waiting``; ``/block`` is
guarded by nothing, and blocks as "block" does.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

import semel
from semel import Policy
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.stores import leases
from semel.stores.tiered import Tiered
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware

POLL_SECONDS = 0.02
LARGE = [bytes([number]) * 100_000 for number in range(30)]

EFFECTS = Path(os.environ["SEMEL_TEST_EFFECTS"])
GO = EFFECTS.with_suffix(".go")
BLOCKED = EFFECTS.with_suffix(".blocked")
GIVEN: dict[str, Any] = {
    "on_crash": os.environ.get("SEMEL_TEST_ON_CRASH", "rerun"),
    "mode": os.environ.get("SEMEL_TEST_MODE", "guard"),
    "in_progress": os.environ.get("SEMEL_TEST_IN_PROGRESS", "conflict"),
}
POLICY = Policy.ietf(
    lease=timedelta(milliseconds=int(os.environ.get("SEMEL_TEST_LEASE_MS", "30000"))),
    wait=timedelta(seconds=30),
    **GIVEN,
)
STORE, CACHE = os.environ["SEMEL_TEST_STORE"], os.environ.get("SEMEL_TEST_CACHE")
if SILENCE_MS := int(os.environ.get("SEMEL_TEST_LOOP_SILENCE_MS", "0")):
    leases.LOOP_SILENCE, leases.LOOP_SILENCE_LEASES = timedelta(milliseconds=SILENCE_MS), 1
SETTINGS: dict[str, Any] = {
    "store": Tiered(STORE, cache=CACHE) if CACHE else STORE,
    "scope": semel.SINGLE_TENANT,
    "policy": POLICY,
    "paths": "/pay",
    "work": POLICY.may_accept,
}


def pay(body: bytes) -> bytes:
    """Take effect, and say so."""
    operation = semel.current()
    line = f"{os.getpid()} {operation.key} {operation.attempt}\n".encode()
    file = os.open(EFFECTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    if b"raise" in body:
        raise RuntimeError("as the client asked")
    return json.dumps({"attempt": operation.attempt, "pid": os.getpid()}).encode()


def must_wait(body: bytes) -> bool:
    return b"hold" in body and semel.current().attempt == 1 and not GO.exists()


def block() -> None:
    """Do what takes long, such as a report, and give nothing else a turn: no task, and no greenlet."""
    BLOCKED.touch()
    while not GO.exists():
        signal.sigtimedwait((), POLL_SECONDS)  # a sleep that gevent does not replace


def parts(body: bytes, answer: bytes) -> Iterable[bytes]:
    return iter(LARGE) if b"large" in body else [answer]


async def _asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    answer, body, more = b"fine", b"", True
    if scope["path"] == "/waiting":
        answer = str(asgi_app.guard.room.count).encode()
    if scope["path"] == "/block":
        block()
    if scope["path"] == "/pay":
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        answer = pay(body)
        if b"block" in body:
            block()
        while must_wait(body):  # noqa: ASYNC110 - a file is the only event that another process can make
            await asyncio.sleep(POLL_SECONDS)
    await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"application/json")]})
    for part in parts(body, answer):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


def _wsgi(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    answer, body = b"fine", b""
    if environ["PATH_INFO"] == "/waiting":
        answer = str(wsgi_app.guard.room.count).encode()
    if environ["PATH_INFO"] == "/pay":
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        answer = pay(body)
        if b"block" in body:
            block()
        while must_wait(body):
            time.sleep(POLL_SECONDS)
    start_response("201 Created", [("Content-Type", "application/json")])
    return parts(body, answer)


asgi_app = AsgiMiddleware(_asgi, **SETTINGS)
wsgi_app = WsgiMiddleware(_wsgi, **SETTINGS)


class _Threading(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name in the standard library


if __name__ == "__main__":  # the standard library's own server
    make_server("127.0.0.1", int(sys.argv[1]), wsgi_app, _Threading, _Silent).serve_forever()

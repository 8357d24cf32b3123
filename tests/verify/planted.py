"""One small API with idempotency keys, and every mistake that can be planted into it. It is not Semel, and uses nothing
of it.

The first part of a path names the mistake: ``/no-lock/payments``. ``/correct/payments`` has none. Each has payments of
its own, counted at ``/no-lock/count``.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

import uvicorn

#: Long enough that requests of a race meet each other, whatever the machine does meanwhile.
HANDLER_SECONDS = 0.03
MAX_KEY = 255
SHORT_KEY = 20
#: Characters past which a key is taken for none, where that is the mistake.
IGNORED_PAST = {"longest-is-none": 100, "long-is-none": MAX_KEY, "very-long-is-none": 1000}
#: After which a key is forgotten, where that comes early.
FORGET_SECONDS = 1.0
#: From an answer to its effect, where that comes late.
LATE_SECONDS = 0.15

Headers = list[tuple[str, str]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass
class Reply:
    status: int
    content: bytes = b""
    headers: Headers = field(default_factory=list)


@dataclass
class Record:
    fingerprint: bytes
    reply: Reply | None = None
    began: float = field(default_factory=time.monotonic)


@dataclass
class Asked:
    method: str
    path: str
    query: str
    headers: Headers
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]

    def one(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)


class Refused(Exception):
    def __init__(self, reply: Reply) -> None:
        self.reply = reply


def problem(status: int, code: str, *more: tuple[str, str]) -> Reply:
    content = {"type": f"https://api.example/problems/{code}", "title": code, "status": status}
    return Reply(status, json.dumps(content).encode(), [("content-type", "application/problem+json"), *more])


class Shop:
    """Takes payments, with the mistake *bug*."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.payments: list[int] = []
        self.records: dict[object, Record] = {}
        self.replays: dict[object, int] = {}
        self.begun: set[object] = set()
        self.numbers = itertools.count(1)

    def take(self, amount: int, *, is_late: bool = False) -> None:
        """Take a payment, now or later."""
        if is_late or self.has("late-effects", "late-no-lock"):
            asyncio.get_running_loop().call_later(LATE_SECONDS, self.payments.append, amount)
        else:
            self.payments.append(amount)

    def has(self, *bugs: str) -> bool:
        return self.bug in bugs

    async def serve(self, asked: Asked, is_gone: Callable[[], bool]) -> Reply:
        try:
            if asked.method in {"POST", "PATCH"} or (self.has("method-ignored") and asked.path != "/count"):
                return await self.guarded(asked, is_gone)
            return self.unguarded(asked)
        except Refused as refused:
            return refused.reply

    def unguarded(self, asked: Asked) -> Reply:
        if asked.path == "/count":
            return Reply(200, json.dumps({"n": len(self.payments)}).encode(), [("content-type", "application/json")])
        if asked.path != "/payments":
            return Reply(404)
        content = json.dumps({"payments": self.payments}).encode()
        return Reply(200, content if asked.method == "GET" else b"") if asked.method in {"GET", "HEAD"} else Reply(405)

    async def guarded(self, asked: Asked, is_gone: Callable[[], bool]) -> Reply:
        key = self.key_of(asked)
        account = self.account_of(asked, key)
        if key is None or self.has("keys-ignored") or (self.has("patch-ignored") and asked.method == "PATCH"):
            return await self.handled(asked)
        if self.has("large-unguarded") and len(asked.body) > 64 * 1024:
            return await self.handled(asked)
        if self.has("chunked-unguarded") and asked.one("content-length") is None:
            return await self.handled(asked)
        if self.has("few-at-once") and sum(each.reply is None for each in self.records.values()):
            return Reply(429)
        name = (account, key)
        if self.has("body-is-the-key"):
            name = (account, asked.body.hex())
        if not self.has("key-burnt-by-invalid", "path-ignored", "method-ignored"):
            self.looked_at(asked)
        return await self.once(name, asked, is_gone)

    async def once(self, name: object, asked: Asked, is_gone: Callable[[], bool]) -> Reply:
        fingerprint = self.fingerprint_of(asked)
        record = self.records.get(name)
        if record is not None and self.has("forgets-in-a-second") and time.monotonic() > record.began + FORGET_SECONDS:
            record = None
        if record is not None:
            return self.repeated(name, record, fingerprint)
        if self.has("look-then-claim"):
            await asyncio.sleep(0.005)
        if not self.has("no-lock", "500-on-race", "late-no-lock"):
            self.records[name] = Record(fingerprint)
        reply = await self.handled(asked)
        if self.has("gives-up-with-the-client") and is_gone():
            del self.records[name]
            return reply
        if self.has("500-on-race") and name in self.records:
            return Reply(500, b"UniqueViolation")
        if self.has("errors-not-kept") and reply.status >= 500:
            del self.records[name]
            return reply
        stored = self.stored(reply)
        earlier = self.records.get(name)
        if not (self.has("busy-kept") and earlier is not None and earlier.reply is not None):
            self.records[name] = Record(fingerprint, stored)
        return reply

    def repeated(self, name: object, record: Record, fingerprint: bytes) -> Reply:
        is_checked = not self.has("no-fingerprint") and not (
            self.has("fingerprint-when-finished") and record.reply is None
        )
        if is_checked and record.fingerprint != fingerprint:
            return self.mismatch(name, record, fingerprint)
        if record.reply is None:
            more = [] if self.has("no-retry-after") else [("retry-after", "1")]
            reply = problem(409, "in-progress", *more)
            if self.has("busy-without-body"):
                reply = Reply(409, b"", more)
            if self.has("busy-is-425"):
                reply.status = 425
            if self.has("busy-kept"):
                record.reply = reply
            return reply
        self.replays[name] = self.replays.get(name, 0) + 1
        if self.has("late-retries") or (self.has("late-after-replays") and self.replays[name] == 2):
            self.take(0, is_late=True)
        if self.has("forgets-after-a-replay") and self.replays[name] == 2:
            del self.records[name]
        return Reply(
            record.reply.status, record.reply.content, [*record.reply.headers, ("idempotent-replayed", "true")]
        )

    def mismatch(self, name: object, record: Record, fingerprint: bytes) -> Reply:
        if self.has("mismatch-forgets-first"):
            self.records.pop(name, None)
        if self.has("mismatch-is-409"):
            return problem(409, "key-reused")
        if self.has("mismatch-with-a-wrong-problem"):
            return Reply(422, problem(400, "key-reused").content, [("content-type", "application/problem+json")])
        if self.has("mismatch-without-problem"):
            return Reply(422, b'{"detail": "no"}', [("content-type", "application/json")])
        return problem(422, "key-reused")

    def key_of(self, asked: Asked) -> str | None:
        lines = asked.all("idempotency-key")
        if not lines:
            return "undefined" if self.has("missing-key-shared") else None
        if self.ignores(lines):
            return None
        if len(lines) > 1 and not self.has("two-keys-joined"):
            raise Refused(problem(400, "two-keys"))
        line = ", ".join(lines).strip()
        if self.has("empty-key-passes", "empty-key-shared") and not line:
            return "empty" if self.has("empty-key-shared") else None
        if self.has("malformed-is-500") and line.count('"') == 1:
            raise Refused(Reply(500, b"Traceback"))
        if self.has("opaque-keys"):
            key = line
        elif line.startswith('"'):
            key, _, rest = line[1:].partition('"')
            if not line[1:].endswith('"') and not rest.startswith(";"):
                raise Refused(problem(400, "malformed"))
        else:
            key = line
        key = key[: SHORT_KEY if self.has("key-cut-short") else MAX_KEY if self.has("key-cut") else None]
        if not key or len(key) > MAX_KEY or not key.isascii() or not key.isprintable():
            raise Refused(problem(400, "key-invalid"))
        return key.lower() if self.has("lower-cased-key") else key

    def ignores(self, lines: list[str]) -> bool:
        line = ", ".join(lines)
        return (
            (self.has("two-keys-are-none") and len(lines) > 1)
            or (self.has("malformed-is-none") and line.count('"') == 1)
            or len(line) > IGNORED_PAST.get(self.bug, len(line))
        )

    def account_of(self, asked: Asked, key: str | None) -> str:
        account = asked.one("x-account")
        if self.has("guard-before-login"):
            known = [name for name in self.records if isinstance(name, tuple) and name[1] == key]
            return "all" if known or account else self.refuse_login()
        if account is None:
            return self.refuse_login()
        return "all" if self.has("scope-ignored") else account

    def refuse_login(self) -> str:
        raise Refused(problem(401, "login"))

    def fingerprint_of(self, asked: Asked) -> bytes:
        body = asked.body
        if self.has("fingerprint-of-the-beginning"):
            body = body[:1024]
        if self.has("numbers-are-doubles"):
            body = json.dumps(json.loads(body, parse_int=float)).encode()
        parts = [asked.method, asked.path, asked.query]
        if self.has("query-ignored"):
            parts = [asked.method, asked.path]
        if self.has("path-ignored", "method-ignored"):
            parts = []
        if self.has("user-agent-counts"):
            parts.append(asked.one("user-agent") or "")
        return hashlib.sha256("\n".join(parts).encode() + body).digest()

    def looked_at(self, asked: Asked) -> dict[str, Any]:
        if asked.path != "/payments":
            raise Refused(Reply(404))
        try:
            content = json.loads(asked.body)
            assert isinstance(content["amount"], int)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise Refused(problem(400, "invalid")) from None
        return dict(content)

    async def handled(self, asked: Asked) -> Reply:
        try:
            content = self.looked_at(asked)
        except Refused as refused:
            return refused.reply
        # A client that hangs up in the middle is to be gone before the end, on a machine that is busy, too.
        await asyncio.sleep(HANDLER_SECONDS * (5 if self.has("gives-up-with-the-client") else 1))
        self.take(content["amount"])
        if content["amount"] == 666:
            return Reply(500, f"failed {len(self.payments)}".encode())
        number = len(self.payments)
        if self.has("late-effects", "late-no-lock"):
            number = next(self.numbers)
        told = {"id": f"pay_{number}", "amount": content["amount"]}
        if self.has("deterministic"):
            told, number = {"status": "ok"}, 0
        headers = [
            ("content-type", "application/json"),
            ("location", f"/payments/{number}"),
            ("set-cookie", f"session={number}"),
        ]
        return Reply(201, json.dumps(told).encode(), headers)

    def stored(self, reply: Reply) -> Reply:
        headers = [(name, value) for name, value in reply.headers if name != "set-cookie"]
        status, content = reply.status, reply.content
        if self.has("cookies-replayed"):
            headers = reply.headers
        if self.has("headers-lost"):
            headers = []
        if self.has("date-replayed"):
            headers = [*headers, ("date", formatdate(usegmt=True))]
        if self.has("replay-is-200"):
            status = 200
        if self.has("json-only-replay"):
            content = json.dumps(json.loads(content), separators=(",", ":")).encode()
        return Reply(status, content, headers)


class Planted:
    """All shops, as one ASGI app."""

    def __init__(self) -> None:
        self.shops: dict[str, Shop] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        bug, _, path = scope["path"][1:].partition("/")
        shop = self.shops.setdefault(bug, Shop(bug))
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        asked = Asked(scope["method"], f"/{path}", scope["query_string"].decode(), headers, b"")
        if shop.has("claims-before-body") and asked.method == "POST" and (key := shop.key_of(asked)):
            name = (asked.one("x-account"), key)
            if name in shop.begun and name not in shop.records:
                await _send(send, problem(409, "in-progress"))
                return
            shop.begun.add(name)
        asked.body = await _body(receive)
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            reply = await shop.serve(asked, gone.done)
        finally:
            gone.cancel()
        await _send(send, reply)


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError  # The server says nothing of it.
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, reply: Reply) -> None:
    headers = [*reply.headers, ("content-length", str(len(reply.content)))]
    if not any(name == "date" for name, _ in headers):
        headers.append(("date", formatdate(usegmt=True)))
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": encoded})
    await send({"type": "http.response.body", "body": reply.content})


@contextmanager
def served(app: Any, *, dates: bool = True) -> Iterator[str]:
    """Serve *app* from a thread, and yield its URL. An app may make its *dates* itself."""
    settings = uvicorn.Config(app, port=0, log_level="critical", lifespan="auto", date_header=dates, backlog=128)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()

"""A guarded payment API on loopback, in threads, over a network that does what a test says: it loses requests and
answers, cuts them short, hangs, or says something else. The guard is the real one, on SQLite.
"""

from __future__ import annotations

import io
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import semel
from semel import Policy, stores
from semel.wsgi import IdempotencyMiddleware

HANG_SECONDS = 60
DRIP_SECONDS = 0.02
EVENT_SECONDS = 0.4


@dataclass(frozen=True)
class Seen:
    """A request as it came over the wire."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        found = [said for each, said in self.headers if each.lower() == name.lower()]
        assert len(found) < 2
        return found[0] if found else None

    @property
    def key(self) -> str | None:
        return self.header("idempotency-key")


@dataclass(frozen=True)
class Say:
    """An answer that no application gave."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


#: What the network does to one request: "lose before" it is handled or "after", "cut" its answer, "garbage", "hang",
#: "drip" an answer that never ends, send "events" with a pause before the last, or say something else; None: nothing.
Fault = str | Say | None


class Served:
    """The server. ``faults`` are for the next requests, in order."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.seen: list[Seen] = []
        self.faults: deque[Fault] = deque()
        #: For every request, until it is None again.
        self.outage: Fault = None
        #: How often each body had an effect.
        self.effects: Counter[bytes] = Counter()
        self.is_over = threading.Event()
        #: Handlers wait for it.
        self.go = threading.Event()
        self.go.set()
        given = {"lease": timedelta(seconds=2), **policy}
        is_accepting = given.get("in_progress") == "accept"
        # Its workers are threads that end with this process: they must not miss a file.
        self._store = stores.store("memory://" if is_accepting else f"sqlite:///{folder / 'served.db'}")
        self._app = IdempotencyMiddleware(
            self._pay,
            store=self._store,
            scope=semel.SINGLE_TENANT,
            policy=Policy.ietf(**given),
            work=is_accepting,
        )
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(self, *given))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _pay(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        self.effects[body] += 1
        self.go.wait(HANG_SECONDS)
        answer = json.dumps({"paid": self.effects.total()}).encode()
        start("201 Created", [("Content-Type", "application/json"), ("Set-Cookie", "session=hush")])
        return [answer]

    def handle(self, seen: Seen) -> Say:
        """Run the application."""
        began: list[Any] = []
        environ: dict[str, Any] = {
            "REQUEST_METHOD": seen.method,
            "PATH_INFO": seen.path.partition("?")[0],
            "QUERY_STRING": seen.path.partition("?")[2],
            "CONTENT_LENGTH": str(len(seen.body)),
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": str(self.port),
            "wsgi.input": io.BytesIO(seen.body),
            "wsgi.url_scheme": "http",
        }
        for name, said in seen.headers:
            variable = name.upper().replace("-", "_")
            environ[variable if variable == "CONTENT_TYPE" else f"HTTP_{variable}"] = said
        chunks: Any = self._app(environ, lambda status, fields, _=None: began.extend([status, fields]))  # type: ignore[arg-type]
        try:
            body = b"".join(chunks)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()
        return Say(int(began[0].split()[0]), dict(began[1]), body)

    @property
    def keys(self) -> list[str | None]:
        return [each.key for each in self.seen]

    def close(self) -> None:
        self.is_over.set()
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self._app.drain()
        if self._app.workers is not None:
            self._app.workers.stop()
        self._store.close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def __init__(self, served: Served, *given: Any) -> None:
        self._served = served
        super().__init__(*given)

    def _serve(self) -> None:
        body = self._body()
        if body is None:  # The client has died in the middle of it, and no server takes half a request for one.
            self.close_connection = True
        else:
            self._answer(Seen(self.command, self.path, tuple(self.headers.items()), body))

    def _answer(self, seen: Seen) -> None:
        served = self._served
        served.seen.append(seen)
        fault = served.outage or (served.faults.popleft() if served.faults else None)
        if fault == "lose before":
            self.close_connection = True
            return
        if fault == "garbage":
            self.wfile.write(b"no HTTP at all\r\n\r\n")
            self.close_connection = True
            return
        if fault == "hang":
            served.is_over.wait(HANG_SECONDS)
            self.close_connection = True
            return
        if isinstance(fault, str) and fault in {"drip", "events"}:
            self._stream(fault)
            return
        said = fault if isinstance(fault, Say) else served.handle(seen)
        if fault == "lose after":
            self.close_connection = True
            return
        self.send_response(said.status)
        for name, value in said.headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(said.body[:3])
            self.close_connection = True
            return
        self.wfile.write(said.body)

    def _stream(self, fault: str) -> None:
        """Answer bit by bit."""
        self.close_connection = True
        is_over = self._served.is_over
        with suppress(OSError):  # The client has gone.
            if fault == "events":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
                is_over.wait(EVENT_SECONDS)
                self.wfile.write(b"data: 2\n\n")
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not is_over.wait(DRIP_SECONDS):
                self.wfile.write(b".")

    do_GET = do_POST = do_PATCH = do_PUT = _serve  # noqa: N815 - as http.server calls them

    def _body(self) -> bytes | None:
        if self.headers.get("transfer-encoding") != "chunked":
            length = int(self.headers.get("content-length") or 0)
            whole = self.rfile.read(length)
            return whole if len(whole) == length else None
        read = b""
        while size := int(self.rfile.readline(), 16):
            read += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return read

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path, **policy: Any) -> Iterator[Served]:
    server = Served(folder, **policy)
    try:
        yield server
    finally:
        server.close()


Serve = Callable[..., Served]

"""The proxy, the server behind it, or both, killed while many pay through them; run as a program, it is that server.

A payment may end as *outcome unknown*: a proxy can't know what a dead server did. It must never be made twice.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from tests.kit.servers import free_port
from torture.checker import Effect, Event, check
from torture.provider import ROOT
from torture.scenario import Outcome, Plan, Worlds

LOOPBACK = "127.0.0.1"
#: What dies, by turns.
TARGETS: tuple[tuple[str, ...], ...] = (("proxy",), ("upstream",), ("proxy", "upstream"))
CLIENTS = 6
#: So many payments end between two kills, and the next comes at a random moment after.
PAYMENTS = 8
MAX_SECONDS_MORE = 0.05
#: The work takes this long, so that a kill is likely to come in the middle of it.
WORK_SECONDS = 0.02
LEASE = "1s"
RETRY_SECONDS = 0.05
#: Every so-many-th client loses its answer, and asks again.
FORGETFUL = 3
PATIENCE_SECONDS = 120.0
BODY = json.dumps({"amount": 100})


class KilledProxies:
    """Proxy and upstream are killed under load."""

    name = "proxy, upstream or both killed"
    minimum = 30

    def __init__(self, rules: str = "") -> None:
        """Have *rules* in the table [policy], beside those of this scenario."""
        self._rules = rules

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - the keys are in a file
        """Kill one of them, or both, and start it again, while clients pay."""
        times, chance = plan.share(self.minimum), plan.chance(self.name)
        parts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(prefix="semel-torture-") as folder, ExitStack() as stack:
            pair = Pair(Path(folder), self._rules)
            stack.callback(pair.close)
            crowd = stack.enter_context(Crowd(pair.ports["proxy"]))
            for targets in itertools.islice(itertools.cycle(TARGETS), times):
                crowd.wait_for(PAYMENTS)
                time.sleep(chance.uniform(0, MAX_SECONDS_MORE))  # Where it strikes is what is drawn here.
                pair.kill(targets)
                parts[" and ".join(targets)] += crowd.is_under_way
                pair.start(targets)
            crowd.wait_for(PAYMENTS)
            crowd.stop()
            verdict = check(pair.effects(), (), crowd.events, ("replay", "crash"))
        plan.tell(f"  {self.name}: {dict(parts)} with requests under way")
        return Outcome(parts.total(), verdict.violations, verdict.seen, parts)


class Pair:
    """A proxy and its upstream, each a process that can be killed and started again at the same address."""

    def __init__(self, folder: Path, rules: str) -> None:
        """Start both."""
        self._folder = folder
        self.ports = {"proxy": free_port(), "upstream": free_port()}
        (folder / "semel.toml").write_text(f'[policy]\nlease = "{LEASE}"\n{rules}\n')
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.start(("proxy", "upstream"))

    def start(self, names: tuple[str, ...]) -> None:
        """Start those of these *names*, and wait until they listen."""
        for name in names:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *self._command(name)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        for name in names:
            _until(f"{name} listens", lambda port=self.ports[name]: _listens(port))  # type: ignore[misc]

    def kill(self, names: tuple[str, ...]) -> None:
        """Kill those of these *names*."""
        for name in names:
            self._running[name].kill()
        for name in names:
            self._running[name].wait()

    def effects(self) -> list[Effect]:
        """Read what the upstream has done."""
        lines = (self._folder / "effects").read_text().splitlines()
        return [Effect(key, "paid", int(attempt), pid) for key, attempt, pid in map(str.split, lines)]

    def close(self) -> None:
        """Kill both."""
        self.kill(tuple(self._running))

    def _command(self, name: str) -> list[str]:
        if name == "upstream":
            return ["torture.forwarded", str(self.ports["upstream"]), str(self._folder / "effects")]
        return [
            *("semel", "proxy", "--scope", "header:X-User", "--config", str(self._folder / "semel.toml")),
            *("--listen", f"{LOOPBACK}:{self.ports['proxy']}", "--store", f"sqlite:///{self._folder}/keys.db"),
            *("--upstream", f"http://{LOOPBACK}:{self.ports['upstream']}"),
        ]


@dataclass
class Crowd:
    """Clients that pay until they are told to stop, each with one payment at a time, until that has ended."""

    port: int
    events: list[Event] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _waiting: Counter[str] = field(default_factory=Counter)
    _is_stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._pay, daemon=True) for _ in range(CLIENTS)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin no new payment, and wait until those under way have ended."""
        self._is_stopping.set()
        for each in self._threads:
            each.join(PATIENCE_SECONDS)

    @property
    def is_under_way(self) -> bool:
        """Whether a request was sent that has no answer yet, or got none."""
        return any(self._waiting.values()) or any(event.what == "error" for event in self.events[-CLIENTS:])

    def wait_for(self, number: int) -> None:
        """Wait until *number* more payments have ended."""
        wanted = self._ended() + number
        _until("payments end", lambda: self._ended() >= wanted)

    def _ended(self) -> int:
        return sum(event.is_success or event.is_unknown for event in [*self.events])

    def _pay(self) -> None:
        while not self._is_stopping.is_set():
            number = next(self._numbers)
            key = f"forwarded-{number:06d}"
            ends = time.monotonic() + PATIENCE_SECONDS
            while not self._ask(key) and time.monotonic() < ends:
                time.sleep(RETRY_SECONDS)
            if number % FORGETFUL == 0:
                self._ask(key)

    def _ask(self, key: str) -> bool:
        """Send the payment once; return whether its client may stop."""
        self.events.append(Event("sent", key, "guard"))
        self._waiting[key] += 1
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", "/pay", BODY, {"Idempotency-Key": key, "X-User": "bob"})
            response = connection.getresponse()
            body = response.read().decode()
        except (OSError, http.client.HTTPException):
            self.events.append(Event("error", key, "guard"))
            return False
        finally:
            connection.close()
            self._waiting[key] -= 1
        is_replay = response.getheader("Idempotent-Replayed") == "true"
        event = Event("answer", key, "guard", response.status, body, is_replay)
        self.events.append(event)
        return event.is_success or event.is_unknown


def _until(what: str, is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > ends:
            raise AssertionError(f"It never happened: {what}.")
        time.sleep(RETRY_SECONDS)


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


class _Upstream(BaseHTTPRequestHandler):
    """Writes a payment down, works on for a moment, and answers. It knows nothing of keys but their name."""

    protocol_version = "HTTP/1.1"
    effects: int

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        key, attempt = self.headers["Idempotency-Key"], self.headers["Semel-Attempt"]
        os.write(self.effects, f"{key} {attempt} {os.getpid()}\n".encode())
        time.sleep(WORK_SECONDS)
        body = json.dumps({"attempt": int(attempt), "worker": os.getpid()}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Be the upstream: listen on a port, and write effects to a file."""
    port, file = int(sys.argv[1]), sys.argv[2]
    _Upstream.effects = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    ThreadingHTTPServer((LOOPBACK, port), _Upstream).serve_forever()


if __name__ == "__main__":
    main()

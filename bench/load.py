"""The load on a server and its result, as values, and what sends it: ``wrk`` if it is installed, else ``client``."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"

BODY = (
    b'{"customer":"cus_9aK2mQ7x","item":"Espresso machine, steel","quantity":1,"amount":24900,"currency":"EUR",'
    b'"reference":"2026-11-INV-004217","ship_to":{"city":"Lisbon","postcode":"1100-053"}}'
)
_BEFORE_KEY = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: semel-bench\r\nAccept: application/json\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\nIdempotency-Key: "
)
#: A request without its key, which goes between the two.
BEFORE_KEY = _BEFORE_KEY % (b"/orders", len(BODY))
AFTER_KEY = b"\r\n\r\n" + BODY
#: The same for the handler that does not answer before it is told to.
BEFORE_HELD_KEY = _BEFORE_KEY % (b"/held", len(BODY))

#: Hexadecimal digits: as random as the UUIDs that clients send, so that the index is used as in production.
KEY_DIGITS = 32

#: The longest load, 100,000 keys to a slow server, takes a minute or two. One that takes this long is stuck.
MAX_SECONDS = 900


class LoadFailed(RuntimeError):
    """The server gave wrong answers, or the load did not run. There is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send, each connection one at a time, for *seconds* or until there were *requests* of them."""

    port: int
    connections: int
    seconds: float | None = None
    requests: int | None = None
    #: A file of keys to go round, one a line. Without one, every request has a new key.
    keys: str | None = None
    #: How many to send a second, however long the answers take. Without it, a connection sends when it is answered.
    per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a load."""

    requests: int
    seconds: float
    #: Answers other than 201, and connections that broke.
    faults: int
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        """The throughput."""
        return self.requests / self.seconds


Sender = Callable[[Load], Outcome]


def send(load: Load) -> Outcome:
    """Send *load* from our own client, in a process of its own."""
    client = "bench.client" if load.per_second is None else "bench.pace"
    return outcome_of([sys.executable, "-m", client, json.dumps(dataclasses.asdict(load))])


def outcome_of(command: list[str]) -> Outcome:
    """Run a load generator, and read the outcome off the last line that it prints."""
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    if ended.returncode:
        raise LoadFailed(ended.stdout)
    outcome = Outcome(**json.loads(ended.stdout.splitlines()[-1]))
    if outcome.faults or not outcome.requests:
        raise LoadFailed(f"{outcome.faults} of {outcome.requests} answers were wrong:\n{ended.stdout}")
    return outcome

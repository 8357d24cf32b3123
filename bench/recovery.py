"""How long the client of a dead worker waits: from kill -9 during the handler to the answer of a retry."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from bench.cases import Plan
from bench.client import Connection
from bench.databases import Databases
from bench.load import BEFORE_HELD_KEY, KEY_DIGITS, LoadFailed
from bench.report import Recovery
from bench.setup import Setup
from bench.web import WebServer

#: A client that asks again this soon. One that obeys Retry-After, which has whole seconds only, waits for up to one
#: second more.
RETRY_SECONDS = 0.1
#: After so many leases, no worker will take over any more.
PATIENCE_LEASES = 5
CONFLICT = b"HTTP/1.1 409 "


def measure_recovery(plan: Plan, bases: Databases) -> tuple[Recovery, ...]:
    """Kill workers: where the store is asked who is alive, and where only the lease says so."""
    place = bases.new("PostgreSQL")
    instant = replace(place, url=f"{place.url}{'&' if '?' in place.url else '?'}takeover=instant")
    return (
        _recover(plan, Setup(instant, lease_seconds=plan.lease_seconds), is_instant=True),
        _recover(plan, Setup(place, lease_seconds=plan.short_lease_seconds), is_instant=False),
    )


def _recover(plan: Plan, setup: Setup, *, is_instant: bool) -> Recovery:
    if setup.lease_seconds is None:
        raise AssertionError
    with WebServer(setup) as other:
        _pay(other)
        took = tuple(_kill_one(setup, other) for _ in range(plan.recoveries))
    return Recovery(is_instant=is_instant, lease_seconds=setup.lease_seconds, seconds=took)


def _kill_one(setup: Setup, other: WebServer) -> float:
    """Kill a server in its handler; return after how many seconds the *other* has answered the same request."""
    key = secrets.token_hex(KEY_DIGITS // 2).encode()
    with WebServer(replace(setup, holds=True)) as doomed:
        connection = Connection(doomed.port)
        connection.ask(key, BEFORE_HELD_KEY)
        doomed.until("its handler runs", lambda facts: facts.ran == 1)
        began = time.perf_counter()
        doomed.kill()
        connection.close()
        ends = began + PATIENCE_LEASES * (setup.lease_seconds or 0)
        retries = Connection(other.port)
        while True:
            retries.ask(key, BEFORE_HELD_KEY)
            answer = retries.wait()
            if not answer.startswith(CONFLICT):
                break
            if time.perf_counter() > ends:
                raise LoadFailed("No worker has taken over from a dead worker.")
            time.sleep(RETRY_SECONDS)
        seconds = time.perf_counter() - began
        if not retries.is_right:
            raise LoadFailed(f"A retry was answered with {answer!r}.")
        retries.close()
    return seconds


def _pay(server: WebServer) -> None:
    """Open connections and prepare statements before counting begins."""
    connection = Connection(server.port)
    connection.ask(secrets.token_hex(KEY_DIGITS // 2).encode())
    answer = connection.wait()
    connection.close()
    if not connection.is_right:
        raise LoadFailed(f"A first request was answered with {answer!r}.")

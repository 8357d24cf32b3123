"""What it costs that very many requests wait for one key: statements, and the time of requests with other keys. No
other case is measured here.
"""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor

from bench import load
from bench.cases import Plan
from bench.client import Connection
from bench.databases import Databases
from bench.load import BEFORE_HELD_KEY, KEY_DIGITS, Load, LoadFailed
from bench.report import Waiting
from bench.setup import Place, Setup
from bench.web import WebServer

#: Enough that a server which is busy for a while keeps none of the requests beside it from being sent.
CONNECTIONS = 64
#: So long that it is not renewed meanwhile: what is counted are those who wait.
LEASE_SECONDS = 3600.0
#: How often PostgreSQL's count is looked at, and how many steps of it make a rate.
LOOK_SECONDS = 0.05
ENOUGH_STEPS = 3


class Crowd:
    """A request with a handler that does not end, and duplicates of it that wait."""

    def __init__(self, server: WebServer) -> None:
        """Send the first, and see it run."""
        self._server = server
        self._key = secrets.token_hex(KEY_DIGITS // 2).encode()
        self._ran = server.facts().ran + 1
        self._connections = [self._send()]
        server.until("the first of them runs", lambda facts: facts.ran == self._ran)

    def gather(self, number: int) -> None:
        """Send *number* duplicates, and see them wait."""
        self._connections += [self._send() for _ in range(number)]
        self._server.until(f"{number} wait", lambda facts: facts.waiting == number)

    def end(self) -> float:
        """Let the first end; return how many seconds later the last has its answer."""
        began = time.perf_counter()
        self._server.release()
        answers = {connection.wait().partition(b"\r\n\r\n")[2] for connection in self._connections}
        seconds = time.perf_counter() - began
        if len(answers) > 1 or not all(connection.is_right for connection in self._connections):
            raise LoadFailed(f"{len(answers)} different answers to one key: {sorted(answers)[:3]}")
        for connection in self._connections:
            connection.close()
        return seconds

    def _send(self) -> Connection:
        connection = Connection(self._server.port)
        connection.ask(self._key, BEFORE_HELD_KEY)
        return connection


def measure_waiting(plan: Plan, bases: Databases) -> Waiting:
    """Let duplicates wait, several times over, and look at the statements; then at what others see of it."""
    per_second = _statements(plan, bases)
    before: list[float] = []
    meanwhile: list[float] = []
    ending: list[float] = []
    answered: list[float] = []
    with WebServer(_setup(plan, bases.new("PostgreSQL"))) as server:
        beside = Load(server.port, CONNECTIONS, plan.waiting_seconds, per_second=plan.beside_per_second)
        load.send(Load(server.port, CONNECTIONS, requests=plan.warm_up_requests))
        for _ in range(plan.waiting_rounds):
            # The same server, moments before, without waiting requests.
            before.append(load.send(beside).p99_ms)
            crowd = Crowd(server)
            crowd.gather(plan.waiters)
            meanwhile.append(load.send(beside).p99_ms)
            late_ms, seconds = _end_beside(server, beside, crowd)
            ending.append(late_ms)
            answered.append(seconds)
    return Waiting(
        waiters=plan.waiters,
        per_second=per_second,
        before_ms=tuple(before),
        meanwhile_ms=tuple(meanwhile),
        ending_ms=tuple(ending),
        answered_seconds=tuple(answered),
    )


def _setup(plan: Plan, place: Place) -> Setup:
    return Setup(place, waiters=plan.waiters, lease_seconds=LEASE_SECONDS, holds=True)


def _statements(plan: Plan, bases: Databases) -> tuple[float, ...]:
    """Count the statements per second of waiting requests, on a separate server: nothing else is counted."""
    place = bases.new("PostgreSQL")
    counted = []
    with WebServer(_setup(plan, place)) as server:
        for _ in range(plan.waiting_rounds):
            crowd = Crowd(server)
            crowd.gather(plan.waiters)
            time.sleep(plan.settling_seconds)
            counted.append(_rate(plan, bases, place.url))
            crowd.end()
    return tuple(counted)


def _rate(plan: Plan, bases: Databases, url: str) -> float:
    """Watch PostgreSQL's own count of statements go up: from its first step that we see to the last."""
    steps: list[tuple[float, int]] = []
    count = bases.transactions(url)
    ends = time.perf_counter() + plan.waiting_seconds
    while (now := time.perf_counter()) < ends:
        if (latest := bases.transactions(url)) != count:
            count = latest
            steps.append((now, count))
        time.sleep(LOOK_SECONDS)
    if len(steps) < ENOUGH_STEPS:
        return len(steps) / plan.waiting_seconds
    (first_at, first), (last_at, last) = steps[0], steps[-1]
    return (last - first) / (last_at - first_at)


def _end_beside(server: WebServer, beside: Load, crowd: Crowd) -> tuple[float, float]:
    """Let the first end while others are served; return their p99, and how long it took to answer all who waited."""
    ran = server.facts().ran
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(load.send, beside)
        server.until("others are served beside them", lambda facts: facts.ran > ran)
        seconds = crowd.end()
        return sending.result().p99_ms, seconds

"""A Redis in front of PostgreSQL falls in two: an old and a new master both believe to be it, and both have clients.

The old master is stopped (SIGSTOP) until the sentinels have made another the master. Then it goes on (SIGCONT), and
refuses to become a replica. Earlier clients use either; then new clients connect to the old one, and others ask the
sentinels, and all pay with the same keys. Whatever a cache answers, no payment may be made twice.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from tests.kit import servers
from tests.kit.servers.resp import ask, ask_facts
from torture.clients import Crowd, Order
from torture.job import Entry
from torture.restarts import FORMS, PATIENCE_SECONDS, PAYMENTS, wait_for_payments
from torture.scenario import Outcome, Plan, World, Worlds

#: Clients that run all the time: the entry point, and the first key. Later clients use the keys of the
#: first of them.
CROWDS: tuple[tuple[Entry, int], ...] = (("wsgi", 0), ("asgi", 100_000))
#: How many of the latest payments the later clients send again, before they make new ones.
OVERLAP = 60
LEASE_SECONDS = 2.0
#: The command by which sentinels make a server a replica.
TO_FOLLOW = ("replicaof", "slaveof")
POLL_SECONDS = 0.05


class SplitBrain:
    """Redis, which has finished answers, is split in two, under load."""

    name = "Sentinel split brain, tiered"
    minimum = 10

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Split it while workers at both entry points serve payments of all forms."""
        with servers.redis_sentinel() as watched, worlds.postgres() as world:
            answered: Counter[str] = Counter()
            reached = 0
            with ExitStack() as stack:
                for entry, first in CROWDS:
                    stack.enter_context(Crowd(_order(world, watched.url, entry, first)))
                while reached < plan.share(self.minimum):
                    # The old master is a replica of the new one by then, and its own writes are lost.
                    watched.until_whole()
                    wait_for_payments(world, PAYMENTS)
                    reached += split(world, watched, answered)
                    plan.tell(f"  {self.name}: {reached} splits so far")
            plan.tell(f"  {self.name}: {reached} splits; answers from {dict(answered)}")
            outcome = world.outcome(reached, ("replay",))
            # These requests were told to wait for the lease of an earlier one: no worker was stopped here.
            del outcome.seen["fenced zombie"]
            return outcome + Outcome(0, seen=answered)


def split(world: World, watched: servers.RedisSentinel, answered: Counter[str]) -> bool:
    """Split it once. It counts if both were masters to the end, and both have given answers that they had."""
    old = watched.master()
    os.kill(old.pid, signal.SIGSTOP)
    try:
        _until("another master", lambda: watched.master() is not old and _is_master(watched.master()))
        new = watched.master()
    finally:
        os.kill(old.pid, signal.SIGCONT)
    ask(old.port, "ACL", "SETUSER", "default", *(f"-{command}" for command in TO_FOLLOW))
    before = {node: _hits(node) for node in (old, new)}
    first = max(0, _latest(world) - OVERLAP)
    with Crowd(_order(world, old.url, "asgi", first)), Crowd(_order(world, watched.url, "wsgi", first)):
        _until("answers from both", lambda: all(_hits(node) > before[node] for node in before))
        wait_for_payments(world, PAYMENTS)
    is_reached = _is_master(old) and _is_master(new)
    answered["answer of the old master"] += _hits(old) - before[old]
    answered["answer of the new master"] += _hits(new) - before[new]
    ask(old.port, "ACL", "SETUSER", "default", *(f"+{command}" for command in TO_FOLLOW))
    return is_reached


def _order(world: World, cache: str, entry: Entry, first: int) -> Order:
    return Order(world.job(cache=cache, lease_seconds=LEASE_SECONDS, entry=entry), FORMS, first)


def _latest(world: World) -> int:
    """Return the number of the latest key of the first crowd."""
    numbers = (int(event.key.rpartition("-")[2]) for event in world.history.read() if event.what == "sent")
    return max((number for number in numbers if number < CROWDS[1][1]), default=0)


def _is_master(node: servers.RedisServer) -> bool:
    role = ask(node.port, "ROLE")
    return isinstance(role, list) and role[0] == "master"


def _hits(node: servers.RedisServer) -> int:
    return int(ask_facts(node.port, "INFO", "stats")["keyspace_hits"])


def _until(what: str, is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > ends:
            raise AssertionError(f"Not within {PATIENCE_SECONDS:.0f} s: {what}.")
        time.sleep(POLL_SECONDS)

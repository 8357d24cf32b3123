"""PostgreSQL, or Redis, stopped in an instant and started again, while many pay. What it had acknowledged must still be
there.

PostgreSQL's stop (``immediate``) ends every connection and writes nothing: the next start recovers from the log. Redis
is killed, with a log that is written before each acknowledgement; its weaker settings promise less, and are not tested.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.kit import servers
from torture.clients import Crowd, Order
from torture.job import Entry, Job
from torture.scenario import Outcome, Plan, Scenario, World, Worlds, _world
from torture.witness import Database

ENTRIES: tuple[Entry, ...] = ("wsgi", "asgi")
FORMS = ("guard", "atomic", "steps")

#: A separate server: no server of other tests is stopped.
SETTINGS = {"fsync": "on"}
#: A Redis that has what it acknowledged on its disk.
APPENDING = {"appendonly": "yes", "appendfsync": "always"}
#: What a store without transactions can do.
REDIS_FORMS = ("guard", "effect")
#: No worker dies here, so an answer that could not be stored waits, and no policy has to decide about a crash.
LEASE_SECONDS = 2.0
#: Every so-many-th time, the server stays away for longer than the leases.
LONG_EVERY = 3
LONG_SECONDS = 1.5 * LEASE_SECONDS
#: So many payments are made between two restarts, and the next comes at a random moment after.
PAYMENTS = 20
MAX_SECONDS_MORE = 0.1
#: A run that makes no progress for as long is broken.
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.02


class Restarts:
    """The server is stopped with ``immediate`` and started again, under load."""

    name = "PostgreSQL restarted at once"
    minimum = 10

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:  # noqa: ARG002 - a server that others use stays up
        """Restart a server while workers at both entry points serve payments of all forms."""
        with servers.postgres(settings=SETTINGS) as server, _world(server.url, server.url) as world:
            reached = restart(world, server, plan.share(self.minimum), plan.chance(self.name))
            return _judged(self, world, plan, reached)


class RedisRestarts:
    """Redis, which has the keys, is killed and started again, under load."""

    name = "Redis killed and restarted"
    minimum = 30

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill it while workers at both entry points serve payments; their effects are in a database that stays up."""
        with servers.redis(settings=APPENDING) as server, worlds.postgres() as world:
            job = world.job(store=server.url, lease_seconds=LEASE_SECONDS, on_crash="rerun")
            orders = _orders(job, REDIS_FORMS)
            times, chance = plan.share(self.minimum), plan.chance(self.name)
            reached = strike(world, orders, (server.kill, server.start), times, chance)
            if any(world.database.states()):
                raise AssertionError("The keys were to be in Redis.")
            return _judged(self, world, plan, reached)


def restart(world: World, server: servers.PostgresServer, times: int, chance: Random) -> int:
    """Restart PostgreSQL under load; return how often requests were under way when it was stopped."""
    with tempfile.TemporaryDirectory(prefix="semel-torture-") as folder:
        # A plain handler fails by itself when its own database is down. That is not what is tested here.
        elsewhere = Database(f"sqlite:///{Path(folder)}/guard.db")
        elsewhere.make()
        job = world.job(lease_seconds=LEASE_SECONDS, on_crash="rerun")
        orders = _orders(job, FORMS, elsewhere.url)
        reached = strike(world, orders, (lambda: server.stop("immediate"), server.start), times, chance)
        world.database.close()  # Its connection was to a server that is gone.
        for effect in elsewhere.effects():
            row = effect.key, effect.step, effect.attempt, effect.worker
            world.database.execute("INSERT INTO effects (key, step, attempt, worker) VALUES (%s, %s, %s, %s)", row)
    return reached


def strike(
    world: World,
    orders: Iterable[Order],
    stop_and_start: tuple[Callable[[], None], Callable[[], None]],
    times: int,
    chance: Random,
) -> int:
    """Stop and start a server while *orders* are carried out; return how often requests were under way."""
    stop, start = stop_and_start
    reached, strikes = 0, itertools.count()
    with ExitStack() as stack:
        for order in orders:
            stack.enter_context(Crowd(order))
        while reached < times:
            wait_for_payments(world, PAYMENTS)
            time.sleep(chance.uniform(0, MAX_SECONDS_MORE))  # Where it strikes is what is drawn here.
            stop()
            reached += is_under_way(world)
            if next(strikes) % LONG_EVERY == 0:
                time.sleep(LONG_SECONDS)
            start()
        wait_for_payments(world, PAYMENTS)
    return reached


def is_under_way(world: World) -> bool:
    """Whether a request was sent that has no answer yet."""
    waiting: dict[str, int] = {}
    for event in world.history.read():
        if event.what in {"sent", "answer"}:
            waiting[event.key] = waiting.get(event.key, 0) + (1 if event.what == "sent" else -1)
    return any(waiting.values())


def wait_for_payments(world: World, number: int) -> None:
    """Wait until *number* more payments are made."""
    wanted = _made(world) + number
    ends = time.monotonic() + PATIENCE_SECONDS
    while _made(world) < wanted:
        if time.monotonic() > ends:
            raise AssertionError("No client pays any more.")
        time.sleep(POLL_SECONDS)


def _made(world: World) -> int:
    return sum(event.is_success for event in world.history.read())


def _orders(job: Job, forms: tuple[str, ...], elsewhere: str = "") -> list[Order]:
    return [
        Order(replace(job, entry=entry), forms, number * 100_000, elsewhere=elsewhere)
        for number, entry in enumerate(ENTRIES)
    ]


def _judged(scenario: Scenario, world: World, plan: Plan, reached: int) -> Outcome:
    plan.tell(f"  {scenario.name}: {reached} restarts with requests under way")
    outcome = world.outcome(reached, ("replay",))
    # These requests were told to wait for the lease of an earlier one: no worker was stopped here.
    del outcome.seen["fenced zombie"]
    return outcome

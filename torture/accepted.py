"""Workers that run what was accepted, killed in the middle of it: at a line, at a point of the handler, at any moment.

Its client has had a 202 and has gone: no client retries. An accepted operation must still end, each step done once.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torture.checker import Sight
from torture.job import Entry, Fault
from torture.lines import AT_ONCE, ENTRIES, STORES
from torture.scenario import Outcome, Payment, Plan, World, Worlds

#: A sample of the lines of a worker: its steps are the same as those of any other.
STRIDE = 60
#: What it passes. At the last of them, the answer is all that is missing.
POINTS = (
    *("entered", "ride written", "ride committed", "charged", "charge kept"),
    *("receipt written", "answering"),
)
#: So many are accepted at a time and their workers killed, one after another, at a moment within so many seconds.
BATCH = 10
BATCHES = 3
WORKERS = 3
MAX_SECONDS = 0.8


class Accepted:
    """kill -9 of workers that run what was accepted, by both entry points, on both stores."""

    name = "worker kill -9, accepted"
    minimum = 50

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Accept, kill, recover and judge, a world for each store and entry point."""
        places = list(itertools.product(STORES, ENTRIES))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(lambda place: self._run(worlds, plan, *place), places), Outcome(0))

    def _run(self, worlds: Worlds, plan: Plan, store: str, entry: Entry) -> Outcome:
        where = f"({store}, {entry})"
        settings = {"entry": entry, "accepts": True}
        with worlds.of(store) as world:
            reached = Counter(
                {
                    f"202 {where}": _die_having_accepted(world, settings),
                    f"line {where}": _die_at_lines(world, plan, settings),
                    f"point {where}": _die_at_points(world, plan, settings, where),
                    f"moment {where}": _die_at_moments(world, plan, settings, where),
                }
            )
            plan.tell(f"  {self.name}: {', '.join(f'{part}: {number}' for part, number in reached.items())}")
            # A shortened run may kill workers only where they had not begun, or had ended.
            wanted: tuple[Sight, ...] = ("accepted", "crash", "replay")
            return world.outcome(reached, (*wanted, "take-over") if plan.is_whole else wanted)


def _die_having_accepted(world: World, settings: dict[str, Any]) -> int:
    """The process that has accepted it dies when its client has read the 202."""
    payment = "accepted", world.key("202")
    is_killed = world.run([payment], fault=Fault(point="answered"), **settings).is_killed
    _recover(world, [payment], settings)
    return int(is_killed)


def _die_at_lines(world: World, plan: Plan, settings: dict[str, Any]) -> int:
    payments = _accept(world, settings)
    lines = world.run(action="work", counts_lines=True, **settings).said["lines"]
    reached = 0
    for line in replace(plan, stride=plan.stride * STRIDE).points(lines, "accepted", settings["entry"]):
        payments += _accept(world, settings, "line", line)
        reached += _work(world, payments[-1:], settings, Fault(line=line))
    _recover(world, payments, settings)
    return reached


def _die_at_points(world: World, plan: Plan, settings: dict[str, Any], where: str) -> int:
    reached = 0
    payments: list[Payment] = []
    for number in plan.points(len(POINTS), "accepted", where):
        payments += _accept(world, settings, "point", number)
        reached += _work(world, payments[-1:], settings, Fault(point=POINTS[number - 1]))
    _recover(world, payments, settings)
    return reached


def _die_at_moments(world: World, plan: Plan, settings: dict[str, Any], where: str) -> int:
    """Workers with much to do are killed from outside, one after another."""
    chance = plan.chance("moments", where)
    reached = 0
    for _ in range(plan.share(BATCHES)):
        payments = [payment for _ in range(BATCH) for payment in _accept(world, settings, "moment")]
        for _ in range(WORKERS):
            worker = world.start([], action="work", **settings)
            time.sleep(chance.uniform(0, MAX_SECONDS))  # Where it strikes is what is drawn here.
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            # One that had nothing left to do was not killed at work.
            reached += world.wait(worker, payments[:1]).is_killed
            world.database.end_leases([key for _, key in payments])
        _recover(world, payments, settings)
    return reached


def _accept(world: World, settings: dict[str, Any], *labels: object) -> list[Payment]:
    """Have a payment accepted by a process that ends then."""
    payment = "accepted", world.key(*labels)
    world.run([payment], **settings)
    return [payment]


def _work(world: World, payments: Sequence[Payment], settings: dict[str, Any], fault: Fault) -> int:
    """Let a worker run into *fault*."""
    return int(world.wait(world.start([], action="work", fault=fault, **settings), payments).is_killed)


def _recover(world: World, payments: Sequence[Payment], settings: dict[str, Any]) -> None:
    """Let the dead workers' leases run out, and another worker run; only then do the clients ask for the state."""
    world.database.end_leases([key for _, key in payments])
    world.run(action="work", **settings)
    world.insist(payments, **settings)

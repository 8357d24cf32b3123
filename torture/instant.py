"""Instant take-over on PostgreSQL, with leases longer than any run: only the lock shows that a worker is dead.

Workers are killed at a line; and others are stopped and their locks cut, as in a partition: these live, count as
dead, go on after another has done their work, and must be fenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torture.checker import Sight, Violation
from torture.job import Entry, Fault
from torture.scenario import Outcome, Payment, Plan, World, Worlds
from torture.zombies import ENTRIES, GUARD, STEPS, Zombie, stop, woken

#: An hour. A payment that had to wait for it would end its run with an error.
LEASE_SECONDS = 3600.0
#: Of the lines of a payment, a sample: the steps are those of any other take-over.
STRIDE = 40

FORMS = ("guard", "steps")
#: Where workers are stopped. There are fewer at a time than a server has connections for.
POINTS = {"guard": GUARD, **STEPS}
_CUT = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
     WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class InstantTakeOver:
    """Workers that are dead, or have lost the lock that shows that they live, by both entry points."""

    name = "kill -9 or lock cut, instant take-over"
    minimum = 100

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill and cut off, recover and judge, a world for each entry point."""
        return sum((self._run(worlds, plan, entry) for entry in ENTRIES), Outcome(0))

    def _run(self, worlds: Worlds, plan: Plan, entry: Entry) -> Outcome:
        with worlds.postgres() as world:
            settings = {"store": f"{world.database.url}?takeover=instant", "lease_seconds": LEASE_SECONDS}
            reached: Counter[str] = Counter()
            found: list[Violation] = []
            for form in FORMS:
                reached[f"{form} ({entry})"] = _die_at_lines(world, plan, form, entry, settings)
            for form, points in POINTS.items():
                chosen = [points[number - 1] for number in plan.points(len(points), "cut", form, entry)]
                zombies = [Zombie((form, world.key("cut", form)), point, entry) for point in chosen]
                found += _cut_off(world, zombies, settings, is_swept=form == "guard")
                reached[f"{form}, cut off ({entry})"] = len(zombies)
            plan.tell(f"  {self.name}: {entry}: {reached.total()} points reached")
            # A shortened run may kill workers only where they had not begun, or had ended.
            wanted: tuple[Sight, ...] = ("crash", "fenced zombie", "replay")
            judged = world.outcome(reached, (*wanted, "take-over") if plan.is_whole else wanted)
            return judged + Outcome(0, tuple(found))


def _die_at_lines(world: World, plan: Plan, form: str, entry: Entry, settings: dict[str, Any]) -> int:
    lines = world.run([(form, world.key())], counts_lines=True, entry=entry, **settings).said["lines"]
    reached = 0
    payments: list[Payment] = []
    for line in replace(plan, stride=plan.stride * STRIDE).points(lines, form, entry):
        payments.append((form, world.key(form, line)))
        reached += world.run(payments[-1:], fault=Fault(line=line), entry=entry, **settings).is_killed
    world.insist(payments, entry=entry, **settings)
    return reached


def _cut_off(world: World, zombies: Sequence[Zombie], settings: dict[str, Any], *, is_swept: bool) -> list[Violation]:
    """Stop workers, cut their locks, have their work done by another, and let them go on."""
    pids = [stop(world, zombie, **settings) for zombie in zombies]
    payments = [zombie.payment for zombie in zombies]
    world.run(payments, **settings)  # Their keys are in use, and other requests get 409.
    world.database.execute(_CUT)
    if is_swept:
        world.run(action="sweep", **settings)
    world.insist(payments, **settings)
    found = woken(world, zip(pids, zombies, strict=True))
    world.insist(payments, **settings)
    return found

"""kill -9 at every executed line of Semel, in a real process, on real databases; then all clients insist on an answer.

A first run counts the lines of an operation. Then a child is forked for each of them, and kills itself there.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torture.checker import Sight
from torture.job import Entry, Fault
from torture.scenario import Outcome, Payment, Plan, World, Worlds

#: What is killed. The first four are forms of the payment; ``guard`` is claim and complete, and no more. In ``resume``
#: it is a worker that goes on where one before it died: killed in its recovery.
OPERATIONS = ("guard", "atomic", "phase", "effect", "resume", "replay", "sweep", "reap")
ENTRIES: tuple[Entry, ...] = ("wsgi", "asgi")
STORES = ("postgresql", "sqlite")

#: Of some, a sample of the lines will do: ASGI and WSGI have the same flows, and a recovery takes the same steps.
SAMPLED = {"asgi": 5, "resume": 5}
#: A child computes half of its time, and waits for a database the other half.
AT_ONCE = 3

#: A worker that lives through a whole run.
_LONG_LEASE_SECONDS = 3600.0


class KillAtLines:
    """kill -9 at every line of every operation, by both entry points, on both stores."""

    name = "kill -9 at a line"
    minimum = 2000

    def __init__(
        self, operations: Sequence[str] = OPERATIONS, entries: Sequence[Entry] = ENTRIES, **settings: Any
    ) -> None:
        """Kill these *operations*; *settings* go to every child."""
        self._operations = operations
        self._entries = entries
        self._settings = settings

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill, recover and judge, a world for each store and entry point."""
        places = list(itertools.product(STORES, self._entries))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(lambda place: self._run(worlds, plan, *place), places), Outcome(0))

    def _run(self, worlds: Worlds, plan: Plan, store: str, entry: Entry) -> Outcome:
        with worlds.of(store) as world:
            return self._kill(world, plan, f"{store}, {entry}", {"entry": entry, **self._settings})

    def _kill(self, world: World, plan: Plan, where: str, settings: dict[str, Any]) -> Outcome:
        reached: Counter[str] = Counter()
        for operation in self._operations:
            what = f"{operation} ({where})"
            stride = plan.stride * SAMPLED.get(settings["entry"], 1) * SAMPLED.get(operation, 1)
            reached[what] = kill_at_lines(world, operation, replace(plan, stride=stride), **settings)
            plan.tell(f"  {self.name}: {what}: {reached[what]} points reached")
        # A shortened run may miss the few lines between an answer that is stored and its end.
        wanted: tuple[Sight, ...] = ("crash", "replay", "take-over") if plan.is_whole else ("crash",)
        return world.outcome(reached, wanted)


def kill_at_lines(world: World, operation: str, plan: Plan, **settings: Any) -> int:
    """Kill one operation at its lines, and recover all of them; return how many children died."""
    kill = {"resume": _resume, "replay": _replay, "sweep": _sweep, "reap": _reap}.get(operation)
    return kill(world, plan, settings) if kill else _pay(world, operation, plan, settings)


def _pay(world: World, form: str, plan: Plan, settings: dict[str, Any]) -> int:
    reached = 0
    payments: list[Payment] = []
    for line in plan.points(_count(world, [(form, world.key())], settings), form):
        payments.append((form, world.key(form, line)))
        reached += world.run(payments[-1:], fault=Fault(line=line), **settings).is_killed
    _recover(world, payments, settings)
    return reached


def _resume(world: World, plan: Plan, settings: dict[str, Any]) -> int:
    """Each take-over finds that a phase is done, or that an effect was begun with an unknown outcome."""
    points = ("ride committed", "charged")
    lines = _count(world, [_dead(world, "steps", points[0], settings)], settings)
    reached = 0
    payments: list[Payment] = []
    for line in plan.points(lines, "resume"):
        payments.append(_dead(world, "steps", points[line % 2], settings, "resume", line))
        reached += world.run(payments[-1:], fault=Fault(line=line), **settings).is_killed
    _recover(world, payments, settings)
    return reached


def _replay(world: World, plan: Plan, settings: dict[str, Any]) -> int:
    payment = ("phase", world.key())
    world.run([payment], **settings)
    lines = _count(world, [payment], settings)
    reached = sum(
        world.run([payment], fault=Fault(line=line), **settings).is_killed for line in plan.points(lines, "replay")
    )
    world.insist([payment], **settings)
    return reached


def _sweep(world: World, plan: Plan, settings: dict[str, Any]) -> int:
    """Each run of the sweeper finds one dead worker: in turns, a key that is freed, and one that is parked."""
    reached = 0
    world.run(action="sweep", **settings)  # What other operations left behind would be counted, too.
    payments = [_dead(world, form, "entered", settings) for form in ("phase", "guard")]
    for line in plan.points(_count(world, [], settings, action="sweep"), "sweep"):
        payments.append(_dead(world, ("phase", "guard")[line % 2], "entered", settings, "sweep", line))
        reached += world.run(action="sweep", fault=Fault(line=line), **settings).is_killed
    _recover(world, payments, settings)
    return reached


def _reap(world: World, plan: Plan, settings: dict[str, Any]) -> int:
    """Each run of the reaper finds a finished record, a dead worker's, and a living worker's, all past retention."""
    living = ("phase", world.key())
    stopped = Fault(signal.SIGSTOP, point="entered")
    worker = world.start(
        [living], fault=stopped, **{**settings, "lease_seconds": _LONG_LEASE_SECONDS, "patience_seconds": 3600}
    )
    world.wait(worker)
    world.database.end_retention([living[1]])
    points = plan.points(_count(world, [], settings, action="reap"), "reap")
    finished: list[Payment] = [("phase", world.key()) for _ in points]
    world.insist(finished, **settings)
    dead: list[Payment] = []
    reached = 0
    for line, (_, key) in zip(points, finished, strict=True):
        dead.append(_dead(world, "phase", "entered", settings, "reap", line))
        world.database.end_retention([key, dead[-1][1]])
        reached += world.run(action="reap", fault=Fault(line=line), **settings).is_killed
    world.run([living], **settings)  # Another client, which must get 409.
    world.go_on(worker, [living])
    # Those that were finished had their answer: past retention, asking again would be a new payment.
    _recover(world, dead, settings)
    return reached


def _dead(world: World, form: str, point: str, settings: dict[str, Any], *labels: object) -> Payment:
    """Leave a payment with a worker that died at a point of it."""
    payment = form, world.key(*labels)
    world.run([payment], fault=Fault(point=point), **settings)
    world.database.end_leases([payment[1]])
    return payment


def _count(world: World, payments: Sequence[Payment], settings: dict[str, Any], **more: Any) -> int:
    lines: int = world.run(payments, counts_lines=True, **more, **settings).said["lines"]
    return lines


def _recover(world: World, payments: Sequence[Payment], settings: dict[str, Any]) -> None:
    """Let the dead workers' leases run out, and insist."""
    world.database.end_leases([key for _, key in payments])
    world.insist(payments, **settings)

"""Small scenarios, each the smallest in which one planted bug shows. Without the bug, all of them end well.

A duel is one payment, or two workers at one payment: a fault where it hurts, and then everybody insists.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torture.job import Fault
from torture.lines import kill_at_lines
from torture.scenario import Outcome, Payment, Plan, World, Worlds

#: Longer than an answer is tried to be stored while its client waits.
AWAY_SECONDS = 2.0
TEN_YEARS_SECONDS = 10 * 365.25 * 86400

#: Between any two commands to the store: a bug there is a hole between reading and writing, or between two commits.
_HOLES = {"only_files": (str(Path(__file__).parent / "planted.py"),)}
_ALL = Plan()


def zombie(world: World, **settings: Any) -> int:
    """A worker stops, another takes over and is half-way through, and the first goes on."""
    payment = "steps", world.key()
    first = _stop(world, payment, "entered", settings)
    world.database.end_leases([payment[1]])
    second = _stop(world, payment, "ride committed", settings)
    for worker in (first, second):
        world.go_on(worker, [payment])
    return _insist(world, payment, settings)


def lost_claim(world: World, **settings: Any) -> int:
    """A fail-over loses a worker's claim, so that the next has the same number; and the first goes on."""
    payment = "steps", world.key()
    first = _stop(world, payment, "entered", settings)
    world.database.lose(payment[1])
    second = _stop(world, payment, "ride committed", settings)
    for worker in (first, second):
        world.go_on(worker, [payment])
    return _insist(world, payment, settings)


def strange_clock(world: World, **settings: Any) -> int:
    """A worker is alive and slow; another, with a clock ten years ahead, gets the same payment."""
    payment = "guard", world.key()
    first = _stop(world, payment, "entered", {**settings, "on_crash": "rerun"})
    world.run([payment], on_crash="rerun", clock_seconds=TEN_YEARS_SECONDS, **settings)
    world.go_on(first, [payment])
    return _insist(world, payment, settings)


def away(world: World, **settings: Any) -> int:
    """The store is away while a live worker holds an answer, for longer than the lease; and its client insists."""
    payment = "guard", world.key()
    spell = {"away_seconds": AWAY_SECONDS, "lease_seconds": AWAY_SECONDS / 2, "on_crash": "rerun"}
    world.insist([payment], **{"planted": "none", **settings, **spell})
    return 1


def rivals(world: World, **settings: Any) -> int:
    """A worker stops between two commands, another does all of the same payment meanwhile, and the first goes on."""
    return stop_at_lines(world, "guard", _ALL, on_crash="rerun", **{"planted": "none", **_HOLES, **settings})


def died_answering(world: World, **settings: Any) -> int:
    """A worker dies the moment its client has the answer."""
    return _die(world, ("atomic", world.key()), "answered", settings)


def died_committing(world: World, **settings: Any) -> int:
    """Workers die between any two commands of an atomic payment."""
    return kill_at_lines(world, "atomic", _ALL, **{"planted": "none", **_HOLES, **settings})


def reaped(world: World, **settings: Any) -> int:
    """A worker is alive and so slow that its record is past retention; the reaper comes, and then another client."""
    payment = "guard", world.key()
    first = _stop(world, payment, "entered", {**settings, "on_crash": "rerun"})
    world.database.end_retention([payment[1]])
    world.run(action="reap", **settings)
    world.run([payment], on_crash="rerun", **settings)
    world.go_on(first, [payment])
    return 1


def died_charging(world: World, **settings: Any) -> int:
    """A worker dies after the provider has charged, and before that is recorded."""
    return _die(world, ("effect", world.key()), "charged", settings)


def asked_twice(world: World, **settings: Any) -> int:
    """A client asks again, having lost the answer."""
    payment = "phase", world.key()
    world.run([payment], **settings)
    return _insist(world, payment, settings)


def died_between(world: World, **settings: Any) -> int:
    """A worker dies between a phase and what comes after."""
    return _die(world, ("phase", world.key()), "ride committed", settings)


Duel = Callable[..., int]

#: Each planted bug, and the duel that finds it.
DUELS: dict[str, Duel] = {
    "no fence": zombie,
    "no token": lost_claim,
    "app clock": strange_clock,
    "read-then-insert": rivals,
    "answer before commit": died_answering,
    "complete after commit": died_committing,
    "reap in flight": reaped,
    "random downstream key": died_charging,
    "freed after success": asked_twice,
    "phase result not stored": died_between,
    "answer given up": away,
}


class Rivals:
    """At a line of a payment its worker is stopped, and another does the same payment meanwhile."""

    name = "a rival at a line"
    minimum = 500
    #: A sample of the lines: each takes two workers.
    stride = 4

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Stop, let the rival run, go on, and judge."""
        # Not on SQLite: a worker that is stopped in a transaction keeps the whole file, and the rival waits for it.
        with worlds.postgres() as world:
            sample = replace(plan, stride=plan.stride * self.stride)
            reached = sum(stop_at_lines(world, form, sample, on_crash="rerun") for form in ("guard", "atomic", "phase"))
            plan.tell(f"  {self.name}: {reached} points reached")
            return world.outcome(reached, ("replay",) if plan.is_whole else ())


class Planted:
    """The checker, checked: every planted bug is found, and the same duel without it finds nothing."""

    name = "planted bugs found"
    minimum = len(DUELS)

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Have every duel twice, with its bug and without. A bug that goes unseen is not reached."""
        outcome = Outcome(0)
        with worlds.postgres() as world:
            for number, (bug, duel) in enumerate(DUELS.items()):
                sound, spoilt = world.part(f"sound{number}"), world.part(f"spoilt{number}")
                duel(sound)
                duel(spoilt, planted=bug)
                outcome += sound.outcome(int(bool(spoilt.verdict().violations)))
                plan.tell(f"  {self.name}: {bug}: {next(iter(spoilt.verdict().violations), 'NOT FOUND')}")
        return outcome


def stop_at_lines(world: World, form: str, plan: Plan, **settings: Any) -> int:
    """Stop a payment at its lines, one child each, with a rival in between; return how many were stopped."""
    lines = world.run([(form, world.key())], counts_lines=True, **settings).said["lines"]
    reached = 0
    payments: list[Payment] = []
    for line in plan.points(lines, "rivals", form):
        payment = form, world.key("rival", form, line)
        payments.append(payment)
        worker = world.start([payment], fault=Fault(signal.SIGSTOP, line=line), **settings)
        is_stopped = world.wait(worker).is_stopped
        reached += is_stopped
        world.run([payment], **settings)
        if is_stopped:
            world.go_on(worker, [payment])
    world.insist(payments, **settings)
    return reached


def _stop(world: World, payment: Payment, point: str, settings: dict[str, Any]) -> int:
    worker = world.start([payment], fault=Fault(signal.SIGSTOP, point=point), **settings)
    world.wait(worker)
    return worker


def _die(world: World, payment: Payment, point: str, settings: dict[str, Any]) -> int:
    reached = world.run([payment], fault=Fault(point=point), **settings).is_killed
    world.database.end_leases([payment[1]])
    world.insist([payment], **settings)
    return int(reached)


def _insist(world: World, payment: Payment, settings: dict[str, Any]) -> int:
    world.insist([payment], **settings)
    return 1

"""Workers that are stopped past their lease, and go on when another has done their work: each must be fenced.

They are stopped (SIGSTOP) in their handlers: inside a phase that is not committed, between a call to the provider and
the record of it, before their answer is stored. Then the database's own clock has to say that their leases are over.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torture.checker import Event, Violation
from torture.job import Entry, Fault
from torture.scenario import Outcome, Payment, Plan, World, Worlds

LEASE_SECONDS = 0.3
#: A lease that takes longer than this to run out is still being renewed.
PATIENCE_SECONDS = 20.0
POLL_SECONDS = 0.02
#: So many are stopped at a time: each has a few connections, and a server has a hundred.
BATCH = 8

#: A plain handler, by the policy that refuses to run it again: what a dead one did is not known.
GUARD = ("entered", "paid", "answering")
#: Handlers of steps. At "… written" the transaction of a phase is open.
STEPS = {
    "phase": ("entered", "ride written", "ride committed", "answering"),
    "effect": ("entered", "charged", "charge kept", "answering"),
    "steps": (
        *("entered", "ride written", "ride committed", "charged", "charge kept"),
        *("receipt written", "answering"),
    ),
}
#: Not before its statement: that one fails then, and the error is the application's own.
ATOMIC = ("paid written", "paid", "answering")
ENTRIES: tuple[Entry, ...] = ("wsgi", "asgi")

#: The answer to the client of a fenced worker: wait, and then ask again.
REFUSALS = frozenset({409, 503})

_LIVE = {
    True: "SELECT key FROM semel_keys WHERE state = 'processing' AND lease_expires_at > clock_timestamp()",
    False: "SELECT key FROM semel_keys, semel_keys_clock WHERE state = 'processing' AND lease_expires_at > now",
}
#: What a server does to a connection after its client has gone. Only atomic payments have advisory locks.
_PARTITION = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
     WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@dataclass(frozen=True, slots=True)
class Zombie:
    """A worker to be stopped."""

    payment: Payment
    point: str
    entry: Entry


class Zombies:
    """Workers stopped past their lease, of every form, at every point where they hold something."""

    name = "SIGSTOP past the lease"
    minimum = 50

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Stop, take over, let go on, and judge, on both stores."""
        outcome = Outcome(0)
        for store in ("postgresql", "sqlite"):
            with worlds.of(store) as world:
                outcome += stopped_in(world, plan, store)
        return outcome


def stopped_in(world: World, plan: Plan, store: str) -> Outcome:
    """Stop workers in one world."""
    cases = [
        (form, point, entry)
        for form, points in (("guard", GUARD), *STEPS.items())
        for point in points
        for entry in ENTRIES
    ]
    if not world.database.is_postgres:
        # A process that is stopped while it has SQLite's write lock blocks all others: no worker could take over.
        cases = [case for case in cases if not case[1].endswith("written")]
    reached: Counter[str] = Counter()
    found: list[Violation] = []
    for form in ("guard", *STEPS):
        zombies = [
            Zombie((form, world.key()), point, entry)
            for number, (its, point, entry) in enumerate(cases, 1)
            if its == form and number in plan.points(len(cases), store)
        ]
        for batch in _batches(zombies):
            found += take_over(world, batch, plan, is_swept=form == "guard")
        reached[f"{form} ({store})"] = len(zombies)
    seen: Counter[str] = Counter()
    if world.database.is_postgres:
        atomic = [Zombie(("atomic", world.key()), point, entry) for point in ATOMIC for entry in ENTRIES]
        found += cut_off(world, atomic[:: plan.stride], plan)
        reached[f"atomic, cut off ({store})"] = len(atomic[:: plan.stride])
        patient = [Zombie(("atomic", world.key()), "paid", entry) for entry in ENTRIES]
        seen["duplicate told to wait"] = wait_for(world, patient, plan)
        if seen["duplicate told to wait"] < len(patient):
            found.append(Violation("idle", "", "a rival of a stopped atomic worker was not told to wait"))
    plan.tell(f"  {Zombies.name}: {store}: {reached.total()} zombies")
    judged = world.outcome(reached, ("take-over", "fenced zombie", "replay", "outcome unknown"))
    if plan.stride > 1:  # A part of the cases need not show it all.
        judged = world.outcome(reached, ("fenced zombie", "replay"))
    return judged + Outcome(0, tuple(found), seen)


def take_over(world: World, zombies: Sequence[Zombie], plan: Plan, *, is_swept: bool = False) -> list[Violation]:
    """Stop workers until their leases are over, have their work done by another, and let them go on."""
    pids = [stop(world, zombie) for zombie in zombies]
    payments = [zombie.payment for zombie in zombies]
    _wait_for_leases(world, [key for _, key in payments])
    entry = plan.chance("rival", payments[0]).choice(ENTRIES)
    if is_swept:
        world.run(action="sweep", entry=entry)
    world.insist(payments, entry=entry)
    found = woken(world, zip(pids, zombies, strict=True))
    world.insist(payments, entry=entry)
    return found


def cut_off(world: World, zombies: Sequence[Zombie], plan: Plan) -> list[Violation]:
    """Stop workers in atomic mode, cut their connections as a partition does, have their work done by another."""
    pids = [stop(world, zombie) for zombie in zombies]
    payments = [zombie.payment for zombie in zombies]
    world.run(payments)  # Their keys are in use, and other requests get 409.
    world.database.execute(_PARTITION)
    entry = plan.chance("atomic rival").choice(ENTRIES)
    world.insist(payments, entry=entry)
    found = woken(world, zip(pids, zombies, strict=True))
    world.insist(payments, entry=entry)
    return found


def wait_for(world: World, workers: Sequence[Zombie], plan: Plan) -> int:
    """Stop workers in atomic mode and let them finish: no lease runs out there. Return how many rivals had to wait."""
    pids = [stop(world, worker) for worker in workers]
    payments = [worker.payment for worker in workers]
    before = len(world.history.read())
    world.run(payments, entry=plan.chance("patient rival").choice(ENTRIES))
    told = [event for event in world.history.read()[before:] if event.what == "answer"]
    for pid, worker in zip(pids, workers, strict=True):
        world.go_on(pid, [worker.payment])
    world.insist(payments)
    return sum(event.status == 409 and not event.has_run for event in told)


def stop(world: World, zombie: Zombie, **settings: Any) -> int:
    """Start a worker, and wait until it has stopped where it was told to."""
    fault = Fault(signal.SIGSTOP, point=zombie.point)
    pid = world.start([zombie.payment], fault=fault, entry=zombie.entry, **{"lease_seconds": LEASE_SECONDS, **settings})
    if not world.wait(pid).is_stopped:
        raise AssertionError(f"{zombie} was to stop, and ended.")
    return pid


def _wait_for_leases(world: World, keys: Sequence[str]) -> None:
    """Wait until no lease of *keys* is live, by the database's own clock."""
    ends = time.monotonic() + PATIENCE_SECONDS
    while {row[0] for row in world.database.execute(_LIVE[world.database.is_postgres])} & {*keys}:
        if time.monotonic() > ends:
            raise AssertionError("The lease of a stopped worker does not run out.")
        time.sleep(POLL_SECONDS)


def woken(world: World, stopped: Iterable[tuple[int, Zombie]]) -> list[Violation]:
    """Let workers go on, one by one; return those with an accepted answer as violations."""
    found = []
    for pid, zombie in stopped:
        before = len(world.history.read())
        world.go_on(pid, [zombie.payment])
        key = zombie.payment[1]
        said = [event for event in world.history.read()[before:] if event.key == key and event.what == "answer"]
        if not _is_refused(said):
            answers = ", ".join(f"{event.status} {event.body}" for event in said) or "nothing"
            found.append(Violation("doubled", key, f"a zombie, stopped at {zombie.point!r}, told its client {answers}"))
    return found


def _is_refused(said: Sequence[Event]) -> bool:
    return len(said) == 1 and said[0].status in REFUSALS and said[0].has_run and not said[0].is_unknown


def _batches(zombies: Sequence[Zombie]) -> list[Sequence[Zombie]]:
    return [zombies[start : start + BATCH] for start in range(0, len(zombies), BATCH)]

"""Replies that are lost: to COMMIT, and to statements that commit themselves. A worker that waits must find out.

A proxy is between the workers and PostgreSQL. At random, it cuts a connection before a statement has reached the
server, after the server has replied, or while the statement is still on its way.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import ExitStack
from random import Random

from torture.checker import Event
from torture.clients import Crowd, Order
from torture.job import Entry, Fault
from torture.proxy import Cut, Lost, Proxy, is_commit
from torture.scenario import Outcome, Plan, World, Worlds

ENTRIES: tuple[Entry, ...] = ("wsgi", "asgi")

#: What is cut, and how often. There are few take-overs and releases, so more of them are.
STATEMENTS = {
    "COMMIT": 0.5,
    "BEGIN": 0.1,
    "claim": 0.15,
    "take-over": 0.5,
    "save": 0.15,
    "answer": 0.15,
    "release": 0.3,
}
#: How a statement other than COMMIT is known: by what it does with the table. The record of atomic mode and the save of
#: a phase are sent with their COMMIT.
SHAPES = {
    "BEGIN": re.compile(r"(^|; )BEGIN\b"),
    "claim": re.compile(r"INSERT INTO semel_keys\b.*\bON CONFLICT\b", re.DOTALL),
    "take-over": re.compile(r"UPDATE semel_keys\s+SET state\s+= CASE\b"),
    "save": re.compile(r"UPDATE semel_keys\s+SET steps\b"),
    "answer": re.compile(r"UPDATE semel_keys\s+SET state\s+= \$"),
    "release": re.compile(r"DELETE FROM semel_keys\b"),
}
#: One payment meets no more of each: it must come to an end.
MOST = 2

#: Of five payments, three have COMMITs of the application's: one, one, and two.
FORMS = ("atomic", "steps", "phase", "guard", "effect")
#: A key with a late claim has no worker for this long.
LEASE_SECONDS = 2.0
#: A run that has cut less by then is broken.
PATIENCE_SECONDS = 900.0
POLL_SECONDS = 0.05
#: A worker has finished the rest of its payment long before this.
LATE_SECONDS = 1.0


class LostCommits:
    """Replies to COMMIT, and to claims, saves and answers, swallowed at random."""

    name = "reply to COMMIT lost"
    minimum = 500

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Let both entry points pay through the proxy until enough COMMITs had their replies swallowed."""
        cutter = Cutter(plan.chance(self.name))
        with Proxy(worlds.server.url, cutter.choose, cutter.tell) as proxy, worlds.postgres(proxy.address) as world:
            cutter.world = world
            pay_until(world, proxy, cutter, plan.share(self.minimum))
            reached = swallowed(proxy)
            plan.tell(f"  {self.name}: {reached} swallowed; {cutter}")
            judged = world.outcome(reached, ("resolved unknown", "replay"))
            # These requests were told to wait for the lease of an earlier one: no worker was stopped here.
            del judged.seen["fenced zombie"]
        return Outcome(reached, judged.violations, judged.seen, cutter.parts) + late_saves(worlds)


class Cutter:
    """Chooses what is cut, by chance, and keeps count."""

    world: World

    def __init__(self, chance: Random) -> None:
        """Choose at random by *chance*."""
        self._chance = chance
        self._counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.parts: Counter[str] = Counter()

    def choose(self, sql: str, marks: tuple[str, ...]) -> Cut | None:
        """Say whether to cut at this statement."""
        what = kind_of(sql)
        if what is None or not marks or self._counts[what, marks] >= MOST:
            return None
        if self._chance.random() >= STATEMENTS[what]:
            return None
        self._counts[what, marks] += 1
        # The kinds of cuts that were not made yet come first: a short run makes each of them, too.
        return self._chance.choice([cut for cut in Cut if not self.parts[_part(what, cut)]] or list(Cut))

    @property
    def missing(self) -> list[str]:
        """The cuts that were planned and never made: a statement may have another shape than it had."""
        planned = [_part(what, cut) for what in STATEMENTS for cut in Cut]
        return [part for part in planned if not self.parts[part]]

    def __str__(self) -> str:
        """Say what was cut, in one line."""
        return ", ".join(f"{number} {part}" for part, number in sorted(self.parts.items()))

    def tell(self, lost: Lost) -> None:
        """Write down what was cut."""
        self.parts[_part(kind_of(lost.sql), lost.cut)] += 1
        is_swallowed = is_commit(lost.sql) and lost.cut is not Cut.BEFORE
        for key in lost.marks:
            self.world.history.add(Event("swallowed" if is_swallowed else "cut", key))


def _part(what: str | None, cut: Cut) -> str:
    return f"{what} {cut.value}"


def kind_of(sql: str) -> str | None:
    """Return which of ``STATEMENTS`` this is."""
    if is_commit(sql):
        return "COMMIT"
    return next((what for what, shape in SHAPES.items() if shape.search(sql)), None)


def swallowed(proxy: Proxy) -> int:
    """Count the COMMITs that the server confirmed, without the reply reaching the client."""
    return sum(is_commit(lost.sql) for lost in proxy.confirmed)


def pay_until(world: World, proxy: Proxy, cutter: Cutter, wanted: int) -> None:
    """Pay by both entry points until *wanted* COMMITs had their replies swallowed, and every cut was made."""
    ends = time.monotonic() + PATIENCE_SECONDS
    with ExitStack() as stack:
        crowds = [
            stack.enter_context(
                Crowd(Order(world.job(entry=entry, lease_seconds=LEASE_SECONDS), FORMS, number * 100_000))
            )
            for number, entry in enumerate(ENTRIES)
        ]
        while swallowed(proxy) < wanted or cutter.missing:
            if time.monotonic() > ends or not all(crowd.is_paying for crowd in crowds):
                raise AssertionError(
                    f"The run has ended early. {swallowed(proxy)} of {wanted} replies were swallowed; "
                    f"never cut: {', '.join(cutter.missing) or 'nothing'}."
                )
            time.sleep(POLL_SECONDS)


def late_saves(worlds: Worlds) -> Outcome:
    """Have a late save by each entry point."""
    outcome = Outcome(0)
    for entry in ENTRIES:
        saves = 0

        def choose(sql: str, _marks: tuple[str, ...]) -> Cut | None:
            nonlocal saves
            saves += kind_of(sql) == "save"
            # A phase's save is sent with its COMMIT. The first other one says that the provider is about to be asked.
            return Cut.LATE if kind_of(sql) == "save" and saves == 1 else None

        with Proxy(worlds.server.url, choose, lambda _lost: None) as proxy, worlds.postgres(proxy.address) as world:
            outcome += late_save(world, proxy, entry)
    return outcome


def late_save(world: World, proxy: Proxy, entry: Entry) -> Outcome:
    """A save is on its way when its worker is cut off, sends it again, does all the rest, and dies. Then it arrives."""
    proxy.delay_seconds = LATE_SECONDS
    payment = "steps", world.key()
    world.run([payment], entry=entry, fault=Fault(point="answering"))
    ends = time.monotonic() + PATIENCE_SECONDS
    while not proxy.confirmed:
        if time.monotonic() > ends:
            raise AssertionError("No save was held up, or it never arrived.")
        time.sleep(POLL_SECONDS)
    world.database.end_leases([payment[1]])
    world.insist([payment], entry=entry)
    judged = world.outcome(0, ("crash", "take-over"))
    return Outcome(0, judged.violations, judged.seen, Counter({f"late save ({entry})": 1}))

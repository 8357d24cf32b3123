"""Messages on their way from an order to a parcel, with everything on the way killed: the API that writes them, the
relay, the broker, the consumer. Two scenarios: at random, all at once; and the relay and the consumer at every line.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import redis

from tests.kit import servers
from torture import messaging
from torture.job import Entry, Fault
from torture.lines import AT_ONCE, STORES
from torture.message_checker import Sent, check_messages, sent_again
from torture.messaging import ACKED, BUGS, SENT, STREAM
from torture.restarts import APPENDING
from torture.scenario import Outcome, Payment, Plan, World, Worlds

FORM = "parcel"
#: Orders of one client, one after another: those of one group are to be sent in this order.
ORDERS = 60
#: A kill comes at a moment within so many seconds.
MAX_SECONDS = 0.4
#: Short: a killed API's key is taken for as long.
LEASE_SECONDS = 1.0
#: Nothing takes longer once nothing is killed any more.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.05
LONG_SECONDS = 900

#: Every line of a relay on SQLite; elsewhere a sample, since its flow is the same and children are slower.
SAMPLED = {("postgresql", "wsgi"): 3, ("postgresql", "asgi"): 16, ("sqlite", "asgi"): 16}
#: Lines of the relay or the consumer themselves: a planted bug is a hole between two of them.
_HOLES = {"only_files": (str(Path(messaging.__file__)),)}


@dataclass
class Role:
    """One of the processes that are killed."""

    name: str
    settings: dict[str, Any]
    payments: list[Payment]
    pid: int = 0


class Messages:
    """kill -9 of API, relay, consumer and broker at random, while all of them run."""

    name = "kill -9 from order to parcel"
    minimum = 60

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill, let everything come to rest, and judge by the tables and the stream."""
        with servers.redis(settings=APPENDING) as server, worlds.postgres() as world:
            run = _Run(world, server, plan.chance(self.name))
            reached = run.kill(plan.share(self.minimum))
            outcome = run.judged(reached)
            plan.tell(f"  {self.name}: {', '.join(f'{part} {number}' for part, number in reached.items())}")
            return outcome


class _Run:
    def __init__(self, world: World, server: servers.RedisServer, chance: Random) -> None:
        self._world = world
        self._server = server
        self._chance = chance
        self._orders: list[Payment] = []
        common = {"broker": server.url, "to": STREAM, "lease_seconds": LEASE_SECONDS, "patience_seconds": LONG_SECONDS}
        endless = {**common, "is_endless": True}
        entries: tuple[Entry, ...] = ("wsgi", "asgi")
        self._apis = [Role(f"API {entry}", {**common, "entry": entry, "action": "insist"}, []) for entry in entries]
        self._relays = [Role(f"relay {each}", {**endless, "entry": each, "action": "relay"}, []) for each in entries]
        self._consumer = Role("consumer", {**endless, "action": "consume"}, [])

    def kill(self, times: int) -> Counter[str]:
        """Kill at random; return how often each was killed with work under way."""
        reached: Counter[str] = Counter()
        roles = [*self._apis, *self._relays, self._consumer]
        for role in roles:
            self._start(role)
        # A short run may draw no API for long: then no client would have lost an answer.
        while reached.total() < times or not self._has_lost_an_answer():
            time.sleep(self._chance.uniform(0, MAX_SECONDS))  # Where it strikes is what is drawn here.
            victim = self._chance.choice([*roles, None])
            if victim is None:
                self._server.kill()
                reached["broker"] += self._is_under_way()
                self._server.start()
            elif self._end(victim):
                reached[victim.name] += victim in self._apis or self._is_under_way()
            if victim is not None:
                self._start(victim)
        for role in self._apis:
            self._end(role)
        # The relays and the consumer run on: what is ordered last is to arrive, too.
        for role in self._apis:
            self._world.run(self._open(role), **role.settings)
        self._wait()
        for role in [*self._relays, self._consumer]:
            self._end(role)
        return reached

    def judged(self, reached: Counter[str]) -> Outcome:
        """Let both checkers judge."""
        outcome = self._world.outcome(reached, ("crash",))
        sent = read_stream(self._server.url)
        left = [f"{row[0]}" for row in self._world.database.execute("SELECT id FROM semel_outbox")]
        found = check_messages([key for _, key in self._orders], sent, left)
        return replace(
            outcome,
            violations=(*outcome.violations, *found),
            seen=outcome.seen + Counter({"message sent again": sent_again(sent), **dropped(self._world)}),
        )

    def _start(self, role: Role) -> None:
        if role in self._apis and not (role.payments and self._open(role)):
            group = role.name.split()[1]
            role.payments = [(FORM, self._world.key(group)) for _ in range(ORDERS)]
            self._orders += role.payments
        role.pid = self._world.start(self._open(role), **role.settings)

    def _open(self, role: Role) -> list[Payment]:
        answered = {event.key for event in self._world.history.read() if event.is_success}
        return [payment for payment in role.payments if payment[1] not in answered]

    def _end(self, role: Role) -> bool:
        """Kill it; return whether it was still running."""
        with suppress(ProcessLookupError):
            os.kill(role.pid, signal.SIGKILL)
        return self._world.wait(role.pid, self._open(role)[:1]).is_killed

    def _has_lost_an_answer(self) -> bool:
        return any(event.what == "error" for event in self._world.history.read())

    def _is_under_way(self) -> bool:
        rows = self._world.database.execute("SELECT step, count(*) FROM effects GROUP BY step")
        return len(set(dict(rows).values())) > 1 or len(rows) == 1

    def _wait(self) -> None:
        ends = time.monotonic() + PATIENCE_SECONDS
        while self._world.database.execute("SELECT 1 FROM semel_outbox LIMIT 1") or not is_read(self._server.url):
            if time.monotonic() > ends:
                break  # The checkers see what is stuck.
            time.sleep(POLL_SECONDS)


class MessageLines:
    """kill -9 of the relay, and of the consumer with its inbox, at every line; four planted bugs have to be found."""

    name = "relay, inbox: kill -9 at a line"
    minimum = 2000

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill, recover and judge, a world for each store and kind of relay."""
        places: list[tuple[str, Entry]] = list(itertools.product(STORES, ("wsgi", "asgi")))
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(lambda place: self._run(worlds, plan, *place), places), Outcome(0))

    def _run(self, worlds: Worlds, plan: Plan, store: str, entry: Entry) -> Outcome:
        sample = replace(plan, stride=plan.stride * SAMPLED.get((store, entry), 1))
        outcome = Outcome(0)
        with worlds.of(store) as world:
            outcome += kill_at_lines(world.part("relay"), "relay", sample, f"{store}, {entry}", entry=entry)
            if entry == "wsgi":  # It has one form only: a thread.
                outcome += kill_at_lines(world.part("consume"), "consume", plan, store)
            plan.tell(f"  {self.name}: {', '.join(f'{part}: {number}' for part, number in outcome.parts.items())}")
        return outcome


class PlantedMessages:
    """The checkers, checked: each planted bug is found, and the same kills without it find nothing."""

    name = "planted bugs found, messages"
    minimum = len(BUGS)

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Kill a relay or a consumer between any two of its own lines, with its bug and without."""
        outcome = Outcome(0)
        with worlds.postgres() as world:
            for number, (bug, kind) in enumerate(BUGS.items()):
                sound, spoilt = (duel(world.part(f"{name}{number}"), bug, name) for name in ("sound", "spoilt"))
                is_found = bool(spoilt.count(kind))
                outcome += Outcome(int(is_found), sound.violations, sound.seen)
                plan.tell(f"  {self.name}: {bug}: {next(iter(spoilt.violations), 'NOT FOUND')}")
        return outcome


def duel(world: World, bug: str, which: str) -> Outcome:
    """Kill at the lines of a relay, or of a consumer, that has *bug* if it is to be spoilt."""
    action = "relay" if bug == "deleted before it is sent" else "consume"
    return kill_at_lines(world, action, Plan(), bug, planted=bug if which == "spoilt" else "none", **_HOLES)


def kill_at_lines(world: World, action: str, plan: Plan, where: str, **settings: Any) -> Outcome:
    """Kill a relay or a consumer at its lines, a message for each; then let others finish, and judge."""
    with _folder() as folder:
        common = {"broker": str(folder), "patience_seconds": LONG_SECONDS, **settings}
        counted = [(FORM, world.key("counted"))]
        _prepare(world, action, counted, common)
        lines = world.run(counted, action=action, counts_lines=True, **common).said["lines"]
        points = plan.points(lines, action, where)
        orders = [(FORM, world.key(action, line)) for line in points]
        _prepare(world, action, orders, common)
        reached = 0
        for order, line in zip(orders, points, strict=True):
            reached += world.run([order], action=action, fault=Fault(line=line), **common).is_killed
        # The leases of those that were killed are over by now, or soon.
        sound = {**common, "planted": ""}
        _until_sent(world, orders, sound)
        world.run([], action="consume", **sound)
        sent = read_folder(folder)
        outcome = world.outcome(Counter({f"{action} ({where})": reached}))
        found = check_messages([key for _, key in counted + orders], sent, _left(world, orders))
        seen = outcome.seen + Counter({"message sent again": sent_again(sent), **dropped(world)})
        return replace(outcome, violations=(*outcome.violations, *found), seen=seen)


def _prepare(world: World, action: str, orders: Sequence[Payment], settings: dict[str, Any]) -> None:
    """Have the orders written; and for a consumer, their messages sent."""
    sound = {**settings, "planted": "", "entry": "wsgi", "only_files": ()}
    world.insist(orders, **{name: value for name, value in sound.items() if name != "patience_seconds"})
    if action == "consume":
        world.run(orders, action="relay", **sound)


def _until_sent(world: World, orders: Sequence[Payment], settings: dict[str, Any]) -> None:
    ends = time.monotonic() + PATIENCE_SECONDS
    while (left := _left(world, orders)) and time.monotonic() < ends:
        world.run([(FORM, key) for key in left], action="relay", **settings)


def _left(world: World, orders: Sequence[Payment]) -> list[str]:
    """Return the orders with a message in the outbox: each is a destination of its own."""
    waiting = {row[0] for row in world.database.execute("SELECT aggregatetype FROM semel_outbox")}
    return [key for _, key in orders if key in waiting]


def read_folder(folder: Path) -> list[Sent]:
    """Return what was sent to a folder."""
    lines = [json.loads(line) for line in (folder / SENT).read_text().splitlines()]
    return [Sent(line["id"], line["order"]) for line in lines]


def read_stream(url: str) -> list[Sent]:
    """Return what is in the stream, by a client that is not Semel's."""
    with redis.Redis.from_url(url) as client:
        entries: Any = client.xrange(STREAM)
    return [Sent(fields[b"id"].decode(), json.loads(fields[b"payload"])["order"]) for _, fields in entries]


def is_read(url: str) -> bool:
    """Whether the consumer was given everything in the stream, and has acked it."""
    with redis.Redis.from_url(url) as client:
        last: Any = client.xinfo_stream(STREAM)
        (group,) = client.xinfo_groups(STREAM)
    is_given: bool = group["last-delivered-id"] == last["last-generated-id"] and not group["pending"]
    return is_given


def dropped(world: World) -> dict[str, int]:
    """Count the duplicates that the inbox found."""
    path = world.history.path.with_suffix(".duplicates")
    return {"duplicate dropped": len(path.read_text().splitlines()) if path.exists() else 0}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="semel-torture-") as folder:
        for name in (SENT, ACKED):
            Path(folder, name).touch()
        yield Path(folder)

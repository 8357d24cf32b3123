"""What a scenario is, and the world that it runs in. To add one: write a module with a ``Scenario``, and list it in
``torture.suite``.

A scenario brings faults about, has every payment insisted on until it has its final answer, and lets the world judge::

    class Stopped:
        name = "SIGSTOP past the lease"
        minimum = 50

        def run(self, worlds: Worlds, plan: Plan) -> Outcome:
            with worlds.postgres() as world:
                for number in range(plan.share(self.minimum)):
                    zombie = world.start([("steps", key)], fault=Fault(SIGSTOP, point="ride written"))
                    ...
                return world.outcome(reached, wanted=("take-over", "fenced zombie"))

Only faults that were *reached* are counted: a child that died where it was told to, a COMMIT that was swallowed.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from semel.stores import store
from tests.kit import servers
from torture.checker import Event, Sight, Verdict, Violation, check
from torture.job import Ended, Job
from torture.provider import provider
from torture.warm import Warm
from torture.witness import Database, History, read_charges

#: The provider's log.
CHARGES = "charges.jsonl"

#: (form, key)
Payment = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of a run is wanted, and by which chance. The same plan makes the same run, threads apart."""

    seed: int = 1
    #: Of all fault points, every how-many-th is tried. 1 is all of them.
    stride: int = 1
    #: The one fault point to try: to see a single case again. 0 is all of the above.
    line: int = 0
    #: Told of progress.
    tell: Callable[[str], None] = print

    @property
    def is_whole(self) -> bool:
        """Whether every fault point is tried, so that a run must reach its minimum and see all there is to see."""
        return self.stride == 1 and not self.line

    def chance(self, *names: object) -> random.Random:
        """Return the random numbers of one part of the run: adding a part does not change the others."""
        return random.Random(f"{self.seed} {names}")  # noqa: S311 - a run must be repeatable

    def points(self, last: int, *names: object) -> range:
        """Return the fault points to try, of 1 to *last*: at least one, if there is any."""
        if self.line:
            return range(self.line, self.line + 1)
        return range(1 + self.chance(*names).randrange(min(self.stride, last) or 1), last + 1, self.stride)

    def share(self, number: int) -> int:
        """Return how many of *number* faults a shortened run tries: at least one."""
        return max(1, number // self.stride)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a scenario."""

    #: Faults that were brought about.
    reached: int
    violations: tuple[Violation, ...] = ()
    #: What the clients and workers saw, counted.
    seen: Counter[str] = field(default_factory=Counter)
    #: Reached, by the parts of the scenario.
    parts: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Outcome) -> Outcome:
        """Put two together."""
        return Outcome(
            self.reached + other.reached,
            self.violations + other.violations,
            self.seen + other.seen,
            self.parts + other.parts,
        )

    def count(self, kind: str) -> int:
        """Count the violations of one kind."""
        return sum(violation.kind == kind for violation in self.violations)


class Scenario(Protocol):
    """One kind of fault."""

    @property
    def name(self) -> str:
        """Its name in the last table."""

    @property
    def minimum(self) -> int:
        """How many faults a whole run must reach. A shortened one must reach one."""

    def run(self, worlds: Worlds, plan: Plan) -> Outcome:
        """Bring the faults about, and judge."""


class World:
    """An empty database with its provider, its histories and its children; and the checker at the end."""

    def __init__(self, database: Database, warm: Warm, folder: Path, job: Job, prefix: str = "pay") -> None:
        """All of it is running. *job* is what every job begins with; evidence is kept in *folder*."""
        self.database = database
        self.warm = warm
        self.history = History(folder / f"history-{prefix}.jsonl")
        self._folder = folder
        self._job = replace(job, history=str(self.history.path))
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def part(self, prefix: str) -> World:
        """Return a part of this world with keys and a history of its own, to be judged by itself."""
        return World(self.database, self.warm, self._folder, self._job, prefix)

    def key(self, *labels: object) -> str:
        """Return a new key. *labels* are part of it, so that a reader of the report sees what it was for."""
        return "-".join([self._prefix, f"{next(self._numbers):06d}", *map(str, labels)])

    def job(self, payments: Sequence[Payment] = (), **settings: Any) -> Job:
        """Return a job in this world: the fields of ``Job`` are the settings."""
        return replace(self._job, payments=tuple(payments), **settings)

    def start(self, payments: Sequence[Payment], **settings: Any) -> int:
        """Let a child begin; return its process id, to be waited for with ``wait``."""
        return self.warm.start(self.job(payments, **settings))

    def wait(self, pid: int, payments: Sequence[Payment] = ()) -> Ended:
        """Wait until a child has ended or stopped; if it was killed, the clients of *payments* see an error."""
        return self._seen(self.warm.wait(pid), payments)

    def go_on(self, pid: int, payments: Sequence[Payment] = ()) -> Ended:
        """Let a stopped child go on, and wait as ``wait`` does."""
        return self._seen(self.warm.go_on(pid), payments)

    def run(self, payments: Sequence[Payment] = (), **settings: Any) -> Ended:
        """Let a child do its work, and wait as ``wait`` does."""
        return self.wait(self.start(payments, **settings), payments)

    def insist(self, payments: Sequence[Payment], **settings: Any) -> None:
        """Send *payments* again until each has a final answer, in one child."""
        self.run(payments, action="insist", patience_seconds=600, **settings)

    def note(self, what: str, payment: Payment) -> None:
        """Write an event into the history."""
        self.history.add(Event(what, payment[1], payment[0]))

    def verdict(self, wanted: Sequence[Sight] = ()) -> Verdict:
        """Let the checker judge all that happened here."""
        effects = [effect for effect in self.database.effects() if self._is_ours(effect.key)]
        charges = [charge for charge in read_charges(self._folder / CHARGES) if self._is_ours(charge.key)]
        return check(effects, charges, self.history.read(), wanted)

    def outcome(self, reached: int | Counter[str], wanted: Sequence[Sight] = ()) -> Outcome:
        """Let the checker judge, and put it into the words of a scenario."""
        verdict = self.verdict(wanted)
        parts = reached if isinstance(reached, Counter) else Counter()
        number = parts.total() if isinstance(reached, Counter) else reached
        return Outcome(number, verdict.violations, verdict.seen, parts)

    def _is_ours(self, key: str) -> bool:
        return key.startswith(f"{self._prefix}-")

    def _seen(self, ended: Ended, payments: Iterable[Payment]) -> Ended:
        if ended.killed_by is not None:
            for payment in payments:
                self.note("error", payment)
        return ended


class Worlds:
    """Where worlds come from: one PostgreSQL server for all, a database for each; a SQLite file for each."""

    def __init__(self, server: servers.PostgresServer) -> None:
        """Make databases on *server*."""
        self.server = server
        self._numbers = itertools.count(1)

    def of(self, name: str) -> AbstractContextManager[World]:
        """Return a world on "postgresql" or "sqlite"."""
        return self.postgres() if name == "postgresql" else self.sqlite()

    @contextmanager
    def postgres(self, address: Callable[[str], str] = str) -> Iterator[World]:
        """Yield a world on PostgreSQL. *address* may send the children elsewhere, as to a proxy: it gets the URL."""
        server = Database(self.server.url)
        name = f"torture_{next(self._numbers)}_{id(self):x}"
        try:
            server.execute(f"CREATE DATABASE {name}")
            url = urlsplit(self.server.url)._replace(path=f"/{name}").geturl()
            with _world(url, address(url)) as world:
                yield world
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")
        finally:
            server.close()

    @contextmanager
    def sqlite(self) -> Iterator[World]:
        """Yield a world on SQLite."""
        with tempfile.TemporaryDirectory(prefix="semel-torture-") as folder:
            url = f"sqlite:///{folder}/torture.db"
            with _world(url, url) as world:
                yield world


@contextmanager
def worlds() -> Iterator[Worlds]:
    """Yield worlds, on a separate server."""
    with servers.postgres() as server:
        yield Worlds(server)


@contextmanager
def _world(url: str, childrens: str) -> Iterator[World]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-torture-")))
        migrated = store(url)
        migrated.migrate()
        migrated.close()
        port = stack.enter_context(provider(folder / CHARGES))
        warm = stack.enter_context(Warm(folder))
        database = Database(url)
        stack.callback(database.close)
        database.make()
        yield World(database, warm, folder, Job(childrens, port))

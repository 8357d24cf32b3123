"""What each operation of a store costs as the table grows: ``python -m bench growth``. It asks the real store, and the
database's own counters say what was read: pages, index entries, bytes of WAL. Times are this machine's.

With ``--dead N`` there are N dead rows in each index that a service walks along, and an idle transaction keeps them.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from bench import filling
from bench.counters import SETTINGS, Counters, PostgresCounters, RedisCounters, SqliteCounters, Work, vacuum_held_back
from bench.table import aligned
from semel.cli.keys import newest_of
from semel.core.commands import (
    Begin,
    Claim,
    Commit,
    Complete,
    Filter,
    FindStuck,
    Finish,
    Open,
    Reap,
    ReapInbox,
    ReapTrail,
    Search,
    Survey,
    Sweep,
    Undo,
    Verdict,
)
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.flows.upkeep import ABANDONED
from semel.stores import Store, store
from tests.kit import servers

#: Goals: how much slower the slowest in a hundred may be than in the smallest table; milliseconds of a reaped batch.
P99_RATIO, REAP_MS = 1.2, 10.0
BATCH = 1000
#: How often each is done: of services and people, less often. Claims stay in progress, and a sweep looks at a thousand.
MANY, FEW, WARM = 400, 20, 8

_FOLLOWED = "SELECT swept_to > clock_timestamp() - interval '2 minutes' FROM semel_keys_watermark"

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
STEPS = Progress((Done("phase", "ride_created", {"id": 7}),))
#: What the console and the metrics ask with.
SCAN, LIMIT, CAP, NEWEST, SURVEYED = 5000, 50, 10_000, 2000, 1000

Run = Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """One operation at one size."""

    store: str
    rows: int
    operation: str
    p50: float
    p99: float
    work: Work


@dataclass(frozen=True)
class Size:
    """What one key takes in each part of a store, in bytes."""

    store: str
    rows: int
    parts: dict[str, float]


@dataclass
class Growth:
    """All that was measured."""

    costs: list[Cost]
    sizes: list[Size]


class Operations:
    """What is asked of one store with so many keys, in ways that each cost the same again and again."""

    def __init__(self, keys: Store, others: Store, rows: int) -> None:
        """Ask *keys*; what has to be there before is asked of *others*, which is not measured."""
        self._keys, self._others = keys, others
        self._rows = rows
        self._random = random.Random()  # noqa: S311 - no secret

    def table(self, *, has_transactions: bool) -> dict[str, tuple[int, Callable[[], Run]]]:
        """Return how often each is done, and what prepares it."""
        usual: dict[str, tuple[int, Callable[[], Run]]] = {
            "claim": (MANY, self._claim),
            "replay": (MANY, self._replay),
            "completion": (MANY, self._completion),
        }
        joined: dict[str, tuple[int, Callable[[], Run]]] = {
            "atomic, first": (MANY, self._atomic),
            "atomic, replay": (MANY, self._atomic_replay),
            "phase": (MANY, self._phase),
        }
        beside: dict[str, tuple[int, Callable[[], Run]]] = {
            "sweep, nothing stuck": (FEW, lambda: lambda: self._keys.perform(FindStuck(BATCH))),
            "sweep of one": (FEW, self._sweep),
            "reap, nothing due": (FEW, lambda: self._reap_none),
            "survey": (FEW, lambda: lambda: self._keys.perform(Survey(SURVEYED))),
            "keys list": (FEW, lambda: lambda: newest_of(self._keys, LIMIT, None)),
            "keys list --state processing": (FEW, lambda: lambda: newest_of(self._keys, LIMIT, None, State.PROCESSING)),
            "console: counts": (FEW, lambda: lambda: self._keys.perform(Survey(CAP, NEWEST))),
            "console: newest": (FEW, self._search()),
            "console: unfinished": (FEW, self._search(state=State.PROCESSING)),
            "console: failed (none)": (FEW, self._search(state=State.FAILED)),
            "console: a scope": (FEW, self._search(scope=filling.scope_of(self._rows))),
        }
        messages: dict[str, tuple[int, Callable[[], Run]]] = {
            "trail reaped, nothing due": (FEW, lambda: lambda: self._keys.perform(ReapTrail(BATCH, filling.DAY))),
            "inbox reaped, nothing due": (FEW, lambda: lambda: self._keys.perform(ReapInbox(BATCH, filling.DAY))),
        }
        if not has_transactions:
            return usual | beside
        # Redis deletes by itself.
        reaped: dict[str, tuple[int, Callable[[], Run]]] = {
            f"reap of {BATCH}": (_batches(self._rows), lambda: self._reap)
        }
        return usual | joined | reaped | beside | messages

    def _new(self, **more: Any) -> Claim:
        key = filling.key_of(self._random.randrange(2**40, 2**50))
        return self._claim_of(filling.scope_of(self._random.randrange(filling.SCOPES)), key, **more)

    def _old(self) -> Claim:
        number = self._random.randrange(filling.expired_of(self._rows) + 1, self._rows + 1)
        return self._claim_of(filling.scope_of(number), filling.key_of(number))

    @staticmethod
    def _claim_of(scope: str, key: str, lease: timedelta = LEASE) -> Claim:
        return Claim(
            scope, key, os.urandom(16), filling.FINGERPRINT, lease, RETENTION, request_line=filling.REQUEST_LINE
        )

    def _held(self, claim: Claim) -> Any:
        return _of(Hold, self._others.perform(claim))

    def _claim(self) -> Run:
        claim = self._new()
        return lambda: _of(Hold, self._keys.perform(claim))

    def _replay(self) -> Run:
        claim = self._old()
        return lambda: _of(Found, self._keys.perform(claim))

    def _completion(self) -> Run:
        hold = self._held(self._new())
        return lambda: _done(self._keys.perform(Complete(hold, Event.COMPLETE, filling.ANSWER)))

    def _atomic(self) -> Run:
        claim = self._new()

        def run() -> None:
            lent = self._keys.transaction()
            hold = _of(Hold, lent.perform(Begin(claim)))
            _done(lent.perform(Finish(claim, hold, None, Event.COMPLETE, filling.ANSWER)))

        return run

    def _atomic_replay(self) -> Run:
        claim = self._old()

        def run() -> None:
            lent = self._keys.transaction()
            _of(Found, lent.perform(Begin(claim)))
            lent.perform(Undo())

        return run

    def _phase(self) -> Run:
        hold = self._held(self._new())

        def run() -> None:
            lent = self._keys.transaction()
            lent.perform(Open())
            _done(lent.perform(Commit(hold, STEPS)))

        return run

    def _sweep(self) -> Run:
        hold = self._held(self._new(lease=timedelta(0)))

        def run() -> None:
            found = self._keys.perform(FindStuck(BATCH))
            if hold not in {each.hold for each in found}:
                raise RuntimeError("A stuck key was not found.")
            _done(self._keys.perform(Sweep(hold)))

        return run

    def _reap(self) -> None:
        if self._keys.perform(Reap(BATCH, ABANDONED)).total != BATCH:
            raise RuntimeError("There was not enough to reap.")

    def _reap_none(self) -> None:
        self._keys.perform(Reap(BATCH, ABANDONED))

    def _search(self, **wanted: Any) -> Callable[[], Run]:
        command = Search(Filter(**wanted), LIMIT, SCAN)
        return lambda: lambda: self._keys.perform(command)


def measure_growth(sizes: Sequence[int], stores: Sequence[str], dead: int = 0) -> Growth:
    """Fill a table of each store to each size, and do everything there."""
    found = Growth([], [])
    for name in stores:
        for rows in sizes:
            with _FILLED[name](rows, dead) as (url, counters):
                parts = {part: size / rows for part, size in counters.sizes().items()}
                found.sizes.append(Size(name, rows, parts))
                found.costs += _costs(name, url, rows, counters)
    return found


def _costs(name: str, url: str, rows: int, counters: Counters) -> Iterator[Cost]:
    with closing(store(url)) as keys:
        names = list(Operations(keys, keys, rows).table(has_transactions=name != "redis"))
    for operation in names:
        if operation == "reap, nothing due":
            _reap_all(url)
        yield _cost(name, url, rows, operation, counters)


def _cost(name: str, url: str, rows: int, operation: str, counters: Counters) -> Cost:
    with closing(store(url)) as keys:
        with closing(store(url)) as others:
            asked = Operations(keys, others, rows).table(has_transactions=name != "redis")
            times, prepare = asked[operation]
            warm = min(WARM, times // 4 or 1)
            runs = [prepare() for _ in range(times + warm)]
        # A store looks once where the live entries of an index begin, and remembers it when it is closed.
        first = (warm + 1) // 2
        for run in runs[:first]:
            run()
        keys.close()
        counters.opening()
        for run in runs[first:warm]:
            run()
        counters.begin()
        took = [_milliseconds(run) for run in runs[warm:]]
    counted = counters.end(times, times + warm - first)
    return Cost(name, rows, operation, statistics.median(took), _p99(took), counted)


def _batches(rows: int) -> int:
    return filling.expired_of(rows) // BATCH * 3 // 4


def _reap_all(url: str) -> None:
    with closing(store(url)) as keys:
        while keys.perform(Reap(BATCH, ABANDONED)).total:
            pass


def _milliseconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1000


def _p99(took: Sequence[float]) -> float:
    return sorted(took)[min(len(took) * 99 // 100, len(took) - 1)]


def _of(kind: type[Any], outcome: object) -> Any:
    if not isinstance(outcome, kind):
        raise TypeError(f"{outcome!r} is no {kind.__name__}.")
    return outcome


def _done(verdict: object) -> None:
    if verdict is not Verdict.DONE:
        raise RuntimeError(f"{verdict!r}")


HEAD = (
    "",
    "rows",
    "p50 ms",
    "p99 ms",
    "p99 of small",
    "entries",
    "rows read",
    "pages",
    "WAL",
    "full pages",
    "server ms",
)
EXPLAINED = """\
each figure is of one operation, on the average. p99 of small: the p99 as a multiple of that in the smallest table.
entries: of all indexes; rows read: of all tables (Redis: commands); pages: of 8 kB, from memory or disk (SQLite: kB
that the process read); WAL: bytes (SQLite: bytes written), with full pages after a checkpoint, which are counted, too.
server ms: time in PostgreSQL's executor, or in Redis' scripts."""


def listed(found: Growth) -> str:
    """Say it in tables."""
    lines = []
    for size in found.sizes:
        parts = ", ".join(f"{name} {each:.0f}" for name, each in size.parts.items())
        lines.append(f"{size.store}, {size.rows:,} keys: {sum(size.parts.values()):.0f} bytes a key ({parts})")
    rows: list[tuple[str, ...]] = [HEAD]
    least: dict[tuple[str, str], float] = {}
    for cost in sorted(found.costs, key=lambda each: (each.store, _places(found)[each.operation], each.rows)):
        small = least.setdefault((cost.store, cost.operation), cost.p99)
        times = (f"{cost.p50:.2f}", f"{cost.p99:.2f}", f"{cost.p99 / small:.2f}")
        work = cost.work
        figures = (work.entries, work.rows, work.pages, work.written, work.full_pages, work.server_ms)
        rows.append((f"{cost.store}, {cost.operation}", f"{cost.rows:,}", *times, *map(_figure, figures)))
    return "\n".join([*lines, "", *aligned(rows), "", EXPLAINED])


def _places(found: Growth) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(each.operation for each in found.costs))}


def _figure(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}" if figure < 10 else f"{figure:,.0f}"


def as_json(found: Growth) -> str:
    """Say it for programs."""
    return json.dumps(asdict(found), indent=2)


@contextmanager
def _postgres(rows: int, dead: int) -> Iterator[tuple[str, Counters]]:
    with ExitStack() as stack:
        server = stack.enter_context(servers.postgres(settings=SETTINGS))
        _migrate(server.url)
        counters = PostgresCounters(server.url)
        stack.callback(counters.close)
        if dead:
            stack.enter_context(vacuum_held_back(server.url))
            filling.leave_dead_rows(server.url, dead)
            _reap_all(server.url)
        filling.fill_postgres(server.url, rows)
        _follow(server.url)
        yield server.url, counters


@contextmanager
def _sqlite(rows: int, dead: int) -> Iterator[tuple[str, Counters]]:
    del dead  # A file has none.
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        url = f"sqlite:///{Path(folder) / 'semel.db'}"
        _migrate(url)
        filling.fill_sqlite(url, rows)
        yield url, SqliteCounters(url)


@contextmanager
def _redis(rows: int, dead: int) -> Iterator[tuple[str, Counters]]:
    del dead  # A hash that is deleted is gone.
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "everysec"}) as server:
        filling.fill_redis(server.url, rows)
        yield server.url, RedisCounters(server.url)


def _migrate(url: str) -> None:
    with closing(store(url)) as keys:
        keys.migrate()


def _follow(url: str) -> None:
    """Let the services have walked along the table, and the primary key be in memory, as after an hour of its life."""
    with closing(store(url)) as keys, psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(_FOLLOWED).fetchone() != (True,):
            keys.perform(FindStuck(1))
        connection.execute("SET enable_seqscan = off")
        connection.execute("SELECT count(*) FROM (SELECT scope, key FROM semel_keys ORDER BY scope, key) AS walked")


_FILLED: dict[str, Callable[[int, int], Any]] = {"postgres": _postgres, "sqlite": _sqlite, "redis": _redis}
STORES = tuple(_FILLED)
#: How many rows, unless told.
SIZES = {"postgres": (10_000, 1_000_000, 10_000_000), "sqlite": (10_000, 1_000_000), "redis": (10_000, 1_000_000)}

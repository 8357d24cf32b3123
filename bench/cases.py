"""What is measured, and what is hoped for. The figures are targets of the project, not promises to anybody.

Three phases are to cost no more than their three commits and a quarter: 0.80 of the throughput.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Where keys are kept. The last two are PostgreSQL with finished answers in front of it: in Redis and in the process's
#: own memory, or in Redis alone.
StoreKind = Literal["PostgreSQL", "SQLite", "Redis", "tiered", "tiered, Redis only"]
#: Those that can't be measured where there is no Redis.
WITH_REDIS = frozenset[StoreKind | None]({"Redis", "tiered", "tiered, Redis only"})
#: Those whose keys are in PostgreSQL, whatever is in front of it.
IN_POSTGRES = frozenset[StoreKind | None]({"PostgreSQL", "tiered", "tiered, Redis only"})

#: What the handler does: nothing but answer; one INSERT by itself, or in atomic mode; three INSERTs that commit one by
#: one, or as three phases.
Work = Literal["nothing", "insert", "atomic", "commits", "phases"]


@dataclass(frozen=True, slots=True)
class Case:
    """One server under one kind of load."""

    #: As it is typed after ``--only``.
    name: str
    title: str
    #: Where the keys are kept; None: nothing is guarded.
    store: StoreKind | None = None
    work: Work = "nothing"
    #: Whose view it is: an async one of Starlette's under uvicorn, or a sync one of Django's under gunicorn.
    framework: Literal["Starlette", "Django"] = "Starlette"
    #: Whether its keys are used already, and go round.
    replays: bool = False
    #: The case it is compared with, and the least part of that one's throughput that is left.
    baseline: str = "bare"
    target: float | None = None

    @property
    def writes(self) -> bool:
        """Whether the handler uses a database of its own, PostgreSQL's."""
        return self.work != "nothing"


BARE = Case("bare", "bare")
CASES = (
    BARE,
    Case("postgres-first", "PostgreSQL, first", "PostgreSQL", target=0.55),
    Case("postgres-replay", "PostgreSQL, replay", "PostgreSQL", replays=True, target=0.75),
    Case("sqlite-first", "SQLite, first", "SQLite", target=0.50),
    Case("sqlite-replay", "SQLite, replay", "SQLite", replays=True, target=0.75),
    Case("redis-first", "Redis, first", "Redis", target=0.55),
    Case("redis-replay", "Redis, replay", "Redis", replays=True, target=0.80),
    Case("tiered-replay", "tiered, replay", "tiered", replays=True, target=0.85),
    Case("tiered-redis-replay", "Redis front, replay", "tiered, Redis only", replays=True),
    Case("insert", "one INSERT", work="insert", baseline="insert"),
    Case("insert-guard", "one INSERT, guard", "PostgreSQL", "insert", baseline="insert", target=0.75),
    Case("insert-atomic", "one INSERT, atomic", "PostgreSQL", "atomic", baseline="insert", target=0.75),
    Case("commits", "three commits", work="commits", baseline="commits"),
    Case("phases", "three phases", "PostgreSQL", "phases", baseline="commits", target=0.80),
    Case("django", "Django, one INSERT", None, "insert", "Django", baseline="django"),
    Case("django-guard", "Django, guard", "PostgreSQL", "insert", "Django", baseline="django"),
    Case("django-atomic", "Django, atomic", "PostgreSQL", "atomic", "Django", baseline="django"),
)

WAL_TARGET_BYTES = 0.0
GROWTH_TARGET_MB = 20.0
#: However many wait for one key: the statements of all of them together, and how much slower other keys may be.
WAITING_TARGET_PER_SECOND = 1.0
WAITING_TARGET_RATIO = 1.5
#: From the death of a worker to the answer that a retry gets, where the store tells the dead from the slow.
RECOVERY_TARGET_SECONDS = 1.0

#: What is measured beside the cases, as it is typed after ``--only``.
Extra = Literal["waiters", "recovery"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cases: tuple[Case, ...] = CASES
    extras: tuple[Extra, ...] = EXTRAS
    connections: int = 64
    rounds: int = 5
    #: Of each case, in each round.
    seconds: float = 3.0
    #: Over how many keys replays go round.
    replayed_keys: int = 10_000
    #: How many new keys a server is given while its memory is watched.
    growth_keys: int = 100_000
    #: Before anything is counted: connections are opened, statements prepared, code is warm.
    warm_up_requests: int = 1_000
    #: How many lone requests their statements are counted over.
    counted_requests: int = 200
    #: How many wait for one key, and how long each thing that is measured of them takes, in each round.
    waiters: int = 1_000
    waiting_seconds: float = 6.0
    waiting_rounds: int = 3
    #: After which a connection of PostgreSQL's that has nothing to do has reported all that it did: ten seconds.
    settling_seconds: float = 11.0
    #: How many requests a second, with other keys, are sent beside them: a small part of what the server can do.
    beside_per_second: float = 200.0
    #: How many workers are killed, with each lease.
    recoveries: int = 7
    #: With the store's word for who is alive, and without it: the shorter, since it is waited for.
    lease_seconds: float = 30.0
    short_lease_seconds: float = 3.0
    #: "auto" is wrk if it is there.
    sender: Literal["auto", "wrk", "own"] = "auto"


#: Enough to see whether something is badly wrong, in a few minutes.
QUICK = Plan(
    rounds=2,
    seconds=1.0,
    replayed_keys=2_000,
    growth_keys=10_000,
    waiting_rounds=1,
    waiting_seconds=2.0,
    recoveries=2,
    short_lease_seconds=1.0,
)

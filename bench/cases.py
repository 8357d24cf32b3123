"""What is measured, and the goals. They are goals of the project, not promises; no test asserts a figure of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: Where keys are kept. The last is PostgreSQL with finished answers in front of it, in Redis and in memory.
StoreKind = Literal["PostgreSQL", "SQLite", "Redis", "tiered"]
#: Those that can't be measured where there is no Redis.
WITH_REDIS = frozenset[StoreKind | None]({"Redis", "tiered"})
#: Those that keep their keys in PostgreSQL.
IN_POSTGRES = frozenset[StoreKind | None]({"PostgreSQL", "tiered"})

#: What the handler does: nothing but answer; guard itself by two statements written by hand; write one row in a
#: transaction of its own, or in atomic mode; write three rows in three transactions, or in three phases.
Work = Literal["nothing", "control", "transaction", "atomic", "commits", "phases"]


@dataclass(frozen=True, slots=True)
class Case:
    """One server under one kind of load."""

    #: As it is typed after ``--only``.
    name: str
    title: str
    #: Where the keys are kept; None: Semel is not there.
    store: StoreKind | None = None
    work: Work = "nothing"
    #: An async view of Starlette's under uvicorn, or a sync one of Django's under gunicorn.
    framework: Literal["Starlette", "Django"] = "Starlette"
    #: Whether its keys are used already, and go round.
    replays: bool = False
    #: The case it is compared with, and the part of that one's throughput to reach first, then.
    baseline: str = "bare"
    goal: float | None = None
    then: float | None = None

    @property
    def has_database(self) -> bool:
        """Whether the handler uses a database of its own, PostgreSQL's."""
        return self.work != "nothing"

    @property
    def uses_postgres(self) -> bool:
        """Whether a request can reach PostgreSQL."""
        return self.has_database or self.store in IN_POSTGRES


CASES = (
    Case("bare", "bare"),
    Case("postgres-replay", "PostgreSQL, replay", "PostgreSQL", replays=True, goal=0.85, then=0.95),
    Case("redis-replay", "Redis, replay", "Redis", replays=True, goal=0.85, then=0.95),
    Case("tiered-replay", "tiered, replay", "tiered", replays=True, goal=0.90, then=0.95),
    Case("sqlite-replay", "SQLite, replay", "SQLite", replays=True, goal=0.75, then=0.95),
    Case("postgres-first", "PostgreSQL, first", "PostgreSQL", goal=0.45, then=0.60),
    Case("redis-first", "Redis, first", "Redis", goal=0.50, then=0.60),
    Case("sqlite-first", "SQLite, first", "SQLite", goal=0.35, then=0.60),
    Case("control-replay", "by hand, replay", work="control", replays=True),
    Case("control-first", "by hand, first", work="control"),
    Case("transaction", "one transaction", work="transaction", baseline="transaction"),
    Case("transaction-guard", "  guard", "PostgreSQL", "transaction", baseline="transaction", goal=0.60, then=0.80),
    Case("transaction-atomic", "  atomic", "PostgreSQL", "atomic", baseline="transaction", goal=0.60, then=0.80),
    Case("commits", "three commits", work="commits", baseline="commits"),
    Case("phases", "  three phases", "PostgreSQL", "phases", baseline="commits", goal=0.50, then=0.75),
    Case("django", "Django, one INSERT", None, "transaction", "Django", baseline="django"),
    Case("django-guard", "  guard", "PostgreSQL", "transaction", "Django", baseline="django"),
    Case("django-atomic", "  atomic", "PostgreSQL", "atomic", "Django", baseline="django"),
)
NAMES = {case.name: case for case in CASES}


@dataclass(frozen=True, slots=True)
class Match:
    """A case against the code written by hand. The goals are for one connection."""

    title: str
    case: str
    control: str
    goal: float = 0.80
    then: float = 0.90


MATCHES = (
    Match("first / by hand", "postgres-first", "control-first"),
    Match("replay / by hand", "postgres-replay", "control-replay"),
)

#: PostgreSQL's processor time for a first execution, in microseconds: to reach first, then.
POSTGRES_US_GOAL = 70.0
POSTGRES_US_THEN = 45.0
GROWTH_GOAL_MB = 20.0
#: However many wait for one key: the statements of all of them together, and how much slower other keys may be.
WAITING_GOAL_PER_SECOND = 1.0
WAITING_GOAL_RATIO = 1.5
#: From the death of a worker to the answer that a retry gets, where the store tells the dead from the slow.
RECOVERY_GOAL_SECONDS = 1.0

#: What is measured beside the cases, as it is typed after ``--only``.
Extra = Literal["calls", "memory", "waiters", "recovery"]
EXTRAS: tuple[Extra, ...] = get_args(Extra)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    cases: tuple[Case, ...] = CASES
    extras: tuple[Extra, ...] = EXTRAS
    connections: int = 64
    rounds: int = 5
    #: Of each case, in each round: under load, and over one connection.
    seconds: float = 2.0
    lone_seconds: float = 0.5
    #: Over how many keys replays go round.
    replayed_keys: int = 10_000
    #: How many new keys a server is given while its memory is watched.
    growth_keys: int = 30_000
    #: Before anything is counted: connections are opened, statements prepared, code is warm.
    warm_up_requests: int = 1_000
    #: How many lone requests their round trips and statements are counted over.
    counted_requests: int = 200
    #: How many wait for one key, and how long each thing that is measured of them takes, in each round.
    waiters: int = 1_000
    waiting_seconds: float = 4.0
    waiting_rounds: int = 2
    #: After which a connection of PostgreSQL's that has nothing to do has reported all that it did: ten seconds.
    settling_seconds: float = 11.0
    #: How many requests a second, with other keys, are sent beside them: a small part of what the server can do.
    beside_per_second: float = 200.0
    #: How many workers are killed, with each lease.
    recoveries: int = 5
    #: With the store's word for which worker is alive, and without it: the shorter, since it is waited for.
    lease_seconds: float = 30.0
    short_lease_seconds: float = 2.0
    #: "auto" is wrk if it is there.
    sender: Literal["auto", "wrk", "own"] = "auto"
    #: Whether servers have one core, and databases and load the others.
    pins: bool = True


#: Enough to see whether something is badly wrong, in two minutes.
QUICK = Plan(
    extras=("calls",),
    rounds=2,
    seconds=1.0,
    lone_seconds=0.4,
    replayed_keys=2_000,
    growth_keys=10_000,
    warm_up_requests=500,
    counted_requests=100,
    waiting_rounds=1,
    waiting_seconds=2.0,
    recoveries=2,
    short_lease_seconds=1.0,
)

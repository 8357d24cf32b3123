"""A store with records in every plight, whose clock can be moved. Two handles on it are two processes' worth."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg

from semel import stores
from semel.core.commands import Browse, Claim, Complete, Save
from semel.core.message import Answer
from semel.core.record import AfterRetention, Hold, OnCrash, Record
from semel.core.recovery import Begun, Done, Progress
from semel.core.state import Event, State
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore

T = TypeVar("T")

DAY = timedelta(days=1)
LONG = timedelta(hours=1)
#: As a lease or a retention: over by the time of the next statement.
OVER = timedelta(microseconds=1)
CREATED = Answer(201, ((b"location", b"/charges/1"),), b'{"id": 1}')

KEY_TIMES = ("created_at", "lease_expires_at", "completed_at", "expires_at")


@dataclass
class World:
    """How to open the store, and how to make everything in it older."""

    open: Callable[[], Store]
    open_async: Callable[[], AsyncStore]
    age: Callable[[timedelta], None]
    scope: str = field(default_factory=lambda: f"scope-{uuid4().hex}")

    def claim(
        self,
        store: Store,
        key: str,
        *,
        lease: timedelta = LONG,
        retention: timedelta = DAY,
        on_crash: OnCrash = "rerun",
        after_retention: AfterRetention = "delete",
    ) -> Hold:
        claim = Claim(self.scope, key, uuid4().bytes, b"f", lease, retention, on_crash, after_retention)
        hold = store.perform(claim)
        assert isinstance(hold, Hold)
        return hold

    def finish(self, store: Store, key: str, **settings: Any) -> Hold:
        hold = self.claim(store, key, **settings)
        store.perform(Complete(hold, Event.COMPLETE, CREATED))
        return hold

    def save(self, store: Store, hold: Hold, *steps: Done | Begun) -> None:
        store.perform(Save(hold, Progress(steps)))

    def records(self, store: Store) -> dict[str, Record]:
        return {record.key: record for record in store.perform(Browse(limit=10_000, scope=self.scope))}

    def states(self, store: Store) -> dict[str, State]:
        return {key: record.state for key, record in self.records(store).items()}


def race(world: World, *jobs: Callable[[Store], T]) -> list[T]:
    """Do all *jobs* at once, each through a handle of its own; return what came of each."""
    barrier = Barrier(len(jobs))

    def do(job: Callable[[Store], T]) -> T:
        with closing(world.open()) as store:
            store.open()
            barrier.wait()
            return job(store)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(do, jobs))


def memory_world() -> World:
    ahead = [timedelta(0)]
    memory = MemoryStore(clock=lambda: datetime.now(UTC) + ahead[0])  # noqa: TID251 - it has no other

    def age(duration: timedelta) -> None:
        ahead[0] += duration

    return World(lambda: memory, lambda: AsyncMemoryStore(memory=memory), age)


def sqlite_world(url: str) -> World:
    def age(duration: timedelta) -> None:
        milliseconds = duration // timedelta(milliseconds=1)
        with closing(sqlite3.connect(urlsplit(url).path[1:], timeout=60)) as connection, connection:
            for statement in _ageing(f"- {milliseconds}"):
                connection.execute(statement)

    with closing(stores.store(url)) as store:
        store.migrate()
    return World(lambda: stores.store(url), lambda: stores.async_store(url), age)


def postgres_world(url: str) -> World:
    def age(duration: timedelta) -> None:
        with psycopg.connect(url) as connection:
            earlier = f"- interval '{duration.total_seconds()} seconds'"
            for statement in (*_ageing(earlier), f"UPDATE semel_keys_watermark SET swept_to = swept_to {earlier}"):
                connection.execute(statement.encode())

    with closing(stores.store(url)) as store:
        store.migrate()
    return World(lambda: stores.store(url), lambda: stores.async_store(url), age)


def _ageing(earlier: str) -> tuple[str, str]:
    keys = ", ".join(f"{time} = {time} {earlier}" for time in KEY_TIMES)
    return f"UPDATE semel_keys SET {keys}", f"UPDATE semel_audit SET at = at {earlier}"

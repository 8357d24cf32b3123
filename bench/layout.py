"""What a key takes on PostgreSQL by how full its pages are at first: ``python -m bench layout``. It measures bytes and
heap-only updates, and no time.

Keys are claimed and answered as by an application with so many requests at once, and finished as by atomic mode.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import psycopg

from bench import filling
from bench.counters import SETTINGS, PostgresCounters
from bench.growth import LEASE, RETENTION
from bench.table import aligned
from semel.core.commands import Begin, Claim, Complete, Finish
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores import AsyncStore, async_store, store
from tests.kit import servers

FACTORS = (40, 50, 60, 70, 85, 100)
KEYS, AT_ONCE = 10_000, 64


@dataclass(frozen=True)
class Laid:
    """What one key takes: bytes of the heap, of all indexes, of WAL; and which part of the updates was HOT."""

    mode: str
    fillfactor: int
    at_once: int
    heap: float
    indexes: float
    wal: float
    hot: float | None


def measure_layout(factors: Sequence[int] = FACTORS, keys: int = KEYS) -> list[Laid]:
    """Fill a table of each kind."""
    asked = [("guard", 1, keys // 10), ("guard", AT_ONCE, keys), ("atomic", AT_ONCE, keys)]
    with servers.postgres(settings=SETTINGS | {"full_page_writes": "off"}) as server:
        return [_laid(server.url, *each, factor) for each in asked for factor in factors]


def _laid(server: str, mode: str, at_once: int, keys: int, factor: int) -> Laid:
    name = f"laid_{mode}_{factor}_{at_once}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    url = urlsplit(server)._replace(path=f"/{name}").geturl()
    migrating = store(url)
    migrating.migrate()
    migrating.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE semel_keys SET (fillfactor = {factor})".encode())
        before = _wal(connection)
        asyncio.run(_run(url, mode, at_once, keys))
        wal = _wal(connection) - before
        counters = PostgresCounters(url)
        sizes = counters.sizes()
        counters.close()
        connection.execute("SELECT pg_stat_force_next_flush()")
        [(updated, hot)] = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'semel_keys'"
        ).fetchall()
    heap = sizes.pop("semel_keys") / keys
    return Laid(mode, factor, at_once, heap, sum(sizes.values()) / keys, wal / keys, hot / updated if updated else None)


def _wal(connection: psycopg.Connection[tuple[int, ...]]) -> int:
    return int(connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()[0][0])


async def _run(url: str, mode: str, at_once: int, keys: int) -> None:
    opened = async_store(url)
    numbers = iter(range(keys))

    async def work() -> None:
        for number in numbers:
            claim = Claim(
                filling.scope_of(number),
                filling.key_of(number),
                os.urandom(16),
                filling.FINGERPRINT,
                LEASE,
                RETENTION,
                request_line=filling.REQUEST_LINE,
            )
            await (_guard if mode == "guard" else _atomic)(opened, claim)

    await asyncio.gather(*(work() for _ in range(at_once if mode == "guard" else 8)))
    await opened.close()


async def _guard(opened: AsyncStore, claim: Claim) -> None:
    hold = await opened.perform(claim)
    if not isinstance(hold, Hold):
        raise TypeError
    await opened.perform(Complete(hold, Event.COMPLETE, filling.ANSWER))


async def _atomic(opened: AsyncStore, claim: Claim) -> None:
    lent = opened.transaction()
    hold = await lent.perform(Begin(claim))
    if not isinstance(hold, Hold):
        raise TypeError
    await lent.perform(Finish(claim, hold, None, Event.COMPLETE, filling.ANSWER))


def listed(found: list[Laid]) -> str:
    """Say it in a table."""
    rows: list[tuple[str, ...]] = [("", "fillfactor", "at once", "heap", "indexes", "WAL", "HOT")]
    rows += [
        (
            each.mode,
            str(each.fillfactor),
            str(each.at_once),
            f"{each.heap:.0f}",
            f"{each.indexes:.0f}",
            f"{each.wal:.0f}",
            "" if each.hot is None else f"{each.hot:.0%}",
        )
        for each in found
    ]
    return "\n".join([*aligned(rows), "", "bytes a key; WAL without full pages. at once: requests in progress."])


def as_json(found: list[Laid]) -> str:
    """Say it for programs."""
    return json.dumps([asdict(each) for each in found], indent=2)

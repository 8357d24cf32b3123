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
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores import AsyncStore, async_store, store
from tests.kit import servers

FACTORS = (40, 50, 60, 70, 85, 100)
KEYS, AT_ONCE = 10_000, 64
SMALL = Answer(
    201,
    ((b"content-type", b"application/json"),),
    b'{"id":"order_17","amount":24900,"currency":"EUR","state":"open"}',
)


@dataclass(frozen=True)
class Kind:
    """How keys are written: so many, of which so many at once."""

    mode: str
    answer: Answer
    at_once: int
    keys: int


@dataclass(frozen=True)
class Laid:
    """What one key takes: bytes of the heap, of all indexes, of WAL; and which part of the updates was HOT."""

    mode: str
    #: Bytes of the answer's body.
    body: int
    fillfactor: int
    at_once: int
    heap: float
    indexes: float
    wal: float
    hot: float | None


def measure_layout(factors: Sequence[int] = FACTORS, keys: int = KEYS) -> list[Laid]:
    """Fill a table of each kind."""
    few, large, small = keys // 10, filling.ANSWER, SMALL
    asked = [
        Kind("guard", large, 1, few),
        Kind("guard", large, AT_ONCE, keys),
        Kind("guard", small, 8, keys),
        Kind("guard", small, AT_ONCE, keys),
        Kind("atomic", large, AT_ONCE, keys),
    ]
    with servers.postgres(settings=SETTINGS | {"full_page_writes": "off"}) as server:
        return [_laid(server.url, each, factor) for each in asked for factor in factors]


def _laid(server: str, kind: Kind, factor: int) -> Laid:
    body, keys = len(kind.answer.body or b""), kind.keys
    name = f"laid_{kind.mode}_{body}_{factor}_{kind.at_once}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    url = urlsplit(server)._replace(path=f"/{name}").geturl()
    migrating = store(url)
    migrating.migrate()
    migrating.close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE semel_keys SET (fillfactor = {factor})".encode())
        before = _wal(connection)
        asyncio.run(_run(url, kind))
        wal = _wal(connection) - before
        counters = PostgresCounters(url)
        sizes = counters.sizes()
        counters.close()
        connection.execute("SELECT pg_stat_force_next_flush()")
        [(updated, hot)] = connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'semel_keys'"
        ).fetchall()
    heap, hot_share = sizes.pop("semel_keys") / keys, hot / updated if updated else None
    return Laid(kind.mode, body, factor, kind.at_once, heap, sum(sizes.values()) / keys, wal / keys, hot_share)


def _wal(connection: psycopg.Connection[tuple[int, ...]]) -> int:
    return int(connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchall()[0][0])


async def _run(url: str, kind: Kind) -> None:
    opened = async_store(url)
    numbers = iter(range(kind.keys))
    perform = _guard if kind.mode == "guard" else _atomic

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
            await perform(opened, claim, kind.answer)

    await asyncio.gather(*(work() for _ in range(kind.at_once if kind.mode == "guard" else 8)))
    await opened.close()


async def _guard(opened: AsyncStore, claim: Claim, answer: Answer) -> None:
    hold = await opened.perform(claim)
    if not isinstance(hold, Hold):
        raise TypeError
    await opened.perform(Complete(hold, Event.COMPLETE, answer))


async def _atomic(opened: AsyncStore, claim: Claim, answer: Answer) -> None:
    lent = opened.transaction()
    hold = await lent.perform(Begin(claim))
    if not isinstance(hold, Hold):
        raise TypeError
    await lent.perform(Finish(claim, hold, None, Event.COMPLETE, answer))


def listed(found: list[Laid]) -> str:
    """Say it in a table."""
    rows: list[tuple[str, ...]] = [("", "body", "fillfactor", "at once", "heap", "indexes", "WAL", "HOT")]
    rows += [
        (
            each.mode,
            str(each.body),
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

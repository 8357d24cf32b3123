"""What messages cost: ``python -m bench messages``. Adding one to a business transaction, draining the outbox, the time
from COMMIT to the publisher, and what a claim reads in large and in bloated tables. Requests are measured elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import asyncpg
import psycopg

from bench.calls import Trace
from bench.databases import DURABLE
from bench.wire import Wire
from semel.core.outbox import BROKER_SCHEDULE, Delivered, Ending, Message, Schedule, Verdict
from semel.flows.relay import MAX_BATCH
from semel.inbox import AsyncInbox
from semel.outbox import Outbox
from semel.publishers import publisher
from semel.publishers.discard import Discard
from semel.stores import AsyncStore, async_store, store
from semel.work import AsyncWorkers
from semel.work.relay import AsyncRelay
from tests.kit import servers

CONNECTIONS = 64
ROUNDS, SECONDS = 5, 3.0
DRAINED = 30_000
TOLD = 500
PENDING = 1_000_000
DEAD = 100_000
CLAIMS = 40
WARM_UP = 6
COUNTED_BATCH, COUNTED_PASSES = 100, 9

_SHOP = """
CREATE TABLE accounts (id integer PRIMARY KEY, balance integer NOT NULL);
INSERT INTO accounts SELECT number, 0 FROM generate_series(1, 100000) AS number;
CREATE TABLE tellers (LIKE accounts INCLUDING ALL);
INSERT INTO tellers SELECT * FROM accounts;
CREATE TABLE branches (LIKE accounts INCLUDING ALL);
INSERT INTO branches SELECT * FROM accounts;
CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account integer, total integer, note text);
"""
_ORDER = "INSERT INTO orders (account, total, note) VALUES ($1, 5, repeat('n', 100))"
#: Between BEGIN and COMMIT, each statement by itself. The second has the shape of pgbench's own transaction.
_BUSINESS = {
    "two statements": ("UPDATE accounts SET balance = balance + 1 WHERE id = $1", _ORDER),
    "five statements": (
        "UPDATE accounts SET balance = balance + 1 WHERE id = $1",
        "SELECT balance FROM accounts WHERE id = $1",
        "UPDATE tellers SET balance = balance + 1 WHERE id = $1",
        "UPDATE branches SET balance = balance + 1 WHERE id = $1",
        _ORDER,
    ),
}
_FILL = """
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, payload)
SELECT gen_random_uuid(), 'events', CASE WHEN %s THEN 'order-' || number %% 1000 END, 'order.paid', 'application/json',
       convert_to('{"order": 17}', 'UTF8')
  FROM generate_series(1, %s) AS number
"""
_WRITTEN = "SELECT n_tup_upd, n_tup_hot_upd, n_tup_del FROM pg_stat_user_tables WHERE relname = 'semel_outbox'"
_READ = """
SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'semel_outbox'),
       (SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'semel_outbox')
"""


def measure_messages() -> dict[str, Any]:
    """Measure everything; it takes some minutes."""
    facts: dict[str, Any] = {}
    with servers.postgres(settings=DURABLE) as server:
        url = server.url
        with closing(store(url)) as opened:
            opened.migrate()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_SHOP)
        facts["add"] = asyncio.run(_added(url))
        _empty(url)
        before = _written(url)
        facts["drain"] = {
            "no-op, without keys": asyncio.run(_drained(url, keyed=False)),
            "no-op, 1,000 keys": asyncio.run(_drained(url, keyed=True)),
        }
        counts = (after - earlier for earlier, after in zip(before, _written(url), strict=True))
        facts["rows"] = dict(zip(("updated", "of it heap-only", "deleted"), counts, strict=True))
        with suppress(servers.NoServerBinary), servers.rabbitmq() as rabbit:
            facts["drain"]["RabbitMQ, confirmed"] = asyncio.run(_to_rabbitmq(url, rabbit.url))
        facts["latency"] = asyncio.run(_told(url))
        facts["claims"] = asyncio.run(_claimed(url))
        _empty(url)
        facts["counted"] = asyncio.run(_counted(url))
    return facts


def listed(facts: dict[str, Any]) -> str:
    """Write the figures for people."""
    latency = facts["latency"]
    lines = [
        f"add to a transaction of {name}, {CONNECTIONS} connections: {add['with']:,.0f}/s of {add['without']:,.0f}/s = "
        f"{add['ratio']:.2f} (SELECT 1 in its place: {add['ratio of SELECT 1']:.2f})"
        for name, add in facts["add"].items()
    ]
    lines += [f"drained, {name}: {rate:,.0f} messages/s" for name, rate in facts["drain"].items()]
    lines.append(
        "written for each message: 1 row in the application's statement; in the relay's two for each batch of "
        f"{MAX_BATCH}, " + ", ".join(f"{count / (2 * DRAINED):.2f} {name}" for name, count in facts["rows"].items())
    )
    for name, prefix in (("100/s", ""), ("to a relay that sleeps", "idle ")):
        p50, p99 = latency[f"{prefix}p50"] * 1000, latency[f"{prefix}p99"] * 1000
        lines.append(f"COMMIT to publisher, {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    for name, each in facts["claims"].items():
        read = f"{each['index entries']:.0f} index entries read"
        lines.append(f"claim and settle of 10, {name}: {each['milliseconds']:.2f} ms, {read}")
    for name, each in facts["counted"].items():
        lines.append(
            f"{name}: {each['trips']} round trips, {each['statements']} statements, {each['calls']} calls of ours"
        )
    return "\n".join(lines)


def as_json(facts: dict[str, Any]) -> str:
    """Write the figures for programs."""
    return json.dumps(facts, indent=2)


async def _added(url: str) -> dict[str, dict[str, float]]:
    """Measure transactions, the same with one more SELECT 1, and the same with a message."""
    pool = await asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS)
    outbox = Outbox(url)

    async def message(connection: Any, number: int) -> None:
        await outbox.add(connection, "order.paid", {"order": number}, key=f"order-{number}")

    async def nothing_else(connection: Any, _number: int) -> None:
        await connection.fetchval("SELECT 1")

    async def rate(business: Sequence[str], more: Any) -> float:
        count, end = 0, time.perf_counter() + SECONDS

        async def client(number: int) -> None:
            nonlocal count
            async with pool.acquire() as connection:
                while time.perf_counter() < end:
                    async with connection.transaction():
                        for statement in business:
                            await connection.fetch(statement, number % 100_000 + 1)
                        if more is not None:
                            await more(connection, number)
                    number += CONNECTIONS
                    count += 1

        await asyncio.gather(*(client(number) for number in range(CONNECTIONS)))
        return count / SECONDS

    facts = {}
    for name, business in _BUSINESS.items():
        kinds = (None, nothing_else, message)
        rounds = [[await rate(business, kind) for kind in kinds] for _ in range(ROUNDS + 1)][1:]
        facts[name] = {
            "without": statistics.median(without for without, _, _ in rounds),
            "with": statistics.median(with_ for _, _, with_ in rounds),
            "ratio": statistics.median(with_ / without for without, _, with_ in rounds),
            "ratio of SELECT 1": statistics.median(select / without for without, select, _ in rounds),
        }
    await pool.close()
    return facts


async def _drained(url: str, *, keyed: bool) -> float:
    _fill(url, DRAINED, keyed=keyed)
    async with _relay(url, Discard("events", "discard://")) as relay:
        began = time.perf_counter()
        report = await relay.run_once()
        assert report.sent == DRAINED, report  # noqa: S101 - a figure of less is none
        return DRAINED / (time.perf_counter() - began)


async def _to_rabbitmq(url: str, broker: str) -> float:
    import aio_pika  # noqa: PLC0415 - where there is a RabbitMQ

    connection = await aio_pika.connect(broker)
    channel = await connection.channel()
    await channel.declare_queue("events", durable=True)
    _fill(url, DRAINED, keyed=False)
    async with _relay(url, publisher("events", broker)) as relay:
        began = time.perf_counter()
        report = await relay.run_once()
        assert report.sent == DRAINED, report  # noqa: S101 - as above
        took = time.perf_counter() - began
    await connection.close()
    return DRAINED / took


class _Noting:
    """Notes when each message came."""

    schedule: Schedule = BROKER_SCHEDULE

    def __init__(self) -> None:
        self.came: dict[str, float] = {}

    async def open(self) -> None:
        """Connect to nothing."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        now = time.perf_counter()
        self.came |= {message.id: now for message in messages}
        return [Delivered()] * len(messages)

    async def close(self) -> None:
        """Do nothing."""


async def _told(url: str) -> dict[str, float]:
    noting, outbox = _Noting(), Outbox(url)
    opened = async_store(url)
    workers = AsyncWorkers([AsyncRelay(opened, "events", noting)])
    workers.start()
    connection = await asyncpg.connect(url)

    async def one() -> tuple[str, float]:
        async with connection.transaction():
            made: str = await outbox.add(connection, "order.paid", {"order": 17})
        return made, time.perf_counter()

    facts: dict[str, float] = {}
    for name, count, pause in (("", TOLD, 0.01), ("idle ", TOLD // 25, 3.0)):
        added = []
        for _ in range(count):
            await asyncio.sleep(pause)
            added.append(await one())
        await asyncio.sleep(1.5)
        waited = sorted(max(0.0, noting.came[made] - at) for made, at in added)
        facts[f"{name}p50"] = statistics.median(waited)
        facts[f"{name}p99"] = waited[min(len(waited) - 1, int(len(waited) * 0.99))]
    await connection.close()
    await workers.stop()
    await opened.close()
    return facts


async def _claimed(url: str) -> dict[str, dict[str, float]]:
    facts = {}
    for name, pending, dead in (
        ("1,000 pending", 1000, 0),
        ("1,000,000 pending", PENDING, 0),
        ("1,000 pending, 100,000 dead rows", 1000, DEAD),
    ):
        _empty(url)
        with psycopg.connect(url) as idle:
            idle.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            idle.execute("SELECT count(*) FROM pg_class")
            if dead:
                _fill(url, dead, keyed=True)
                async with _relay(url, Discard("events", "discard://")) as relay:
                    await relay.run_once()
                    _fill(url, pending, keyed=True)
                    facts[name] = await _claims_of(url, relay)
            else:
                _fill(url, pending, keyed=True)
                async with _relay(url, Discard("events", "discard://")) as relay:
                    facts[name] = await _claims_of(url, relay)
    return facts


async def _claims_of(url: str, relay: AsyncRelay) -> dict[str, float]:
    for _ in range(WARM_UP):
        # Until the cursor has followed. A look from the beginning comes once in seconds, and is not what a claim reads.
        claimed = await relay.claim(10, aside=False)
        await relay.settle([_delivered(message) for message in claimed.messages])
    took = []
    before = _read(url)
    for _ in range(CLAIMS):
        began = time.perf_counter()
        claimed = await relay.claim(10, aside=False)
        await relay.settle([_delivered(message) for message in claimed.messages])
        took.append(time.perf_counter() - began)
    await asyncio.sleep(1.2)  # PostgreSQL tells its counters once a second.
    await relay.claim(1, aside=False)
    after = _read(url)
    return {
        "milliseconds": statistics.median(took) * 1000,
        "index entries": (after[0] - before[0]) / CLAIMS,
        "rows": (after[1] - before[1]) / CLAIMS,
    }


async def _counted(url: str) -> dict[str, dict[str, int]]:
    """Count what each path sends, and how many functions of Semel's it calls. Nothing can be timed in this process from
    here on.
    """
    trace = Trace()
    trace.install()
    facts = {}
    with Wire(url) as wire:
        address = wire.address(url)
        outbox, inbox = Outbox(address), AsyncInbox(address, consumer="parcels")
        connection = await asyncpg.connect(address)
        numbers = itertools.count()

        async def ship(_connection: Any) -> None:
            pass

        async def add(_number: int) -> None:
            await outbox.add(connection, "order.paid", {"order": 17}, key="order-17")

        async def relay_all(_number: int) -> None:
            _fill(url, COUNTED_BATCH, keyed=False)
            await relay.run_once()

        async def first(number: int) -> None:
            await inbox.receive(f"first-{number}", ship)

        async def again(_number: int) -> None:
            await inbox.receive("again", ship)

        async with _relay(address, Discard("events", "discard://")) as relay, connection.transaction():
            for name, path in (
                ("add", add),
                ("inbox, first delivery", first),
                ("inbox, redelivery", again),
                (f"relay, a batch of {COUNTED_BATCH}, and the look that finds no more", relay_all),
            ):
                seen = []
                for _ in range(COUNTED_PASSES):
                    before = wire.seen()
                    with trace.on():
                        await path(next(numbers))
                    after = wire.seen()
                    seen.append(
                        (after.trips - before.trips, after.statements - before.statements, trace.counts()["calls"])
                    )
                counts = (int(statistics.median_low(each)) for each in zip(*seen, strict=True))
                facts[name] = dict(zip(("trips", "statements", "calls"), counts, strict=True))
        await connection.close()
        await inbox.close()
    return facts


def _delivered(message: Message) -> Ending:
    return Ending(message.id, "delivered")


@asynccontextmanager
async def _relay(url: str, to: Any) -> AsyncIterator[AsyncRelay]:
    opened: AsyncStore = async_store(url)
    relay = AsyncRelay(opened, "events", to)
    try:
        yield relay
    finally:
        await relay.close()
        await opened.close()


def _fill(url: str, count: int, *, keyed: bool) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_FILL, [keyed, count])


def _empty(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE semel_outbox")


def _written(url: str) -> tuple[int, ...]:
    """How many rows were written so far, by all who have disconnected."""
    with psycopg.connect(url, autocommit=True) as connection:
        while len(connection.execute("SELECT FROM pg_stat_activity WHERE datname = current_database()").fetchall()) > 1:
            time.sleep(0.01)
        return tuple(connection.execute(_WRITTEN).fetchall()[0])


def _read(url: str) -> tuple[int, int]:
    with psycopg.connect(url, autocommit=True) as connection:
        entries, rows = connection.execute(_READ).fetchall()[0]
        return int(entries), int(rows)

"""The programs of docs/how-to/handle-messages-once.md run, and do what the page says."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import aio_pika
import psycopg
import pytest

from tests.docs.served import EXAMPLES, ROOT, load
from tests.inbox.consumers import until
from tests.kit import servers


@pytest.fixture(scope="module")
def rabbitmq_server() -> Iterator[servers.RabbitMQServer]:
    """A RabbitMQ for the examples."""
    with servers.rabbitmq() as server:
        yield server


def test_shop(tmp_path: Path) -> None:
    """Two orders of four deliveries are shipped; started again, none is."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", str(EXAMPLES / ("inbox_shop" + ".py"))]
    runs = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, again = (run.stdout.splitlines() for run in runs)
    refused = "evt-1 refused: another message under the same id"
    assert first == ["evt-1 Ran(result=1) ack", "evt-2 Ran(result=2) ack", "evt-1 Duplicate() ack", refused]
    assert again == ["evt-1 Duplicate() ack", "evt-2 Duplicate() ack", "evt-1 Duplicate() ack", refused]
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        assert shop.execute("SELECT count(*) FROM parcels").fetchone() == (2,)


@asynccontextmanager
async def by_aio_pika(broker: str, store: str) -> AsyncIterator[None]:
    consuming = asyncio.create_task(load("inbox_rabbitmq").consume(broker, store))
    yield
    consuming.cancel()
    await asyncio.wait([consuming])


@asynccontextmanager
async def by_faststream(_broker: str, _store: str) -> AsyncIterator[None]:
    example = load("inbox_faststream")
    async with example.inbox, example.broker:
        await example.broker.start()
        yield


@pytest.mark.parametrize("consuming", [by_aio_pika, by_faststream])
async def test_rabbitmq(
    consuming: Callable[[str, str], AbstractAsyncContextManager[None]],
    migrated_postgres_url: str,
    rabbitmq_server: servers.RabbitMQServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Orders that are in the queue twice, as the outbox's examples send them, are shipped once."""
    broker = rabbitmq_server.url
    monkeypatch.setenv("BROKER", broker)
    monkeypatch.setenv("SEMEL_STORE", migrated_postgres_url)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as shop:
        shop.execute("CREATE TABLE parcels (content text NOT NULL)")
        async with consuming(broker, migrated_postgres_url), await aio_pika.connect(broker) as connection:
            channel = await connection.channel(on_return_raises=True)
            for order in (17, 4, 17):
                body = json.dumps({"order": order}).encode()
                message = aio_pika.Message(body, message_id=f"paid-{order}", content_type="application/json")
                while True:
                    try:
                        await channel.default_exchange.publish(message, routing_key="events")
                        break
                    except aio_pika.exceptions.PublishError:  # The queue is not there yet.
                        await asyncio.sleep(0.02)
            await until(lambda: shop.execute("SELECT count(*) FROM semel_inbox").fetchone() == (2,))
            await channel.queue_delete("events")
        rows = shop.execute("SELECT content FROM parcels ORDER BY content").fetchall()
        assert rows == [("order 17",), ("order 4",)]

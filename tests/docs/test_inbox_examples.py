"""The programs of docs/how-to/handle-messages-once.md run, and do what the page says."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import aio_pika
import psycopg

from tests.docs.served import EXAMPLES, ROOT, load
from tests.inbox.consumers import until
from tests.kit import servers


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


async def test_rabbitmq(migrated_postgres_url: str) -> None:
    """Orders that are in the queue twice are shipped once, as is what the relay of the outbox's examples sends."""
    with servers.rabbitmq() as server, psycopg.connect(migrated_postgres_url, autocommit=True) as shop:
        shop.execute("CREATE TABLE parcels (content text NOT NULL)")
        consuming = asyncio.create_task(load("inbox_rabbitmq").consume(server.url, migrated_postgres_url))
        async with await aio_pika.connect(server.url) as connection:
            channel = await connection.channel(on_return_raises=True)
            for order in (17, 4, 17):
                body = json.dumps({"order": order}).encode()
                message = aio_pika.Message(body, message_id=f"paid-{order}")
                while True:
                    try:
                        await channel.default_exchange.publish(message, routing_key="events")
                        break
                    except aio_pika.exceptions.PublishError:  # The queue is not there yet.
                        await asyncio.sleep(0.02)
            await until(lambda: shop.execute("SELECT count(*) FROM semel_inbox").fetchone() == (2,))
        consuming.cancel()
        await asyncio.wait([consuming])
        rows = shop.execute("SELECT content FROM parcels ORDER BY content").fetchall()
        assert rows == [("order 17",), ("order 4",)]

"""Messages of a real RabbitMQ, received once: by aio-pika's callback, and through FastStream."""

import asyncio
import signal
import subprocess
import sys
from datetime import timedelta
from typing import Annotated, Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue
from faststream import Context
from faststream.exceptions import AckMessage
from faststream.rabbit import RabbitBroker, RabbitQueue

from semel.inbox import AsyncInbox
from semel.inbox import faststream as of_faststream
from semel.inbox.rabbitmq import once
from tests.inbox.consumers import execute, parcels, prepare, receipts, until
from tests.kit import servers

MESSAGES, COPIES = 20, 10
AT_ONCE = timedelta(0)
DEAD: Any = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@pytest.fixture
def url(postgres_url: str) -> str:
    prepare(postgres_url)
    return postgres_url


async def declared(channel: AbstractChannel, name: str) -> AbstractQueue:
    """An empty queue with dead letters, and the queue that these go to."""
    dead = await channel.declare_queue("dead", durable=True)
    await dead.purge()
    queue = await channel.declare_queue(name, durable=True, arguments=DEAD)
    await queue.purge()
    return queue


async def send(channel: AbstractChannel, queue: str, message_id: str, body: bytes = b"{}") -> None:
    message = aio_pika.Message(body, message_id=message_id, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, routing_key=queue)


async def until_empty(channel: AbstractChannel, queue: AbstractQueue, dead: int = 0) -> None:
    """Wait until every message was acked, or is dead."""
    while True:
        waiting = await channel.declare_queue(queue.name, passive=True)
        letters = await channel.declare_queue("dead", passive=True)
        counts = waiting.declaration_result.message_count, letters.declaration_result.message_count
        if counts == (0, dead):
            return
        await asyncio.sleep(0.02)


async def ship(connection: Any, message: Any) -> None:
    await connection.execute(f"INSERT INTO parcels VALUES ('{message.message_id}')")


async def test_once(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """Each message, published ten times and delivered by two consumers, makes one parcel; all are acked."""
    async with await aio_pika.connect(rabbitmq.url) as connection, AsyncInbox(url, consumer="billing") as inbox:
        channel = await connection.channel()
        await channel.set_qos(10)
        queue = await declared(channel, "orders")
        for number in range(MESSAGES * COPIES):
            await send(channel, "orders", f"m-{number % MESSAGES}")
        tags = [await queue.consume(once(inbox, ship, pause=AT_ONCE)) for _ in range(2)]
        await until_empty(channel, queue)
        await until(lambda: len(parcels(url)) == MESSAGES)
        for tag in tags:
            await queue.cancel(tag)
        await until_empty(channel, queue)
    assert receipts(url) == {f"m-{number}": ("done", 0) for number in range(MESSAGES)}


async def test_no_ack(rabbitmq: servers.RabbitMQServer, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer that acks before its handler runs is refused with its first message, and ended."""
    async with await aio_pika.connect(rabbitmq.url) as connection, AsyncInbox(url, consumer="billing") as inbox:
        channel = await connection.channel()
        queue = await declared(channel, "unacked")
        await queue.consume(once(inbox, ship), no_ack=True)
        await send(channel, "unacked", "m-1")
        await until(lambda: "Remove no_ack=True" in caplog.text)
        found = await channel.declare_queue("unacked", passive=True)
        assert found.declaration_result.consumer_count == 0
    assert (parcels(url), receipts(url)) == ([], {})


async def test_failures(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """A message that fails comes again, until it is parked; then it is a dead letter."""

    async def fail(connection: Any, message: Any) -> None:
        await ship(connection, message)
        raise ValueError("no stock")

    async with (
        await aio_pika.connect(rabbitmq.url) as connection,
        AsyncInbox(url, consumer="billing", max_attempts=3) as inbox,
    ):
        channel = await connection.channel()
        queue = await declared(channel, "failing")
        await send(channel, "failing", "m-1")
        tag = await queue.consume(once(inbox, fail, pause=AT_ONCE))
        await until_empty(channel, queue, dead=1)
        await queue.cancel(tag)
    assert receipts(url) == {"m-1": ("parked", 3)}
    assert parcels(url) == []


async def test_another_payload(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """Another payload under the same id is not run, and is a dead letter."""
    async with await aio_pika.connect(rabbitmq.url) as connection, AsyncInbox(url, consumer="billing") as inbox:
        channel = await connection.channel()
        queue = await declared(channel, "differing")
        await send(channel, "differing", "m-1", b"one")
        await send(channel, "differing", "m-1", b"other")
        await channel.set_qos(1)
        tag = await queue.consume(once(inbox, ship, pause=AT_ONCE))
        await until_empty(channel, queue, dead=1)
        await queue.cancel(tag)
    assert parcels(url) == ["m-1"]


async def test_an_outage_of_the_store(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """While the table is missing nothing is acked; when it is there again, the message is handled."""
    async with await aio_pika.connect(rabbitmq.url) as connection, AsyncInbox(url, consumer="billing") as inbox:
        execute(url, "ALTER TABLE semel_inbox RENAME TO elsewhere")
        channel = await connection.channel()
        queue = await declared(channel, "waiting")
        await send(channel, "waiting", "m-1")
        redelivered = asyncio.Event()
        callback = once(inbox, ship, pause=timedelta(milliseconds=20))

        async def watched(message: Any) -> None:
            if message.redelivered:
                redelivered.set()
            await callback(message)

        tag = await queue.consume(watched)
        await redelivered.wait()
        execute(url, "ALTER TABLE elsewhere RENAME TO semel_inbox")
        await until(lambda: parcels(url) == ["m-1"])
        await until_empty(channel, queue)
        await queue.cancel(tag)
    assert receipts(url) == {"m-1": ("done", 0)}


@pytest.mark.parametrize("place", ["in the handler", "after COMMIT"])
async def test_killed_before_the_ack(rabbitmq: servers.RabbitMQServer, url: str, place: str) -> None:
    """A consumer that is killed has acked nothing. RabbitMQ delivers the message again: one parcel."""
    async with await aio_pika.connect(rabbitmq.url) as connection, AsyncInbox(url, consumer="billing") as inbox:
        channel = await connection.channel()
        queue = await declared(channel, "killed")
        await send(channel, "killed", "m-1")
        killed = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "tests.inbox.dying_at_rabbitmq", rabbitmq.url, url, place],
            timeout=60,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        assert parcels(url) == (["m-1"] if place == "after COMMIT" else [])
        tag = await queue.consume(once(inbox, ship, pause=AT_ONCE))
        await until(lambda: parcels(url) == ["m-1"])
        await until_empty(channel, queue)
        await queue.cancel(tag)
        await until_empty(channel, queue)
    assert parcels(url) == ["m-1"]


async def test_faststream(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """Through FastStream's middleware: the handler has the connection, and each message has one parcel, or none."""
    inbox = AsyncInbox(url, consumer="billing", max_attempts=2)
    broker = RabbitBroker(rabbitmq.url, middlewares=[of_faststream.once(inbox, pause=AT_ONCE)], logger=None)
    calls: list[str] = []

    @broker.subscriber(RabbitQueue("streamed", durable=True, arguments=DEAD))
    async def handle(name: str, connection: Annotated[Any, Context(of_faststream.CONNECTION)]) -> None:
        calls.append(name)
        await connection.execute(f"INSERT INTO parcels VALUES ('{name}')")
        if name == "bad":
            raise ValueError("no stock")

    async with await aio_pika.connect(rabbitmq.url) as connection, inbox:
        channel = await connection.channel()
        queue = await declared(channel, "streamed")
        async with broker:
            await broker.start()
            for number in range(MESSAGES):
                await broker.publish(f"m-{number % 5}", "streamed", message_id=f"m-{number % 5}")
            await broker.publish("bad", "streamed", message_id="bad")
            await until_empty(channel, queue, dead=1)
            await until(lambda: len(receipts(url)) == 6)
    assert parcels(url) == [f"m-{number}" for number in range(5)]
    assert sorted(calls) == ["bad", "bad", *(f"m-{number}" for number in range(5))]
    assert receipts(url)["bad"] == ("parked", 2)


async def test_a_handler_of_faststream_that_acks(rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """A handler that ends by AckMessage has done its work: what it wrote is committed, then the message is acked."""
    inbox = AsyncInbox(url, consumer="billing")
    broker = RabbitBroker(rabbitmq.url, middlewares=[of_faststream.once(inbox, pause=AT_ONCE)], logger=None)

    @broker.subscriber(RabbitQueue("acking", durable=True, arguments=DEAD))
    async def handle(name: str, connection: Annotated[Any, Context(of_faststream.CONNECTION)]) -> None:
        await connection.execute(f"INSERT INTO parcels VALUES ('{name}')")
        raise AckMessage

    async with await aio_pika.connect(rabbitmq.url) as connection, inbox:
        channel = await connection.channel()
        queue = await declared(channel, "acking")
        async with broker:
            await broker.start()
            await broker.publish("m-1", "acking", message_id="m-1")
            await until(lambda: receipts(url) == {"m-1": ("done", 0)})
        await until_empty(channel, queue)
    assert parcels(url) == ["m-1"]

"""The consumer: packs one parcel for each paid order, in the transaction in which its inbox remembers the message.

It reads a queue of RabbitMQ or, where that is not installed, a stream of Redis. Its database is not the shop's.

    python -m examples.parcels.shipping amqp://… | redis://…
"""

import asyncio
import json
import os
import sys
from typing import Any

import asyncpg

from semel.inbox import AsyncInbox

#: As the relay's destination is called, and so the queue or the stream.
QUEUE = "orders"
#: As many are handled at once.
PREFETCH = 10

# No unique constraint, as in the shop.
TABLE = "CREATE TABLE IF NOT EXISTS parcels (id bigint GENERATED ALWAYS AS IDENTITY, order_id bigint, message_id text)"
INSERT = "INSERT INTO parcels (order_id, message_id) VALUES ($1, $2)"


class CountedInbox(AsyncInbox):
    """Says what came of each delivery, for the count at the end of the story: a real consumer needs no such thing."""

    async def receive(self, message_id: str, *args: Any, **kwargs: Any) -> Any:
        """As any inbox does."""
        verdict = await super().receive(message_id, *args, **kwargs)
        say(f"{type(verdict).__name__} {message_id}")
        return verdict


async def pack(connection: "asyncpg.Connection[Any]", message_id: str, body: bytes) -> None:
    """The handler. Semel calls it once for each message, and commits what it writes with the receipt."""
    await connection.execute(INSERT, json.loads(body)["order"], message_id)


async def from_rabbitmq(broker: str, inbox: AsyncInbox) -> None:
    """``once`` finds the message's id, and acks after COMMIT."""
    import aio_pika  # noqa: PLC0415 - Redis does without
    from aio_pika.abc import AbstractIncomingMessage  # noqa: PLC0415

    from semel.inbox.rabbitmq import once  # noqa: PLC0415

    async def unpack(connection: "asyncpg.Connection[Any]", message: AbstractIncomingMessage) -> None:
        await pack(connection, str(message.message_id), message.body)

    receive = once(inbox, unpack)

    async def counted(message: AbstractIncomingMessage) -> None:
        if message.redelivered:
            say(f"redelivered {message.message_id}")
        await receive(message)

    async with await aio_pika.connect(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=PREFETCH)
        queue = await channel.declare_queue(QUEUE, durable=True)
        await queue.consume(counted)
        say("ready")
        await asyncio.Event().wait()


async def from_redis(broker: str, inbox: AsyncInbox) -> None:
    """Read what was delivered to this consumer before and never acked, then what is new; XACK after COMMIT."""
    from redis.asyncio import Redis  # noqa: PLC0415 - RabbitMQ does without
    from redis.exceptions import ResponseError  # noqa: PLC0415

    redis = Redis.from_url(broker)
    try:
        await redis.xgroup_create(QUEUE, "shipping", "0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):  # It is there: from an earlier start.
            raise
    say("ready")
    pending = "0"
    while True:
        found: Any = await redis.xreadgroup("shipping", "consumer", {QUEUE: pending}, count=PREFETCH, block=1000)
        entries = [entry for _, entries in found for entry in entries]
        for place, fields in entries:
            message_id, body = fields[b"id"].decode(), fields[b"payload"]
            if pending == "0":
                say(f"redelivered {message_id}")
            verdict = await inbox.receive(message_id, pack, message_id, body, payload=body)
            if verdict.ack:
                await redis.xack(QUEUE, "shipping", place)
        if not entries:
            pending = ">"


def say(line: str) -> None:
    """Write a line at once and whole: this process may be killed after any."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def main(broker: str, store: str) -> None:
    """Consume until the process is ended."""
    connection = await asyncpg.connect(store)
    await connection.execute(TABLE)
    await connection.close()
    async with CountedInbox(store, consumer="shipping") as inbox:
        await (from_redis if broker.startswith("redis") else from_rabbitmq)(broker, inbox)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], os.environ["SHIPPING_STORE"]))

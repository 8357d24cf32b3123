"""Ships each paid order once, from the queue of RabbitMQ that a relay sends to. Ten are handled at once."""

import asyncio
import json
import os

import aio_pika
import asyncpg
from aio_pika.abc import AbstractIncomingMessage

from semel.inbox import AsyncInbox
from semel.inbox.rabbitmq import once


async def ship(connection: "asyncpg.Connection[asyncpg.Record]", message: AbstractIncomingMessage) -> None:
    order = json.loads(message.body)["order"]
    await connection.execute("INSERT INTO parcels (content) VALUES ($1)", f"order {order}")


async def consume(broker: str, store: str) -> None:
    async with await aio_pika.connect_robust(broker) as connection, AsyncInbox(store, consumer="shipping") as inbox:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        # What is parked, or refused, goes to "events.dead", and can be sent again from there.
        dead = await channel.declare_queue("events.dead", durable=True)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
        queue = await channel.declare_queue("events", durable=True, arguments={**arguments})
        await queue.consume(once(inbox, ship))
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(consume(os.environ["BROKER"], os.environ["SEMEL_STORE"]))

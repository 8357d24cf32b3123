"""A consumer of RabbitMQ that is killed with a message in its hands: ``python -m tests.inbox.dying_at_rabbitmq``."""

import asyncio
import os
import signal
import sys
from typing import Any

import aio_pika

from semel.inbox import AsyncInbox
from semel.inbox.rabbitmq import once


async def main(broker: str, url: str, place: str) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def ship(connection: Any, message: Any) -> None:
        await connection.execute(f"INSERT INTO parcels VALUES ('{message.message_id}')")
        if place == "in the handler":
            die()

    async with await aio_pika.connect(broker) as connection, AsyncInbox(url, consumer="billing") as inbox:
        channel = await connection.channel()
        queue = await channel.get_queue("killed")
        callback = once(inbox, ship)

        # It is called after COMMIT.
        aio_pika.IncomingMessage.ack = lambda *_: die()  # type: ignore[assignment, method-assign]
        await queue.consume(callback)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

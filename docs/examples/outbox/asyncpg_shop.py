"""With asyncpg: the same, and `add` is awaited."""

import asyncio
import os

import asyncpg

from semel.outbox import Outbox

outbox = Outbox(os.environ["DATABASE_URL"])


async def pay(connection: "asyncpg.Connection[asyncpg.Record]", order: int) -> str:
    async with connection.transaction():
        await connection.execute("INSERT INTO orders (number) VALUES ($1)", order)
        message_id: str = await outbox.add(connection, "order.paid", {"order": order}, key=f"order-{order}")
    return message_id


async def main() -> None:
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    print(await pay(connection, 17))
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main())

"""Ships each paid order once, with FastStream on RabbitMQ: faststream run inbox_faststream:app."""

import os
from typing import Annotated, Any

from faststream import Context, FastStream
from faststream.rabbit import RabbitBroker, RabbitQueue

from semel.inbox import AsyncInbox
from semel.inbox.faststream import check, once

inbox = AsyncInbox(os.environ["SEMEL_STORE"], consumer="shipping")
broker = RabbitBroker(os.environ["BROKER"], middlewares=[once(inbox)])
app = FastStream(broker)


@broker.subscriber(RabbitQueue("events", durable=True))
async def ship(paid: dict[str, int], connection: Annotated[Any, Context("semel_connection")]) -> None:
    await connection.execute("INSERT INTO parcels (content) VALUES ($1)", f"order {paid['order']}")


check(broker)

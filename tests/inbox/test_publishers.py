"""Each of Semel's publishers, into each of Semel's adapters that can consume it: sent twice, as after a confirmation
that was lost. Celery's is in ``test_celery.py``, and that of webhooks in ``tests/webhooks``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any

import aio_pika
import nats
import pytest
from confluent_kafka import Producer
from faststream import AckPolicy, Context
from faststream.confluent import KafkaBroker, TopicPartition
from faststream.nats import JStream, NatsBroker
from faststream.rabbit import RabbitBroker, RabbitQueue
from faststream.redis import RedisBroker, StreamSub
from nats.js.api import DeliverPolicy, StreamConfig

from semel.core.outbox import Message
from semel.inbox import AsyncInbox
from semel.inbox.faststream import CONNECTION
from semel.inbox.faststream import once as once_faststream
from semel.inbox.nats import subscribe
from semel.inbox.rabbitmq import once as once_rabbitmq
from tests.inbox.consumers import parcels, prepare, receipts, until
from tests.publishers.sending import full_message, opened

AT_ONCE = timedelta(0)
Ask = Callable[[str], Any]
#: Consumes what comes by a name, and gives the URL to publish to.
Consuming = AbstractAsyncContextManager[str]


class Heard(AsyncInbox):
    """Remembers its verdicts."""

    verdicts: list[str]

    async def receive(self, *args: Any, **kwargs: Any) -> Any:
        verdict = await super().receive(*args, **kwargs)
        self.verdicts.append(type(verdict).__name__)
        return verdict


async def pay(connection: Any, *_: object) -> None:
    await connection.execute("INSERT INTO parcels VALUES ('paid')")


async def pay_faststream(_body: Any, connection: Annotated[Any, Context(CONNECTION)]) -> None:
    await pay(connection)


@asynccontextmanager
async def by_aio_pika(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    url = ask("rabbitmq").url
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).declare_queue(name, durable=True)
        await queue.consume(once_rabbitmq(inbox, pay, pause=AT_ONCE))
        yield f"{url}?routing_key={name}"


@asynccontextmanager
async def by_nats(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    url = ask("nats_server").url
    async with await nats.connect(url) as client:
        await add_stream(client.jetstream(), name)
        await subscribe(client.jetstream(), f"{name}.>", inbox, pay, pause=AT_ONCE, durable="billing")
        yield url


async def add_stream(jetstream: Any, name: str) -> None:
    # Its duplicate window is as short as it can be: the relay may come back after it.
    await jetstream.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"], max_age=3600, duplicate_window=0.1))


@asynccontextmanager
async def through(broker: Any, url: str) -> AsyncIterator[str]:
    async with broker:
        await broker.start()
        yield url


@asynccontextmanager
async def by_faststream_rabbitmq(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    url = ask("rabbitmq").url
    broker = RabbitBroker(url, middlewares=[once_faststream(inbox, pause=AT_ONCE)], logger=None)
    broker.subscriber(RabbitQueue(name, durable=True))(pay_faststream)
    async with through(broker, f"{url}?routing_key={name}") as found:
        yield found


@asynccontextmanager
async def by_faststream_nats(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    url = ask("nats_server").url
    async with await nats.connect(url) as client:
        await add_stream(client.jetstream(), name)
    broker = NatsBroker(url, middlewares=[once_faststream(inbox, pause=AT_ONCE)], logger=None)
    stream = JStream(name, declare=False)
    broker.subscriber(f"{name}.>", stream=stream, deliver_policy=DeliverPolicy.ALL)(pay_faststream)
    async with through(broker, url) as found:
        yield found


@asynccontextmanager
async def by_faststream_redis(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    url = ask("redis_url")
    broker = RedisBroker(url, middlewares=[once_faststream(inbox, pause=AT_ONCE)])
    broker.subscriber(stream=StreamSub(name, group="billing", consumer="one"))(pay_faststream)
    async with through(broker, url) as found:
        yield found


@asynccontextmanager
async def by_faststream_kafka(ask: Ask, inbox: AsyncInbox, name: str) -> AsyncIterator[str]:
    hosts = ask("kafka")
    await asyncio.to_thread(Producer({"bootstrap.servers": hosts, "log_level": 0}).list_topics, name, 10)  # Makes it.
    middlewares = [once_faststream(inbox, pause=AT_ONCE)]
    broker = KafkaBroker(hosts, middlewares=middlewares, logger=None, allow_auto_create_topics=False)
    # Without the seconds that a group takes to form.
    options: dict[str, Any] = {"partitions": [TopicPartition(name, 0)], "auto_offset_reset": "earliest"}
    broker.subscriber(group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR, **options)(pay_faststream)
    async with through(broker, f"kafka://{hosts}") as found:
        yield found


ADAPTERS: dict[str, Callable[[Ask, AsyncInbox, str], Consuming]] = {
    "RabbitMQ, aio-pika": by_aio_pika,
    "RabbitMQ, FastStream": by_faststream_rabbitmq,
    "NATS, nats-py": by_nats,
    "NATS, FastStream": by_faststream_nats,
    "Redis Streams, FastStream": by_faststream_redis,
    "Kafka, FastStream": by_faststream_kafka,
}


@pytest.fixture
def url(postgres_url: str) -> str:
    prepare(postgres_url)
    return postgres_url


@pytest.mark.parametrize("adapter", ADAPTERS)
async def test_sent_twice(adapter: str, request: pytest.FixtureRequest, url: str) -> None:
    """A message that the relay sends twice is known by its own id, and handled once, by every adapter."""
    sent = full_message()
    name = f"orders-{sent.id[-12:]}"
    async with Heard(url, consumer="billing") as inbox:
        inbox.verdicts = []
        async with ADAPTERS[adapter](request.getfixturevalue, inbox, name) as where:
            await until_two(inbox, where, name, sent)
    assert inbox.verdicts[:2] == ["Ran", "Duplicate"]
    assert (parcels(url), receipts(url)) == (["paid"], {sent.id: ("done", 0)})


async def until_two(inbox: Heard, where: str, name: str, sent: Message) -> None:
    """Publish *sent*, again and again: NATS drops what comes within its window."""
    async with opened(where, name) as publisher:
        while len(inbox.verdicts) < 2:
            before = len(inbox.verdicts)
            (verdict,) = await publisher.publish([sent])
            assert type(verdict).__name__ == "Delivered", verdict
            if before == 0:
                await until(lambda: len(inbox.verdicts) > 0)

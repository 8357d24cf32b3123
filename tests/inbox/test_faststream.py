"""What FastStream can't be used with, and what it is told on Kafka (librdkafka's mock cluster)."""

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from faststream import AckPolicy
from faststream.confluent import KafkaBroker, TopicPartition
from faststream.exceptions import StopConsume
from faststream.nats import JStream, NatsBroker
from faststream.rabbit import (
    ExchangeType,
    RabbitBroker,
    RabbitExchange,
    RabbitQueue,
    RabbitRouter,
    TestRabbitBroker,
)
from faststream.redis import RedisBroker, StreamSub
from nats.js.api import AckPolicy as NatsAckPolicy
from nats.js.api import ConsumerConfig

from semel.errors import ConfigurationError
from semel.inbox import AsyncInbox
from semel.inbox.faststream import check, once
from tests.inbox.consumers import prepare, receipts, until
from tests.kit import servers

AT_ONCE = timedelta(0)
#: Tries, in which a record of another partition would have come long ago.
MANY = 50
GROUP = StreamSub("orders", group="billing", consumer="one")
NO_ACK = StreamSub("orders", group="billing", consumer="one", no_ack=True)
NO_ACKS = ConsumerConfig(filter_subjects=[], ack_policy=NatsAckPolicy.NONE)
UNACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Kafka, by default": (KafkaBroker, {"topics": "orders"}),
    "Kafka, MANUAL": (KafkaBroker, {"topics": "orders", "group_id": "b", "ack_policy": AckPolicy.MANUAL}),
    "RabbitMQ, ACK_FIRST": (RabbitBroker, {"queue": "orders", "ack_policy": AckPolicy.ACK_FIRST}),
    "NATS, ACK_FIRST": (NatsBroker, {"subject": "o", "stream": JStream("o"), "ack_policy": AckPolicy.ACK_FIRST}),
    "NATS, plain": (NatsBroker, {"subject": "orders"}),
    "NATS, ordered": (NatsBroker, {"subject": "o", "stream": JStream("o"), "ordered_consumer": True}),
    "NATS, no acks": (NatsBroker, {"subject": "o", "stream": JStream("o"), "config": NO_ACKS}),
    "Redis, a channel": (RedisBroker, {"channel": "orders"}),
    "Redis, a list": (RedisBroker, {"list": "orders"}),
    "Redis, a stream without a group": (RedisBroker, {"stream": "orders"}),
    "Redis, no_ack": (RedisBroker, {"stream": NO_ACK}),
}
ACKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Kafka": (KafkaBroker, {"topics": "orders", "group_id": "b", "ack_policy": AckPolicy.NACK_ON_ERROR}),
    "RabbitMQ": (RabbitBroker, {"queue": "orders"}),
    "NATS": (NatsBroker, {"subject": "orders", "stream": JStream("orders")}),
    "Redis": (RedisBroker, {"stream": GROUP}),
}


async def handle(_body: Any) -> str:
    return "done"


def subscribed(sqlite_url: str, kind: Any, options: dict[str, Any]) -> Any:
    options = dict(options)
    names = [options.pop("topics")] if "topics" in options else []
    broker = kind(middlewares=[once(AsyncInbox(sqlite_url, consumer="billing"))])
    broker.subscriber(*names, **options)(handle)
    return broker


@pytest.mark.parametrize("kind", UNACKED)
def test_a_subscriber_without_acks(kind: str, sqlite_url: str) -> None:
    """A subscriber that acks first, or never, is refused with what to type; on Kafka that is FastStream's default."""
    with pytest.raises(ConfigurationError, match=r"ack_policy=AckPolicy\.NACK_ON_ERROR"):
        check(subscribed(sqlite_url, *UNACKED[kind]))


@pytest.mark.parametrize("kind", ACKED)
def test_a_subscriber_with_acks(kind: str, sqlite_url: str) -> None:
    """One that acks in the end is taken; one whose result FastStream would publish, after COMMIT, is refused."""
    broker = subscribed(sqlite_url, *ACKED[kind])
    check(broker)
    broker.publisher("shipped")(broker.subscribers[0].calls[0].handler)
    with pytest.raises(ConfigurationError, match="outbox"):
        check(broker)


def test_another_broker(sqlite_url: str) -> None:
    """A subscriber of a broker that is not known to deliver again what is nacked, as MQTT is not, is refused."""
    broker = subscribed(sqlite_url, *ACKED["RabbitMQ"])
    (subscriber,) = broker.subscribers
    subscriber.__class__ = type("Subscriber", (type(subscriber),), {"__module__": "faststream.mqtt", "__slots__": ()})
    with pytest.raises(ConfigurationError, match="MQTT can't be used"):
        check(broker)


async def test_without_an_inbox(sqlite_url: str) -> None:
    """Subscribers without the middleware are left alone."""
    broker = KafkaBroker()
    broker.subscriber("orders")(handle)
    check(broker)


async def test_the_first_message(sqlite_url: str) -> None:
    """What was not checked is found out by the first message, before the handler runs: the subscriber is stopped."""
    ran: list[object] = []
    broker = RabbitBroker(middlewares=[once(AsyncInbox(sqlite_url, consumer="billing"))], logger=None)

    @broker.subscriber("orders", ack_policy=AckPolicy.ACK_FIRST)
    async def ship(body: Any) -> None:
        ran.append(body)

    async with TestRabbitBroker(broker):
        with pytest.raises(StopConsume) as stopped:
            await broker.publish("{}", "orders", message_id="m-1")
    assert isinstance(stopped.value.__cause__, ConfigurationError)
    assert ran == []


async def test_kafka_by_default(kafka: str, sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """On Kafka, too, a subscriber that says nothing of acks runs no handler, and the log says what to type."""
    ran: list[str] = []

    async def ship(name: str) -> None:
        ran.append(name)

    topic = f"orders-{uuid4()}"
    for name in ("m-1", "m-2"):
        await asyncio.to_thread(produce, kafka, topic, 0, name)
    async with AsyncInbox(sqlite_url, consumer="billing") as inbox:
        middlewares = [once(inbox, pause=AT_ONCE)]
        async with KafkaBroker(kafka, middlewares=middlewares, logger=None, allow_auto_create_topics=False) as broker:
            subscriber = broker.subscriber(
                partitions=[TopicPartition(topic, 0)], group_id="billing", auto_offset_reset="earliest"
            )
            subscriber(ship)
            await broker.start()
            await until(lambda: not subscriber.running)
    assert "ack_policy=AckPolicy.NACK_ON_ERROR" in caplog.text
    assert (ran, receipts(sqlite_url)) == ([], {})


async def test_a_failure_on_redis(redis_url: str, sqlite_url: str) -> None:
    """What failed stays pending, and is handled by the subscriber of the group that claims what is pending."""
    prepare(sqlite_url)
    tries: list[str] = []

    async def ship(name: str) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise ValueError("no stock")

    stream = f"orders-{uuid4()}"
    inbox = AsyncInbox(sqlite_url, consumer="billing")
    async with inbox, RedisBroker(redis_url, middlewares=[once(inbox, pause=AT_ONCE)]) as broker:
        broker.subscriber(stream=StreamSub(stream, group="billing", consumer="one"))(ship)
        broker.subscriber(stream=StreamSub(stream, group="billing", consumer="two", min_idle_time=1))(ship)
        await broker.start()
        await broker.publish("A17", stream=stream)
        await until(lambda: [state for state, _ in receipts(sqlite_url).values()] == ["done"])
    assert tries == ["A17", "A17"]


async def test_a_reply(rabbitmq: servers.RabbitMQServer, sqlite_url: str) -> None:
    """A message that asks for a reply, which would go out after COMMIT, is not handled before replies are off: it has
    failed, and is parked in the end.
    """
    ran: list[object] = []

    async def ship(body: Any) -> None:
        ran.append(body)

    def is_over(name: str) -> bool:
        return receipts(sqlite_url).get(name, ("failing", 0))[0] != "failing"

    queue = RabbitQueue(f"orders-{uuid4()}", durable=True)
    async with AsyncInbox(sqlite_url, consumer="billing", max_attempts=2) as inbox:
        for no_reply, name in ((False, "m-1"), (True, "m-2")):
            middlewares = [once(inbox, pause=AT_ONCE)]
            async with RabbitBroker(rabbitmq.url, middlewares=middlewares, logger=None) as broker:
                broker.subscriber(queue, no_reply=no_reply)(ship)
                await broker.start()
                await broker.publish(name, queue, message_id=name, reply_to="answers")
                await until(partial(is_over, name))
    assert receipts(sqlite_url) == {"m-1": ("parked", 2), "m-2": ("done", 0)}
    assert ran == ["m-2"]


async def test_two_consumers(
    rabbitmq: servers.RabbitMQServer, sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Subscribers that get the same message, by routers with an inbox each, both handle it; behind one inbox they
    are one consumer, which ``check`` tells.
    """
    ran: list[str] = []
    exchange = RabbitExchange(f"orders-{uuid4()}", type=ExchangeType.FANOUT, auto_delete=True)

    def subscribe(to: Any, name: str) -> None:
        async def ship(_body: Any) -> None:
            ran.append(name)

        to.subscriber(RabbitQueue(f"{name}-{uuid4()}", auto_delete=True), exchange)(ship)

    async with RabbitBroker(rabbitmq.url, logger=None) as broker:
        for name in ("shipping", "billing"):
            inbox = AsyncInbox(sqlite_url, consumer=name)
            router = RabbitRouter(middlewares=[once(inbox)])
            subscribe(router, name)
            broker.include_router(router)
        check(broker)
        assert "one consumer" not in caplog.text
        await broker.start()
        await broker.publish("A17", exchange=exchange, message_id="m-1")
        await until(lambda: sorted(ran) == ["billing", "shipping"])
    claiming = RedisBroker(middlewares=[once(AsyncInbox(sqlite_url, consumer="claiming"))])
    for stream in (GROUP, StreamSub("orders", group="billing", consumer="two", min_idle_time=1000)):
        claiming.subscriber(stream=stream)(handle)
    check(claiming)
    assert "one consumer" not in caplog.text
    shared = RabbitBroker(middlewares=[once(AsyncInbox(sqlite_url, consumer="both"))])
    subscribe(shared, "one")
    subscribe(shared, "other")
    check(shared)
    assert "2 handlers are one consumer, both" in caplog.text


def produce(hosts: str, topic: str, partition: int, name: str) -> None:
    producer = Producer({"bootstrap.servers": hosts, "log_level": 0})
    producer.list_topics(topic, 10)  # Makes it.
    producer.produce(topic, json.dumps(name).encode(), partition=partition, headers={"webhook-id": name})
    producer.flush(10)


async def consume(hosts: str, inbox: AsyncInbox, topic: str, ship: Any, until_so: Callable[[], bool]) -> None:
    """Consume two partitions, until it is so."""
    middlewares = [once(inbox, pause=AT_ONCE)]
    async with KafkaBroker(hosts, middlewares=middlewares, logger=None, allow_auto_create_topics=False) as broker:
        subscriber = broker.subscriber(
            partitions=[TopicPartition(topic, 0), TopicPartition(topic, 1)],
            group_id="billing",
            auto_offset_reset="earliest",
            ack_policy=AckPolicy.NACK_ON_ERROR,
        )
        subscriber(ship)
        await broker.start()
        await until(until_so)


async def test_a_failure_on_kafka(kafka: str, sqlite_url: str) -> None:
    """A message that fails is not skipped: what another partition commits does not take it along, and a worker that
    goes on later has it again.
    """
    prepare(sqlite_url)
    topic, tries, is_down = f"orders-{uuid4()}", list[str](), True

    async def ship(name: str) -> None:
        tries.append(name)
        if is_down and name == "bad":
            if tries.count("bad") == 1:
                await asyncio.to_thread(produce, kafka, topic, 1, "good")
            raise ValueError("no stock")

    def is_done() -> bool:
        return [state for state, _ in receipts(sqlite_url).values()] == ["done", "done"]

    await asyncio.to_thread(produce, kafka, topic, 0, "bad")
    async with AsyncInbox(sqlite_url, consumer="billing", max_attempts=1000) as inbox:
        await consume(kafka, inbox, topic, ship, lambda: "good" in tries or tries.count("bad") > MANY)
        is_down = False
        await consume(kafka, inbox, topic, ship, is_done)
    assert tries.count("good") == 1

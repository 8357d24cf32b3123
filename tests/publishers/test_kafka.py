"""Messages over Kafka's protocol to librdkafka's **mock cluster**, read back with a consumer. It is no Kafka: it has no
disk, no rights, and makes every topic that is asked for.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka import Message as Record

from semel.core.outbox import Delivered, Failed, Message, Rejected, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers import Publisher
from semel.publishers.kafka import Kafka
from tests.kit.servers import free_port
from tests.publishers.sending import CREATED_AT, TRACE, cut_off, full_message, kinds, message, opened, reason


class Mock:
    """A mock cluster of three brokers, inside a producer."""

    def __init__(self, round_trip: int = 0) -> None:
        """Each answer takes as many milliseconds."""
        settings = {"test.mock.num.brokers": 3, "test.mock.broker.rtt": round_trip, "log_level": 0}
        self._producer: Producer | None = Producer(settings)
        brokers = self._producer.list_topics(timeout=10).brokers.values()
        self.hosts = ",".join(f"{each.host}:{each.port}" for each in brokers)
        self.url = f"kafka://{self.hosts}?timeout=10"

    def end(self) -> None:
        self._producer = None

    def read(self, topic: str, count: int) -> list[Record]:
        """Return *count* records of the topic."""
        consumer = Consumer({"bootstrap.servers": self.hosts, "group.id": "test", "log_level": 0})
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
        found: list[Record] = []
        while len(found) < count:
            found += consumer.consume(count - len(found), timeout=10)
        consumer.close()
        return found


@pytest.fixture(scope="module")
def kafka() -> Iterator[Mock]:
    mock = Mock()
    yield mock
    mock.end()


def pairs(record: Record) -> list[tuple[str, str]]:
    listed: Any = record.headers()
    return [(name, text.decode()) for name, text in listed]


def headers(record: Record) -> dict[str, str]:
    return dict(pairs(record))


async def test_everything_arrives(kafka: Mock, name: str) -> None:
    """The ordering key is the record's key; id, type, content type, trace and the application's own are headers."""
    sent = full_message(payload=b"\x00\xff")
    async with opened(kafka.url, name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    (found,) = await asyncio.to_thread(kafka.read, name, 1)
    assert (found.key(), found.value()) == (b"order-17", b"\x00\xff")
    assert found.timestamp()[1] == int(CREATED_AT * 1000)
    assert headers(found) == {
        "id": sent.id,
        "type": "order.paid",
        "content-type": "application/vnd.shop+json",
        "tenant": "blue",
        "greeting": "grüß dich",
        "traceparent": TRACE,
    }


async def test_a_header_of_the_application_can_not_take_the_place_of_the_id(kafka: Mock, name: str) -> None:
    """The header ``id`` is the message's, whatever the application calls its own."""
    sent = message(headers=(("id", "another"),))
    async with opened(kafka.url, name) as publisher:
        await publisher.publish([sent])
    (found,) = await asyncio.to_thread(kafka.read, name, 1)
    assert [text for header, text in pairs(found) if header == "id"] == [sent.id]


async def test_again(kafka: Mock, name: str) -> None:
    """A message that is published a second time has the same id: a consumer can tell."""
    sent = message()
    async with opened(kafka.url, name) as publisher:
        for _ in range(2):
            assert await publisher.publish([sent]) == [Delivered()]
    found = await asyncio.to_thread(kafka.read, name, 2)
    assert [headers(each)["id"] for each in found] == [sent.id, sent.id]


async def test_topic(kafka: Mock, name: str) -> None:
    """``topic=`` is another topic than the destination's name."""
    async with opened(f"{kafka.url}&topic={name}.shop", name) as publisher:
        assert await publisher.publish([message()]) == [Delivered()]
    assert len(await asyncio.to_thread(kafka.read, f"{name}.shop", 1)) == 1


async def test_one_of_a_hundred_is_too_large(kafka: Mock, name: str) -> None:
    """A message that is too large is rejected alone; the 99 others are delivered, and the loop is not blocked."""
    messages = [message(payload=b"x" * (5_000_000 if number == 41 else 10)) for number in range(100)]
    async with opened(kafka.url, name) as publisher:
        publishing = asyncio.create_task(_verdicts(publisher, messages))
        turns = 0
        while not publishing.done():
            await asyncio.sleep(0)
            turns += 1
        verdicts = await publishing
    assert kinds(verdicts) == ["Rejected" if number == 41 else "Delivered" for number in range(100)]
    assert "too large for topic" in reason(verdicts[41])
    found = await asyncio.to_thread(kafka.read, name, 99)
    assert len({headers(each)["id"] for each in found}) == 99
    assert turns > 1


async def _verdicts(publisher: Publisher, messages: Sequence[Message]) -> Sequence[Verdict]:
    return await publisher.publish(messages)


@pytest.mark.parametrize(
    "code, kind",
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, Rejected),
        (KafkaError._UNKNOWN_TOPIC, Rejected),
        (KafkaError.MSG_SIZE_TOO_LARGE, Rejected),
        (KafkaError.INVALID_TIMESTAMP, Rejected),
        (KafkaError.POLICY_VIOLATION, Failed),
        (KafkaError.NOT_ENOUGH_REPLICAS, Unreachable),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Unreachable),
        (KafkaError._MSG_TIMED_OUT, Unreachable),
        (KafkaError._TRANSPORT, Unreachable),
    ],
)
def test_what_the_mock_never_says(code: int, kind: type) -> None:
    """What a broker says is wrong with a message, with now, or with itself is told apart by Kafka's own codes."""
    verdict = Kafka("events", "kafka://host")._verdict(KafkaError(code))
    assert isinstance(verdict, kind)
    assert reason(verdict)


async def test_down() -> None:
    """Brokers that are not there are a connection error, with their addresses and without the password."""
    where = f"127.0.0.1:{free_port()}"
    made = Kafka("events", f"kafka://semel:s3cr3t@{where}?timeout=0.5&security=SASL_PLAINTEXT")
    with pytest.raises(ConnectionError, match=f"Kafka at {where} can't be reached") as caught:
        await made.open()
    assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r}"


async def test_brokers_that_went_away(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Brokers that are gone confirm nothing: unreachable after the time limit, and nothing is kept to be sent later."""
    caplog.set_level(logging.DEBUG)
    mock = Mock()
    async with opened(Kafka(name, f"kafka://{mock.hosts}", timeout=1)) as publisher:
        assert await publisher.publish([message()]) == [Delivered()]
        mock.end()
        verdicts = await publisher.publish([message(), message()])
    assert kinds(verdicts) == ["Unreachable", "Unreachable"]


async def test_wrong_setting() -> None:
    """A setting that the client does not take is said when the publisher is opened."""
    with pytest.raises(ConfigurationError, match=r"a wrong setting .*security\.protocol"):
        await Kafka("events", "kafka://127.0.0.1?security=nonsense").open()


async def test_cancelled(kafka: Mock, name: str) -> None:
    """A publish that was cancelled closes the publisher; it can be opened again."""
    async with opened(kafka.url, name) as publisher:
        await cut_off(publisher)
        assert kinds(await publisher.publish([message()])) == ["Unreachable"]
        await publisher.open()
        assert await publisher.publish([message()]) == [Delivered()]

"""What the adapters have in common: where an id is found, and what a broker is told."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from semel.core.inbox import check_id
from semel.errors import ConfigurationError, MessageUnidentified
from semel.inbox import AsyncInbox, Busy, Duplicate, Inbox, Parked, Ran, Verdict
from semel.inbox import faststream as of_faststream
from semel.inbox import rabbitmq as of_rabbitmq
from semel.inbox.brokers import Answer, answer_for, found_id, received
from semel.inbox.celery import check as check_celery


@pytest.mark.parametrize(
    "headers, found",
    [
        (None, None),
        ({}, None),
        ({"message_id": ""}, None),
        ({"message_id": "m-1"}, "m-1"),
        ({"Nats-Msg-Id": "m-1", "CE-ID": "e-1"}, "e-1"),
        ({"ce-id": "e-1", "Webhook-Id": "w-1"}, "w-1"),
        ({"webhook-id": b"w-1"}, "w-1"),
    ],
)
def test_an_id_in_the_headers(headers: Mapping[str, Any] | None, found: str | None) -> None:
    """The event's own id comes before a broker's, and names are found in any case."""
    assert found_id(headers) == found


@pytest.mark.parametrize(
    "name",
    ["ce-{}", "CE-{}", "ce_{}", "cloudEvents:{}", "cloudEvents_{}"],
    ids=["HTTP", "case", "Kafka", "AMQP", "JMS"],
)
def test_an_event_of_cloudevents(name: str) -> None:
    """An event is known by its source and its id together, in every spelling, and before a broker's id."""

    def event(number: str, source: str) -> str:
        found = found_id({name.format("id"): number, name.format("source"): source, "message_id": "another each time"})
        assert found is not None
        return check_id(found)

    assert event("17", "/orders") == event("17", "/orders")
    assert len({event("17", "/orders"), event("17", "/refunds"), event("18", "/orders")}) == 3
    assert event("17", "/orders").startswith("17@")
    # However long they are, and whatever they look like.
    assert event("7" * 255, "/" + "o" * 2000) != event("7" * 255, "/" + "r" * 2000)
    structured = {"specversion": "1.0", "id": "17", "source": "/orders", "type": "order.paid"}
    body, kind = json.dumps(structured).encode(), "application/cloudevents+json; charset=UTF-8"
    assert found_id({"Content-Type": kind}, None, body) == event("17", "/orders")
    assert found_id({}, None, body, kind) == event("17", "/orders")
    assert found_id({"message_id": "m-1", "content-type": kind}, None, b"[{") == "m-1"
    assert found_id({"message_id": "m-1", "content-type": "application/json"}, None, body) == "m-1"


@pytest.mark.parametrize(
    "verdict, answer",
    [(Ran(1), Answer.ACK), (Duplicate(), Answer.ACK), (Busy(), Answer.AGAIN), (Parked(5), Answer.AWAY)],
)
def test_what_a_broker_is_told(verdict: Verdict[int], answer: Answer) -> None:
    """An ack for what is committed, again for what is not, and away with what is parked."""
    assert answer_for(verdict) is answer


async def test_trouble_is_an_answer(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the handler, or of the store, is logged, and the message has to come again; no id: away."""

    def fail(_connection: object, _message: object) -> None:
        raise ValueError("no stock")

    async with AsyncInbox(sqlite_url, consumer="billing", max_attempts=2) as inbox:
        answers = [await received(inbox, lambda _: "m-1", fail, {}, b"") for _ in range(3)]
        assert answers == [Answer.AGAIN, Answer.AWAY, Answer.AWAY]
        assert await received(inbox, lambda _: "", fail, {}, b"") is Answer.AWAY
    away = AsyncInbox("sqlite:////no/such/folder/semel.db", consumer="billing")
    assert await received(away, lambda _: "m-1", fail, {}, b"") is Answer.AGAIN
    await away.close()


def message(**fields: Any) -> Any:
    raw = SimpleNamespace(**fields)
    return SimpleNamespace(headers={}, raw_message=raw, body=b"", content_type=None, message_id="made up each time")


def test_ids_of_faststream() -> None:
    """The broker's own field; never the id that FastStream makes up for each delivery."""
    assert of_faststream.id_of(message(message_id="m-1")) == "m-1"
    with pytest.raises(MessageUnidentified, match="id="):
        of_faststream.id_of(message(message_id=None))


def at_kafka(time: int, **headers: str) -> Any:
    record = message(topic="orders", partition=0, offset=17, timestamp=time)
    record.headers = headers
    return record


def at_nats(time: int) -> Any:
    when = datetime.fromtimestamp(time, UTC)
    return message(metadata=SimpleNamespace(stream="orders", sequence=SimpleNamespace(stream=17), timestamp=when))


def in_redis(time: int) -> Any:
    entry = message()
    entry.raw_message = {"channel": "orders", "message_ids": [b"%d-0" % time], "data": {b"id": b"order-17"}}
    return entry


@pytest.mark.parametrize("at", [at_kafka, at_nats, in_redis])
def test_a_place_in_a_log(at: Any) -> None:
    """A message without an id is known by its place. The place in a log that was made anew is another."""
    assert of_faststream.id_of(at(1)) == of_faststream.id_of(at(1))
    assert of_faststream.id_of(at(1)).startswith("orders/")
    assert of_faststream.id_of(at(1)) != of_faststream.id_of(at(2))
    long: Any = SimpleNamespace(
        topic=lambda: "o" * 249, partition=lambda: 0, offset=lambda: 17, timestamp=lambda: (1, 2)
    )
    assert check_id(found_id({}, long))


def test_an_id_of_a_stranger() -> None:
    """The header ``id`` of a Kafka record is its id where Semel's publisher set it; a stranger's may be an order's."""
    place, relayed = of_faststream.id_of(at_kafka(1)), str(uuid4())
    assert of_faststream.id_of(at_kafka(1, id=relayed)) == place
    assert of_faststream.id_of(at_kafka(1, **{"id": "order-17", "type": "paid", "content-type": "text/plain"})) == place
    assert of_faststream.id_of(at_kafka(1, **{"id": relayed, "type": "paid", "content-type": "text/plain"})) == relayed


@pytest.mark.parametrize("raw", [[SimpleNamespace(message_id="m-1")], (SimpleNamespace(message_id="m-1"),), {}])
def test_batches_of_faststream(raw: object) -> None:
    """Several messages that are handled as one have no id together: the first one's would hide the others."""
    batch: Any = SimpleNamespace(headers={"ce-id": "e-1"}, raw_message=raw, batch_headers=[{"ce-id": "e-1"}])
    with pytest.raises(ConfigurationError, match="batch"):
        of_faststream.id_of(batch)
    batch.batch_headers = []
    if raw:
        with pytest.raises(ConfigurationError, match="batch"):
            of_faststream.id_of(batch)


def test_an_id_that_is_no_text() -> None:
    """Bytes that are not UTF-8 are no id: two of them would be read as the same text."""
    with pytest.raises(MessageUnidentified, match="UTF-8"):
        found_id({"message_id": b"\xff"})


def test_ids_of_rabbitmq() -> None:
    """A message without an id is refused with what to do about it."""

    def delivered(**fields: Any) -> Any:
        return SimpleNamespace(**{"headers": None, "body": b"", "content_type": None, "message_id": None} | fields)

    assert of_rabbitmq.id_of(delivered(headers={"ce-id": "e-1"}, message_id="m-1")) == "e-1"
    assert of_rabbitmq.id_of(delivered(message_id="m-1")) == "m-1"
    with pytest.raises(MessageUnidentified, match="message_id"):
        of_rabbitmq.id_of(delivered())


@pytest.mark.parametrize(
    "url, options, is_refused",
    [
        ("redis://h/0", {}, False),
        ("redis://h/0", {"visibility_timeout": 15 * 86400}, True),
        ("sqs://", {"visibility_timeout": 43200}, False),
        ("amqp://h", {}, False),
        (None, {}, False),
    ],
)
def test_celerys_visibility_timeout(sqlite_url: str, url: str | None, options: Any, is_refused: bool) -> None:
    """A broker that redelivers later than receipts are kept is refused when the app is set up."""
    app: Any = SimpleNamespace(conf=SimpleNamespace(broker_url=url, broker_transport_options=options))
    inbox = Inbox(sqlite_url, consumer="billing")
    if is_refused:
        with pytest.raises(ConfigurationError, match="handled twice"):
            check_celery(app, inbox)
    else:
        check_celery(app, inbox)

"""What the adapters have in common: where an id is found, and what a broker is told."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from semel.errors import ConfigurationError, MessageUnidentified
from semel.inbox import AsyncInbox, Busy, Duplicate, Inbox, Parked, Ran, Verdict
from semel.inbox import faststream as of_faststream
from semel.inbox import rabbitmq as of_rabbitmq
from semel.inbox.brokers import Answer, answer_for, header_id, received
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
    assert header_id(headers) == found


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
    return SimpleNamespace(headers={}, raw_message=SimpleNamespace(**fields), message_id="made up for this delivery")


def test_ids_of_faststream() -> None:
    """The broker's own field, or the place in a log; never the id that FastStream makes up for each delivery."""
    assert of_faststream.id_of(message(message_id="m-1")) == "m-1"
    assert of_faststream.id_of(message(topic="orders", partition=0, offset=17)) == "orders/0/17"
    methods = {"topic": lambda: "orders", "partition": lambda: 0, "offset": lambda: 17}
    assert of_faststream.id_of(message(**methods)) == "orders/0/17"
    place = SimpleNamespace(stream="orders", sequence=SimpleNamespace(stream=5, consumer=1))
    assert of_faststream.id_of(message(metadata=place)) == "orders/5"
    with pytest.raises(MessageUnidentified, match="id="):
        of_faststream.id_of(message(message_id=None))


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
        header_id({"message_id": b"\xff"})


def test_ids_of_rabbitmq() -> None:
    """A message without an id is refused with what to do about it."""
    assert of_rabbitmq.id_of(SimpleNamespace(headers={"ce-id": "e-1"}, message_id="m-1")) == "e-1"  # type: ignore[arg-type]
    assert of_rabbitmq.id_of(SimpleNamespace(headers=None, message_id="m-1")) == "m-1"  # type: ignore[arg-type]
    with pytest.raises(MessageUnidentified, match="message_id"):
        of_rabbitmq.id_of(SimpleNamespace(headers={}, message_id=None))  # type: ignore[arg-type]


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

"""Messages of a real NATS JetStream, received once."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from semel.errors import ConfigurationError, MessageUnidentified
from semel.inbox import AsyncInbox
from semel.inbox.nats import id_of, once, subscribe
from tests.inbox.consumers import parcels, prepare, receipts, until
from tests.kit import servers

MESSAGES = 20
AT_ONCE = timedelta(0)
DAY = timedelta(days=1)


@pytest.fixture
def url(postgres_url: str) -> str:
    prepare(postgres_url)
    return postgres_url


async def stream(client: Any, name: str, **settings: Any) -> JetStreamContext:
    jetstream: JetStreamContext = client.jetstream()
    config = StreamConfig(name=name, subjects=[f"{name}.>"], **{"max_age": DAY.total_seconds(), **settings})
    await jetstream.add_stream(config)
    return jetstream


async def ship(connection: Any, message: Msg) -> None:
    await connection.execute(f"INSERT INTO parcels VALUES ('{message.data.decode()}')")


async def pending(jetstream: JetStreamContext, name: str) -> int:
    """How many messages the consumer has to get, or to answer for."""
    info = await jetstream.consumer_info(name, "billing")
    return (info.num_pending or 0) + (info.num_ack_pending or 0)


async def until_done(jetstream: JetStreamContext, name: str) -> None:
    left = [1]
    while left[-1]:
        left.append(await pending(jetstream, name))


async def test_once(nats_server: servers.NATSServer, url: str) -> None:
    """A message that is in the stream three times under its id, and is not acked at first, makes one parcel."""
    async with await nats.connect(nats_server.url) as client, AsyncInbox(url, consumer="billing") as inbox:
        jetstream = await stream(client, "orders")
        for number in range(3 * MESSAGES):
            name = f"m-{number % MESSAGES}"
            # Not Nats-Msg-Id: the server would drop the second within its window.
            await jetstream.publish("orders.paid", name.encode(), headers={"ce-id": name})
        options: dict[str, Any] = {"durable": "billing", "config": ConsumerConfig(ack_wait=1)}
        await subscribe(jetstream, "orders.paid", inbox, ship, pause=AT_ONCE, **options)
        await until(lambda: len(receipts(url)) == MESSAGES)
        await until_done(jetstream, "orders")
    assert parcels(url) == sorted(f"m-{number}" for number in range(MESSAGES))


async def test_a_redelivery(nats_server: servers.NATSServer, url: str) -> None:
    """A message that was handled and could not be acked is delivered again, and is a duplicate."""
    async with await nats.connect(nats_server.url) as client, AsyncInbox(url, consumer="billing") as inbox:
        jetstream = await stream(client, "again")
        receive, deliveries = once(inbox, ship, pause=AT_ONCE), []

        async def loses_the_first_ack(message: Msg) -> None:
            deliveries.append(message.metadata.num_delivered)
            if len(deliveries) == 1:
                reply, message.reply = message.reply, "nowhere"
                await receive(message)
                message.reply = reply
            else:
                await receive(message)

        config = ConsumerConfig(ack_wait=1)
        await jetstream.subscribe("again.>", durable="billing", cb=loses_the_first_ack, manual_ack=True, config=config)
        await jetstream.publish("again.1", b"m-1")
        await until(lambda: len(deliveries) == 2)
        await until_done(jetstream, "again")
    assert parcels(url) == ["m-1"]
    (receipt,) = receipts(url)
    assert receipt.startswith("again/1@")
    assert receipts(url) == {receipt: ("done", 0)}


async def test_failures(nats_server: servers.NATSServer, url: str) -> None:
    """A message that fails comes again, until it is parked: then it is delivered no more."""

    async def fail(connection: Any, message: Msg) -> None:
        await ship(connection, message)
        raise ValueError("no stock")

    async with (
        await nats.connect(nats_server.url) as client,
        AsyncInbox(url, consumer="billing", max_attempts=3) as inbox,
    ):
        jetstream = await stream(client, "failing")
        await subscribe(jetstream, "failing.>", inbox, fail, pause=AT_ONCE, durable="billing")
        await jetstream.publish("failing.1", b"m-1", headers={"Nats-Msg-Id": "m-1"})
        await until(lambda: receipts(url) == {"m-1": ("parked", 3)})
        await until_done(jetstream, "failing")
    assert parcels(url) == []


async def test_retention(nats_server: servers.NATSServer, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stream that keeps messages for longer than receipts are kept is refused; one that keeps them for ever warns."""
    async with await nats.connect(nats_server.url) as client, AsyncInbox(url, consumer="billing") as inbox:
        jetstream = await stream(client, "old", max_age=(15 * DAY).total_seconds())
        with pytest.raises(ConfigurationError, match=r"The stream old.*handled twice"):
            await subscribe(jetstream, "old.>", inbox, ship)
        jetstream = await stream(client, "eternal", max_age=0)
        await subscribe(jetstream, "eternal.>", inbox, ship)
    assert any("eternal keeps messages for ever" in record.getMessage() for record in caplog.records)


async def test_without_acks(nats_server: servers.NATSServer, url: str) -> None:
    """A consumer of which NATS takes messages for handled that were not is refused; so is plain NATS."""
    said: list[Exception] = []

    async def hear(error: Exception) -> None:
        said.append(error)

    client = await nats.connect(nats_server.url, error_cb=hear)
    async with client, AsyncInbox(url, consumer="billing") as inbox:
        jetstream = await stream(client, "unacked")
        with pytest.raises(ConfigurationError, match="EXPLICIT"):
            await subscribe(jetstream, "unacked.>", inbox, ship, ordered_consumer=True)
        for policy in (AckPolicy.NONE, AckPolicy.ALL):
            with pytest.raises(ConfigurationError, match="EXPLICIT"):
                await subscribe(jetstream, "unacked.>", inbox, ship, config=ConsumerConfig(ack_policy=policy))
            config = ConsumerConfig(durable_name=policy.value, ack_policy=policy, deliver_subject="somewhere")
            await jetstream.add_consumer("unacked", config)
            with pytest.raises(ConfigurationError, match="EXPLICIT"):
                await subscribe(jetstream, "unacked.>", inbox, ship, durable=policy.value)
        await client.subscribe("plain", cb=once(inbox, ship))
        await client.publish("plain", b"m-1", headers={"ce-id": "m-1"})
        await until(lambda: bool(said))
    assert isinstance(said[0], ConfigurationError)
    assert (parcels(url), receipts(url)) == ([], {})


def test_no_id() -> None:
    """A message of plain NATS, without a stream, has no place: without a header it has no id."""
    plain = Msg(SimpleNamespace(), "orders.paid", data=b"m-1")  # type: ignore[arg-type]
    with pytest.raises(MessageUnidentified, match="Nats-Msg-Id"):
        id_of(plain)
    plain.headers = {"Nats-Msg-Id": "m-1"}
    assert id_of(plain) == "m-1"

"""Messages to a real RabbitMQ, read back with another client."""

import asyncio
import logging

import pytest

from semel.core.outbox import Delivered, Failed, Rejected, Unreachable
from semel.errors import ConfigurationError
from semel.publishers.rabbitmq import RabbitMQ
from tests.conftest import MAX_RABBITMQ_BYTES
from tests.kit.servers import RabbitMQServer, free_port
from tests.publishers.rabbits import channel_of, declare_exchange, declare_queue, ids_in, read_queue
from tests.publishers.sending import CREATED_AT, TRACE, cut_off, delivered, full_message, kinds, message, opened, reason
from tests.publishers.sending import through_a_death as through


async def test_everything_arrives(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """The id is AMQP's own ``message_id``; type, content type, time, headers, key and trace have their places."""
    declare_queue(rabbitmq_server, name)
    sent = full_message(payload=b"\x00\xff")
    async with opened(rabbitmq_server.url, name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    (found,) = read_queue(rabbitmq_server, name)
    assert bytes(found.body) == b"\x00\xff"
    headers = {"tenant": "blue", "greeting": "grüß dich", "traceparent": TRACE, "semel-key": "order-17"}
    assert found.properties["application_headers"] == headers
    own = {each: found.properties[each] for each in ("message_id", "type", "content_type", "delivery_mode")}
    assert own == {
        "message_id": sent.id,
        "type": "order.paid",
        "content_type": "application/vnd.shop+json",
        "delivery_mode": 2,
    }
    assert found.properties["timestamp"] == int(CREATED_AT)


async def test_again(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A message that is published a second time has the same id: a consumer can tell."""
    declare_queue(rabbitmq_server, name)
    sent = message()
    async with opened(rabbitmq_server.url, name) as publisher:
        for _ in range(2):
            assert await publisher.publish([sent]) == [Delivered()]
    assert ids_in(rabbitmq_server, name) == [sent.id, sent.id]


async def test_no_queue(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A message that no queue takes is rejected, though RabbitMQ acknowledges it; the reason says what to do."""
    async with opened(rabbitmq_server.url, name) as publisher:
        (verdict,) = await publisher.publish([message()])
    assert isinstance(verdict, Rejected)
    assert f"There is no queue '{name}'. Declare it" in reason(verdict)


async def test_one_of_a_hundred_is_unroutable(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """With an exchange the type is the routing key, and one that no queue is bound for is rejected alone."""
    declare_exchange(rabbitmq_server, name, {"order.*": f"{name}-orders"})
    messages = [message(type="refund.paid" if number == 41 else "order.paid") for number in range(100)]
    async with opened(f"{rabbitmq_server.url}?exchange={name}", name) as publisher:
        verdicts = await publisher.publish(messages)
    assert kinds(verdicts) == ["Rejected" if number == 41 else "Delivered" for number in range(100)]
    assert "no queue bound for routing key 'refund.paid'" in reason(verdicts[41])
    assert sorted(ids_in(rabbitmq_server, f"{name}-orders")) == sorted(delivered(messages, verdicts))


async def test_one_of_a_hundred_is_too_large(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """RabbitMQ closes the channel on a message that is too large. It is rejected, and the 99 others are delivered."""
    declare_queue(rabbitmq_server, name)
    messages = [message(payload=b"x" * (MAX_RABBITMQ_BYTES + 1 if number == 41 else 10)) for number in range(100)]
    async with opened(rabbitmq_server.url, name) as publisher:
        verdicts = await publisher.publish(messages)
        assert await publisher.publish([message()]) == [Delivered()]
    assert kinds(verdicts) == ["Rejected" if number == 41 else "Delivered" for number in range(100)]
    assert "larger than configured max size" in reason(verdicts[41])
    assert delivered(messages, verdicts) <= set(ids_in(rabbitmq_server, name))


async def test_a_frame_that_is_too_large(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """Over headers that fit into no frame RabbitMQ ends the connection, and the verdict says so of the message."""
    declare_queue(rabbitmq_server, name)
    async with opened(rabbitmq_server.url, name) as publisher:
        (verdict,) = await publisher.publish([message(headers=(("note", "x" * 200_000),))])
    assert "frame_too_large" in reason(verdict)
    assert isinstance(verdict, Unreachable)
    assert verdict.is_dropped


@pytest.mark.parametrize(
    "wrong",
    [{"headers": (("x" * 300, "y"),)}, {"type": "ü" * 200}, {"created_at": -1e12}],
    ids=["header", "type", "time"],
)
async def test_what_amqp_has_no_room_for(rabbitmq_server: RabbitMQServer, name: str, wrong: dict[str, object]) -> None:
    """What can't be written as AMQP is rejected before it is sent, and the message beside it is delivered."""
    declare_queue(rabbitmq_server, name)
    async with opened(rabbitmq_server.url, name) as publisher:
        verdicts = await publisher.publish([message(), message(**wrong), message()])
    assert kinds(verdicts) == ["Delivered", "Rejected", "Delivered"]
    assert "can't be written as AMQP" in reason(verdicts[1])


async def test_routing_key(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """``routing_key=`` may hold the type and the ordering key."""
    declare_exchange(rabbitmq_server, name, {"shop.order.paid.order-17": name})
    made = RabbitMQ(name, rabbitmq_server.url, exchange=name, routing_key="shop.{type}.{key}")
    async with opened(made) as publisher:
        assert kinds(await publisher.publish([full_message(), message()])) == ["Delivered", "Rejected"]
    assert len(ids_in(rabbitmq_server, name)) == 1


async def test_no_exchange(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """An exchange that is not there is found when the publisher is opened, and the message says what to do."""
    made = RabbitMQ(name, rabbitmq_server.url, exchange="nowhere")
    with pytest.raises(ConfigurationError, match=r"has no exchange 'nowhere' in vhost '/'\. Declare it"):
        await made.open()


async def test_an_exchange_that_was_deleted(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """If the exchange disappears, nothing is delivered and no message is charged for it."""
    declare_exchange(rabbitmq_server, name, {"#": name})
    async with opened(f"{rabbitmq_server.url}?exchange={name}", name) as publisher:
        assert await publisher.publish([message()]) == [Delivered()]
        with channel_of(rabbitmq_server) as channel:
            channel.exchange_delete(name)
        verdicts = await publisher.publish([message(), message()])
    assert kinds(verdicts) == ["Unreachable", "Unreachable"]
    assert "Declare it" in reason(verdicts[0])


async def test_full_queue(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A queue that is full refuses what is too much: a failure, to be tried again. What it took is delivered."""
    declare_queue(rabbitmq_server, name, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    async with opened(rabbitmq_server.url, name) as publisher:
        first, second = await publisher.publish([message()]), await publisher.publish([message()])
        ids_in(rabbitmq_server, name)
        third = await publisher.publish([message()])
    assert kinds([*first, *second, *third]) == ["Delivered", "Failed", "Delivered"]
    assert isinstance(second[0], Failed)
    assert "queue is full" in reason(second[0])


async def test_down() -> None:
    """A broker that is not there is a connection error, with its address."""
    port = free_port()
    with pytest.raises(ConnectionError, match=f"RabbitMQ at 127.0.0.1:{port} can't be reached"):
        await RabbitMQ("events", f"amqp://guest:s3cr3t@127.0.0.1:{port}/").open()


async def test_wrong_password(rabbitmq_server: RabbitMQServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is said, and not shown: not in the error, nor in any log, nor in what the object shows."""
    caplog.set_level(logging.DEBUG)
    made = RabbitMQ(name, f"amqp://guest:s3cr3t@127.0.0.1:{rabbitmq_server.port}/")
    with pytest.raises(PermissionError, match="refuses user 'guest': check password") as caught:
        await made.open()
    assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r} {caplog.text}"
    assert kinds(await made.publish([message()])) == ["Unreachable"]


async def test_cancelled(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """After a publish that was cancelled, the publisher works, and confirms nothing that it should not."""
    declare_queue(rabbitmq_server, name)
    async with opened(rabbitmq_server.url, name) as publisher:
        await cut_off(publisher)
        last = message()
        assert await publisher.publish([last]) == [Delivered()]
    assert last.id in ids_in(rabbitmq_server, name)


@pytest.mark.slow
async def test_connections_closed_by_the_broker(mortal_rabbitmq: RabbitMQServer, name: str) -> None:
    """A connection that the broker closes between two calls costs nothing: unreachable, and well after `open`."""
    declare_queue(mortal_rabbitmq, name)
    async with opened(mortal_rabbitmq.url, name) as publisher:
        await asyncio.to_thread(mortal_rabbitmq.control, "close_all_connections", "a test")
        (verdict,) = await publisher.publish([message()])
        assert isinstance(verdict, Unreachable)
        await publisher.open()
        assert await publisher.publish([message()]) == [Delivered()]


@pytest.mark.slow
async def test_killed_in_the_middle_of_a_batch(mortal_rabbitmq: RabbitMQServer, name: str) -> None:
    """Of a broker that is killed and comes back, everything that was confirmed is there, and the rest goes on."""
    declare_queue(mortal_rabbitmq, name)
    async with opened(mortal_rabbitmq.url, name) as publisher:
        confirmed, everything = await through(publisher, mortal_rabbitmq.kill, mortal_rabbitmq.start)
    found = set(ids_in(mortal_rabbitmq, name))
    assert confirmed == everything
    assert confirmed <= found


@pytest.mark.slow
async def test_blocked_by_an_alarm(mortal_rabbitmq: RabbitMQServer, name: str) -> None:
    """A broker without memory reads nothing: unreachable after the time limit, with the reason; then well again."""
    declare_queue(mortal_rabbitmq, name)
    made = RabbitMQ(name, mortal_rabbitmq.url, timeout=2)
    async with opened(made) as publisher:
        await asyncio.to_thread(mortal_rabbitmq.control, "set_vm_memory_high_watermark", "0.000001")
        try:
            verdicts = await publisher.publish([message(), message()])
        finally:
            await asyncio.to_thread(mortal_rabbitmq.control, "set_vm_memory_high_watermark", "0.4")
        assert kinds(verdicts) == ["Unreachable", "Unreachable"]
        assert "blocked by an alarm" in reason(verdicts[0])
        await publisher.open()
        assert await publisher.publish([message()]) == [Delivered()]

"""Looks into RabbitMQ with another client than the publisher's: py-amqp. It publishes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amqp import Connection

from tests.kit.servers import RabbitMQServer


@contextmanager
def channel_of(server: RabbitMQServer) -> Iterator[Any]:
    with Connection(host=f"127.0.0.1:{server.port}", userid="guest", password="guest") as connection:
        yield connection.channel()


def declare_queue(server: RabbitMQServer, name: str, **arguments: Any) -> None:
    with channel_of(server) as channel:
        channel.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)


def declare_exchange(server: RabbitMQServer, exchange: str, bindings: dict[str, str]) -> None:
    """Make an exchange; *bindings* are queues by routing key."""
    with channel_of(server) as channel:
        channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
        for routing_key, queue in bindings.items():
            channel.queue_declare(queue, durable=True, auto_delete=False)
            channel.queue_bind(queue, exchange, routing_key)


def read_queue(server: RabbitMQServer, queue: str) -> list[Any]:
    """Return all that is in the queue; it is empty then."""
    found = []
    with channel_of(server) as channel:
        while (each := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(each)
    return found


def ids_in(server: RabbitMQServer, queue: str) -> list[str]:
    return [each.properties["message_id"] for each in read_queue(server, queue)]

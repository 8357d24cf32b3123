"""The brokers that tests publish to: one of each for all tests of a process. Each test has names of its own."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.kit import servers

#: Of RabbitMQ here, so that a message that is too large is small.
MAX_MESSAGE_BYTES = 100_000


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[servers.RabbitMQServer]:
    """A test that kills it starts it again."""
    with servers.rabbitmq(settings={"max_message_size": str(MAX_MESSAGE_BYTES)}) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[servers.NATSServer]:
    """A test that kills it starts it again."""
    with servers.nats() as server:
        yield server


@pytest.fixture
def name() -> str:
    """The name of a destination that no other test has."""
    return f"events-{uuid4().hex[:8]}"

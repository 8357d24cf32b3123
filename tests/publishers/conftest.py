"""The brokers that tests publish to: one of each for all tests of a process. Each test has names of its own."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from tests.kit import servers


@pytest.fixture(scope="session")
def nats_server() -> Iterator[servers.NATSServer]:
    """A test that kills it starts it again."""
    with servers.nats() as server:
        yield server


@pytest.fixture(scope="session")
def mortal_rabbitmq() -> Iterator[servers.RabbitMQServer]:
    """One that tests may kill, and start again: other processes know nothing of it."""
    with servers.rabbitmq() as server:
        yield server


@pytest.fixture
def name() -> str:
    """The name of a destination that no other test has."""
    return f"events-{uuid4().hex[:8]}"

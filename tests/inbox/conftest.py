"""The databases that messages are received in."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from tests.inbox.consumers import prepare
from tests.kit import servers


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[servers.RabbitMQServer]:
    """A RabbitMQ for all of these tests: each has queues of its own."""
    with servers.rabbitmq() as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[servers.NATSServer]:
    """A NATS server for all of these tests: each has a stream of its own."""
    with servers.nats() as server:
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """The addresses of librdkafka's mock cluster, which is inside a producer."""
    mock = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    yield ",".join(f"{each.host}:{each.port}" for each in mock.list_topics(timeout=10).brokers.values())
    del mock


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of a database for this kind of connection, with parcels in it."""
    found: str = request.getfixturevalue("sqlite_url" if "sqlite" in kind else "postgres_url")
    prepare(found)
    return found

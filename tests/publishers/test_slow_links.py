"""A relay over a slow link to real brokers: one that is far away, and one with little bandwidth."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from semel.core.outbox import Schedule
from semel.core.webhook import new_secret
from semel.outbox import Outbox
from semel.publishers import Publisher, publisher
from semel.publishers.webhook import Webhook
from semel.stores import async_store
from semel.stores import store as open_store
from semel.work.relay import AsyncRelay
from tests.kit.servers import NATSServer, RabbitMQServer, RedisServer, free_port
from tests.kit.servers.forwarder import Forwarder
from tests.publishers.rabbits import declare_queue
from tests.publishers.rabbits import ids_in as ids_in_rabbitmq
from tests.publishers.test_celery import ids_in_rabbit, tasks_in_redis
from tests.publishers.test_kafka import Mock, headers
from tests.publishers.test_nats import ids_in as ids_in_nats
from tests.publishers.test_nats import make_stream
from tests.publishers.test_redis import ids_in as ids_in_redis
from tests.webhooks.endpoint import serving

#: Each run makes progress: a relay that has not sent all after so many never will.
MAX_RUNS = 60
#: In seconds, of one call: less than half of the messages get through in that time.
LIMIT = 0.4
SOON = Schedule((timedelta(),) * MAX_RUNS)


@dataclass(frozen=True)
class Link:
    """How slow a link is, and what is sent over it."""

    delay: float
    rate: float
    payloads: list[bytes]

    def __str__(self) -> str:
        return "far" if self.delay else "narrow"


FAR = Link(0.01, float("inf"), [b"{}"] * 40)
NARROW = Link(0.0, 1_000_000.0, [b'"' + b"x" * 40_000 + b'"'] * 24)
both = pytest.mark.parametrize("link", [FAR, NARROW], ids=str)


@pytest.fixture
def to() -> Iterator[Callable[[Link, int], int]]:
    """Return a port behind which, over the link, is another."""
    with ExitStack() as wires:
        yield (
            lambda link, port: wires.enter_context(Forwarder(free_port(), port, delay=link.delay, rate=link.rate)).port
        )


class Box:
    """An outbox with messages to one destination."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self.name = path, name
        self.ids: list[str] = []
        with closing(open_store(self.url)) as store:
            store.migrate()

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    def add(self, payloads: list[bytes]) -> None:
        with closing(sqlite3.connect(self._path)) as connection:
            outbox = Outbox(self.url, to=self.name)
            self.ids += [outbox.add(connection, "t", each, content_type="application/json") for each in payloads]
            connection.commit()

    def left(self) -> list[tuple[str, str, int, str]]:
        with closing(sqlite3.connect(self._path)) as connection:
            return connection.execute("SELECT id, state, attempts, error FROM semel_outbox").fetchall()

    async def relay(self, made: Publisher, *, until: int = 0, limit: float = LIMIT) -> None:
        """Run a relay until no more than so many are left."""
        async with async_store(self.url) as store:
            relay = AsyncRelay(store, self.name, made, publish_limit=timedelta(seconds=2 * limit))
            for _ in range(MAX_RUNS):
                if len(self.left()) == until:
                    break
                assert (await relay.run_once()).error is None
                relay._alone_until = 0.0
            await relay.close()
        assert len(self.left()) == until

    def check(self, got: list[str]) -> None:
        """Everything arrived, and nothing was sent again in more than one round."""
        assert set(got) == set(self.ids)
        assert max(Counter(got).values()) <= 2


@pytest.fixture
def box(tmp_path: Path, name: str) -> Box:
    return Box(tmp_path / "outbox.db", name)


@both
async def test_redis_streams(redis_server: RedisServer, redis_url: str, box: Box, to: Any, link: Link) -> None:
    """Entries that Redis has confirmed are not appended again, however few fit into the time limit."""
    box.add(link.payloads)
    port = to(link, redis_server.port)
    await box.relay(publisher(box.name, f"redis://127.0.0.1:{port}/0?timeout={LIMIT}"))
    box.check(ids_in_redis(redis_url, box.name))


@both
async def test_celery_through_redis(redis_server: RedisServer, redis_url: str, box: Box, to: Any, link: Link) -> None:
    """Tasks are sent one after the other, and those that the broker has are not sent again."""
    box.add(link.payloads)
    port = to(link, redis_server.port)
    url = f"celery+redis://127.0.0.1:{port}/0?queue={box.name}&timeout={LIMIT}"
    await box.relay(publisher(box.name, url))
    box.check([each["id"] for each, _ in tasks_in_redis(redis_url, box.name)])


@pytest.mark.slow
@both
async def test_celery_through_rabbitmq(rabbitmq_server: RabbitMQServer, box: Box, to: Any, link: Link) -> None:
    """So are they through RabbitMQ."""
    box.add(link.payloads)
    port = to(link, rabbitmq_server.port)
    url = f"celery+amqp://guest:guest@127.0.0.1:{port}/?queue={box.name}&timeout={LIMIT}"
    await box.relay(publisher(box.name, url))
    box.check(ids_in_rabbit(rabbitmq_server, box.name))


@pytest.mark.slow
@both
async def test_rabbitmq(rabbitmq_server: RabbitMQServer, box: Box, to: Any, link: Link) -> None:
    """Messages that RabbitMQ has confirmed are not published again."""
    declare_queue(rabbitmq_server, box.name)
    box.add(link.payloads)
    port = to(link, rabbitmq_server.port)
    await box.relay(publisher(box.name, f"amqp://guest:guest@127.0.0.1:{port}/?timeout={LIMIT}"))
    box.check(ids_in_rabbitmq(rabbitmq_server, box.name))


@pytest.mark.slow
@both
async def test_nats(nats_server: NATSServer, box: Box, to: Any, link: Link) -> None:
    """Messages that JetStream has acknowledged leave the outbox."""
    await make_stream(nats_server, box.name)
    box.add(link.payloads)
    port = to(link, int(nats_server.url.rpartition(":")[2]))
    await box.relay(publisher(box.name, f"nats://127.0.0.1:{port}?timeout={LIMIT}"))
    box.check(await ids_in_nats(nats_server.url, box.name))


@pytest.mark.slow
async def test_kafka(box: Box) -> None:
    """Records that a distant Kafka has confirmed are not produced again. Its mock can't be reached over a link."""
    far = Mock(round_trip=80)
    box.add(FAR.payloads)
    await box.relay(publisher(box.name, f"kafka://{far.hosts}?timeout=1"), limit=1)
    found = await asyncio.to_thread(far.read, box.name, len(box.ids))
    box.check([headers(each)["id"] for each in found])
    far.end()


@pytest.mark.slow
@both
async def test_webhooks(box: Box, to: Any, link: Link) -> None:
    """Webhooks that an endpoint has answered are not sent again; fewer are sent at a time where they are large."""
    box.add(link.payloads)
    async with serving() as endpoint:
        url, limit = f"http://127.0.0.1:{to(link, endpoint.port)}/", timedelta(seconds=LIMIT / 2)
        made = Webhook(box.name, url, secrets=[new_secret(b"s" * 32)], allow_private=True, timeout=limit)
        made.schedule = SOON
        await box.relay(made)
        # What was given up is on the wire still while others are sent, so a few may come for a third time.
        got = [each.headers["webhook-id"] for each in endpoint.requests]
        assert set(got) == set(box.ids)
        assert len(got) <= 2 * len(box.ids)


@pytest.mark.slow
async def test_too_large_for_the_link(redis_server: RedisServer, redis_url: str, box: Box, to: Any) -> None:
    """A message that can't be sent within the limit at all costs its own tries, and keeps none of the others."""
    box.add([b'"' + b"x" * 900_000 + b'"', *[b"{}"] * 20])
    made = publisher(box.name, f"redis://127.0.0.1:{to(NARROW, redis_server.port)}/0?timeout={LIMIT}")
    await box.relay(made, until=1)
    ((identity, state, attempts, error),) = box.left()
    assert (identity, state, attempts) == (box.ids[0], "waiting", 1)
    assert "did not confirm in time" in error
    assert set(ids_in_redis(redis_url, box.name)) >= set(box.ids[1:])

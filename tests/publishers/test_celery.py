"""Tasks for Celery through a real RabbitMQ and a real Redis, read as they are in the queue, and by a Celery worker."""

import asyncio
import base64
import json
import logging
import sys
from queue import Queue
from typing import Any

import pytest
import redis
from celery import Celery as App
from celery.contrib.testing.worker import start_worker

from semel.core.outbox import Delivered, Failed, Rejected, Unreachable
from semel.errors import ConfigurationError
from semel.publishers import publisher
from semel.publishers.celery import Celery
from tests.conftest import MAX_RABBITMQ_BYTES
from tests.kit import servers
from tests.kit.servers import RabbitMQServer, free_port
from tests.publishers.rabbits import channel_of, declare_queue, read_queue
from tests.publishers.sending import TRACE, cut_off, full_message, kinds, message, opened, reason
from tests.publishers.sending import through_a_death as through


def tasks_in_redis(url: str, queue: str) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the headers and the body of each task."""
    with redis.Redis.from_url(url) as client:
        kept: Any = client.lrange(queue, 0, -1)
    found = [json.loads(each) for each in reversed(kept)]
    return [(each["headers"], json.loads(base64.b64decode(each["body"]))) for each in found]


def ids_in_rabbit(server: RabbitMQServer, queue: str) -> list[str]:
    return [each.properties["correlation_id"] for each in read_queue(server, queue)]


async def test_everything_arrives_through_rabbitmq(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """The id is the task's id, the type its name, an object its keyword arguments; headers and trace are headers."""
    sent = full_message()
    async with opened(f"celery+{rabbitmq_server.url}?queue={name}", name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    (found,) = read_queue(rabbitmq_server, name)
    own = found.properties["application_headers"]
    assert (own["id"], own["task"], own["root_id"]) == (sent.id, "order.paid", sent.id)
    assert (own["tenant"], own["greeting"], own["traceparent"]) == ("blue", "grüß dich", TRACE)
    assert found.properties["correlation_id"] == sent.id
    assert found.properties["delivery_mode"] == 2
    assert json.loads(found.body)[:2] == [[], {"order": 17}]


@pytest.mark.parametrize(
    "payload, arguments",
    [
        (b'{"a": 1}', [[], {"a": 1}]),
        (b"[1, [2]]", [[1, [2]], {}]),
        (b'"text"', [["text"], {}]),
        (b"17", [[17], {}]),
        (b"null", [[None], {}]),
    ],
)
async def test_arguments_through_redis(redis_url: str, name: str, payload: bytes, arguments: list[Any]) -> None:
    """An object is keyword arguments, an array arguments, anything else the one argument."""
    sent = message(payload=payload)
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    ((headers, body),) = tasks_in_redis(redis_url, name)
    assert (headers["id"], headers["task"]) == (sent.id, "order.paid")
    assert body[:2] == arguments


async def test_again(redis_url: str, name: str) -> None:
    """A message that is published a second time is a task with the same id."""
    sent = message()
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        for _ in range(2):
            assert await publisher.publish([sent]) == [Delivered()]
    assert [headers["id"] for headers, _ in tasks_in_redis(redis_url, name)] == [sent.id, sent.id]


async def test_one_of_a_hundred_is_no_json(redis_url: str, name: str) -> None:
    """A payload that is not JSON is rejected alone; the 99 others are delivered."""
    messages = [message(payload=b"\xff{" if number == 41 else b"[]") for number in range(100)]
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        verdicts = await publisher.publish(messages)
    assert kinds(verdicts) == ["Rejected" if number == 41 else "Delivered" for number in range(100)]
    assert "The payload is not JSON" in reason(verdicts[41])
    assert len(tasks_in_redis(redis_url, name)) == 99


async def test_headers_of_the_application(redis_url: str, name: str) -> None:
    """A header of the application can't take the place of one of Celery's own."""
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        await publisher.publish([message(headers=(("task", "another.task"), ("retries", "x")))])
    ((headers, _),) = tasks_in_redis(redis_url, name)
    assert (headers["task"], headers["retries"]) == ("order.paid", 0)


async def test_a_queue_that_is_there(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A queue that the workers have declared in their own way is used as it is."""
    declare_queue(rabbitmq_server, name, **{"x-queue-type": "quorum"})
    async with opened(f"celery+{rabbitmq_server.url}?queue={name}", name) as publisher:
        assert await publisher.publish([message()]) == [Delivered()]


async def test_a_queue_that_was_deleted(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A task that no queue takes is not delivered, though RabbitMQ acknowledges it. The next try declares the queue."""
    async with opened(f"celery+{rabbitmq_server.url}?queue={name}", name) as publisher:
        with channel_of(rabbitmq_server) as channel:
            channel.queue_delete(name)
        verdicts = await publisher.publish([message(), message()])
        assert kinds(verdicts) == ["Unreachable", "Unreachable"]
        assert "is declared again at the next try" in reason(verdicts[0])
        last = message()
        assert await publisher.publish([last]) == [Delivered()]
    assert ids_in_rabbit(rabbitmq_server, name) == [last.id]


async def test_full_queue(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A queue that is full refuses what is too much: a failure, to be tried again."""
    declare_queue(rabbitmq_server, name, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    async with opened(f"celery+{rabbitmq_server.url}?queue={name}", name) as publisher:
        verdicts = await publisher.publish([message(), message(), message()])
    assert kinds(verdicts) == ["Delivered", "Failed", "Failed"]


async def test_too_large(rabbitmq_server: RabbitMQServer, name: str) -> None:
    """A task that is too large for RabbitMQ is rejected, and those around it are delivered."""
    large = json.dumps(["x" * MAX_RABBITMQ_BYTES]).encode()
    async with opened(f"celery+{rabbitmq_server.url}?queue={name}", name) as publisher:
        verdicts = await publisher.publish([message(), message(payload=large), message()])
    assert kinds(verdicts) == ["Delivered", "Rejected", "Delivered"]
    assert isinstance(verdicts[1], Rejected)
    assert len(ids_in_rabbit(rabbitmq_server, name)) == 2


async def test_out_of_memory(name: str) -> None:
    """A Redis without memory refuses the task: a failure, to be tried again."""
    with servers.redis(settings={"maxmemory": "1mb", "maxmemory-policy": "noeviction"}) as server:
        large = json.dumps("x" * 100_000).encode()
        async with opened(f"celery+{server.url}", name) as publisher:
            (verdict,) = await publisher.publish([message(payload=large)])
    assert isinstance(verdict, Failed)


@pytest.mark.parametrize("scheme", ["celery+amqp", "celery+redis"])
async def test_down(scheme: str) -> None:
    """A broker that is not there is a connection error at once: Celery's own patience has no end."""
    port = free_port()
    made = Celery("events", f"{scheme}://semel:s3cr3t@127.0.0.1:{port}")
    with pytest.raises(ConnectionError, match=f"The broker at 127.0.0.1:{port} can't be reached") as caught:
        await made.open()
    assert "s3cr3t" not in f"{caught.value!r} {made!r} {made._address!r}"


def test_no_client_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the packages are missing that Celery reaches Redis with, the destination is refused, with what to type."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"'jobs': Celery can't use Redis .*: pip install 'semel\[celery\]'"):
        publisher("jobs", "celery+redis://127.0.0.1/0")


async def test_wrong_password(rabbitmq_server: RabbitMQServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is said, and not shown."""
    caplog.set_level(logging.DEBUG)
    made = Celery(name, f"celery+amqp://guest:s3cr3t@127.0.0.1:{rabbitmq_server.port}/")
    with pytest.raises(PermissionError, match="refuses user 'guest': check password") as caught:
        await made.open()
    assert "s3cr3t" not in f"{caught.value!r} {caplog.text}"


async def test_away_between_two_calls(name: str) -> None:
    """A broker that is gone costs a message nothing, and what was not sent is said to be so."""
    with servers.redis(settings={"appendonly": "no"}) as server:
        async with opened(f"celery+{server.url}?timeout=2", name) as publisher:
            await asyncio.to_thread(server.kill)
            verdicts = await publisher.publish([message(), message()])
            assert kinds(verdicts) == ["Unreachable", "Unreachable"]
            assert isinstance(verdicts[1], Unreachable)
            assert "was not sent" in reason(verdicts[1])
            await asyncio.to_thread(server.start)
            await publisher.open()
            assert await publisher.publish([message()]) == [Delivered()]


async def test_cancelled(redis_url: str, name: str) -> None:
    """After a publish that was cancelled, the publisher works."""
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        await cut_off(publisher)
        last = message()
        assert await publisher.publish([last]) == [Delivered()]
    assert tasks_in_redis(redis_url, name)[-1][0]["id"] == last.id


async def test_killed_in_the_middle_of_a_batch(name: str) -> None:
    """Of a Redis that writes to disk at once, everything that was confirmed is there after kill -9."""
    with servers.redis(settings={"appendonly": "yes", "appendfsync": "always"}) as server:
        async with opened(f"celery+{server.url}?queue={name}&timeout=2", name) as publisher:
            confirmed, everything = await through(publisher, server.kill, server.start, batch=50)
        assert confirmed == everything
        assert confirmed <= {headers["id"] for headers, _ in tasks_in_redis(server.url, name)}


@pytest.mark.slow
async def test_killed_rabbitmq(mortal_rabbitmq: RabbitMQServer, name: str) -> None:
    """Of a RabbitMQ that is killed and comes back, every task that was confirmed is there."""
    async with opened(f"celery+{mortal_rabbitmq.url}?queue={name}", name) as publisher:
        confirmed, everything = await through(publisher, mortal_rabbitmq.kill, mortal_rabbitmq.start, batch=50)
    assert confirmed == everything
    assert confirmed <= set(ids_in_rabbit(mortal_rabbitmq, name))


@pytest.mark.slow
async def test_a_worker(redis_url: str, name: str) -> None:
    """A Celery worker runs the task by the message's type, with its payload as arguments and its id as the task's."""
    app = App("shop", broker=redis_url, set_as_current=False)
    app.conf.task_default_queue = name
    app.conf.worker_hijack_root_logger = False
    ran: Queue[tuple[str, int]] = Queue()

    def order_paid(task: Any, order: int) -> None:
        ran.put((task.request.id, order))

    app.task(name="order.paid", bind=True)(order_paid)
    sent = message()
    async with opened(f"celery+{redis_url}?queue={name}", name) as publisher:
        assert await publisher.publish([sent]) == [Delivered()]
    with start_worker(app, pool="solo", perform_ping_check=False):
        assert await asyncio.to_thread(ran.get, timeout=30) == (sent.id, 17)

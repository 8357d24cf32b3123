"""Celery tasks on a real RabbitMQ, with a real worker: sent twice, failing, killed in the middle."""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject, Retry

from semel.errors import ConfigurationError, MessageUnidentified
from semel.inbox import Inbox
from semel.inbox.celery import once
from tests.inbox.consumers import parcels, prepare, receipts, until
from tests.kit import servers
from tests.publishers.sending import message as relayed
from tests.publishers.sending import opened


@pytest.fixture
def url(postgres_url: str) -> str:
    prepare(postgres_url)
    return postgres_url


@pytest.fixture
def worker(rabbitmq: servers.RabbitMQServer, url: str, tmp_path: Path) -> Iterator[Celery]:
    """An app to send by; a worker runs its tasks, in processes of its own."""
    environment = os.environ | {
        "SHOP_BROKER": rabbitmq.url,
        "SHOP_STORE": url,
        "SHOP_DIED": str(tmp_path / "died"),
    }
    command = [sys.executable, "-m", "celery", "-A", "tests.inbox.tasks", "worker", "-c", "2", "-l", "WARNING"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        with Celery("sender", broker=rabbitmq.url) as app:
            app.conf.task_default_queue = "shop"
            yield app
        process.terminate()
        process.wait(30)


async def test_once(worker: Celery, rabbitmq: servers.RabbitMQServer, url: str) -> None:
    """A task that is sent twice under one id, as by the relay, has one effect. One that fails is retried and then
    parked. One with a worker that dies, or is killed at its time limit, is delivered again.
    """
    for message in ("m-1", "m-2", "m-1", "bad", "dying", "m-1"):
        worker.send_task("shop.ship", [message], task_id=f"task-{message}")
    worker.send_task("shop.ship", ["slow"], task_id="task-slow", time_limit=1)
    sent = relayed(type="shop.ship", payload=b'["relayed"]')
    async with opened(f"celery+{rabbitmq.url}?queue=shop") as publisher:
        for _ in range(2):
            await publisher.publish([sent])
    worker.send_task("shop.ship", ["last"], task_id="task-last")
    await until(lambda: len(receipts(url)) == 7 and receipts(url)["task-bad"][0] == "parked")
    assert receipts(url) == {
        "task-m-1": ("done", 0),
        "task-m-2": ("done", 0),
        "task-dying": ("done", 0),
        "task-slow": ("done", 0),
        "task-bad": ("parked", 2),
        sent.id: ("done", 0),
        "task-last": ("done", 0),
    }
    assert parcels(url) == ["dying", "last", "m-1", "m-2", "relayed", "slow"]


def test_called_as_a_function(sqlite_url: str) -> None:
    """A task that is called as a plain function has no id, and says so."""
    app = Celery("shop", broker="memory://")

    @once(app, Inbox(sqlite_url, consumer="billing"), name="shop.plain")
    def plain(_connection: object) -> None: ...

    with pytest.raises(MessageUnidentified, match="plain function"):
        plain()
    assert (plain.acks_late, plain.reject_on_worker_lost, plain.max_retries) == (True, True, None)


def test_a_retry_that_cant_be_sent(sqlite_url: str) -> None:
    """A task that has to run again, while its broker takes nothing, is requeued: Celery itself would throw it away."""
    app = Celery("shop", broker="amqp://127.0.0.1:1")
    app.conf.task_publish_retry = False

    @once(app, Inbox(sqlite_url, consumer="billing"), name="shop.failing")
    def failing(_connection: object) -> None:
        raise ValueError("no stock")

    failing.push_request(id="m-1", called_directly=False, args=[], kwargs={}, retries=0)
    with pytest.raises(Reject) as rejected:
        failing.run()
    assert rejected.value.requeue


def test_eagerly(sqlite_url: str) -> None:
    """In an app's own tests, where tasks run at once, a task returns what its handler does."""
    app = Celery("shop", broker="memory://")
    app.conf.task_always_eager = True

    @once(app, Inbox(sqlite_url, consumer="billing"), name="shop.eager")
    def add(_connection: object, one: int, other: int = 0) -> int:
        return one + other

    assert add.delay(1, other=2).get() == 3


@pytest.mark.parametrize("name", ["acks_late", "reject_on_worker_lost"])
def test_acked_early(sqlite_url: str, name: str) -> None:
    """A task that would be acked before COMMIT is refused when it is made."""
    options: dict[str, Any] = {name: False}
    with pytest.raises(ConfigurationError, match=name):
        once(Celery("shop", broker="memory://"), Inbox(sqlite_url, consumer="billing"), **options)


@pytest.mark.parametrize(
    "name, word", [("chain", "chain"), ("callbacks", "link"), ("errbacks", "link_error"), ("chord", "chord")]
)
def test_what_celery_would_send_after_it(sqlite_url: str, name: str, word: str) -> None:
    """A task with something to follow is not run: a worker that dies after COMMIT would have lost what follows. It
    comes again, so that nothing is lost, and its error says what to do; in an app's own tests that is raised.
    """
    app = Celery("shop", broker="memory://")
    ran: list[object] = []

    @once(app, Inbox(sqlite_url, consumer="billing"), name="shop.first", shared=False)
    def first(connection: object) -> None:
        ran.append(connection)

    following = {name: app.signature("shop.next") if name == "chord" else [app.signature("shop.next")]}
    first.push_request(id="m-1", called_directly=False, args=[], kwargs={}, retries=0, **following)
    with pytest.raises(Retry) as again:
        first.run()
    assert isinstance(again.value.exc, ConfigurationError)
    assert f"({word})" in str(again.value.exc)
    assert "outbox" in str(again.value.exc)
    first.pop_request()
    with pytest.raises(ConfigurationError, match="outbox"):
        first.apply(link=app.signature("shop.next"), throw=True)
    assert ran == []


def test_changed_afterwards(sqlite_url: str) -> None:
    """A task whose settings are changed by ``task_annotations``, so that one whose worker dies is lost, is not run."""
    app = Celery("shop", broker="memory://")
    app.conf.task_annotations = {"*": {"acks_late": False, "max_retries": 3}}
    check_comes_again(app, Inbox(sqlite_url, consumer="billing"), "task_annotations")


def test_a_retention_that_is_too_short(sqlite_url: str) -> None:
    """A task that its broker may deliver again when its receipt is gone is not run: Celery goes on after an error that
    comes while it is set up.
    """
    app = Celery("shop", broker="memory://")
    app.conf.broker_transport_options = {"visibility_timeout": 7200}
    check_comes_again(app, Inbox(sqlite_url, consumer="billing", retention=timedelta(hours=1)), "handled twice")


def check_comes_again(app: Celery, inbox: Inbox, why: str) -> None:
    ran: list[object] = []

    @once(app, inbox, name="shop.refused", shared=False)
    def refused(connection: object) -> None:
        ran.append(connection)

    app.finalize()
    refused.push_request(id="m-1", called_directly=False, args=[], kwargs={}, retries=100)
    with pytest.raises(Retry) as again:
        refused.run()
    refused.pop_request()
    assert isinstance(again.value.exc, ConfigurationError)
    assert why in str(again.value.exc)
    assert ran == []


def test_retries_of_celery(sqlite_url: str) -> None:
    """With ``autoretry_for``, too, a message that is parked is rejected, and does not come again."""
    app = Celery("shop", broker="memory://")

    @once(app, Inbox(sqlite_url, consumer="billing", max_attempts=1), name="shop.bad", autoretry_for=(Exception,))
    def bad(_connection: object) -> None:
        raise ValueError("no stock")

    bad.push_request(id="m-1", called_directly=False, args=[], kwargs={}, retries=0)
    with pytest.raises(Reject) as rejected:
        bad.run()
    bad.pop_request()
    assert not rejected.value.requeue

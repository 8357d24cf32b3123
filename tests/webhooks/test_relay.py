"""From the outbox to an endpoint: the relay, the table of endpoints and a real server together."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import standardwebhooks

from semel.core.webhook import new_secret
from semel.errors import StoreUnavailable
from semel.outbox import Outbox
from semel.publishers.webhook import Webhook
from semel.stores import AsyncStore, async_store
from semel.webhooks.directory import WebhookDirectory
from semel.webhooks.endpoints import AsyncEndpoints
from semel.work import webhooks as work_webhooks
from semel.work.relay import AsyncRelay
from semel.work.webhooks import Webhooks, WebhooksReport
from tests.webhooks.endpoint import Got, http, serving

SECRET = new_secret(b"s" * 32)


@pytest.fixture
async def store(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncStore]:
    monkeypatch.setenv("ACME_SECRET", SECRET)
    async with async_store(url) as opened:
        yield opened


@pytest.fixture
def on_database(url: str) -> Callable[[Callable[[Any], Any]], Any]:
    """Calls a function with a connection, in a transaction that commits."""

    def call(function: Callable[[Any], Any]) -> Any:
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
                return function(file)
        with psycopg.connect(url) as connection:
            return function(connection)

    return call


async def relay_to(store: AsyncStore, url: str) -> tuple[AsyncRelay, WebhookDirectory]:
    directory = WebhookDirectory(store, allow_private=True)
    await directory.table.add("acme", url, secrets=["env:ACME_SECRET"])
    publisher = directory.publisher((await directory.endpoints(0.0))["acme"])
    return AsyncRelay(store, "acme", publisher, batch=publisher.batch), directory


def states(on_database: Any) -> list[str]:
    rows = on_database(lambda connection: connection.execute("SELECT state FROM semel_outbox ORDER BY seq").fetchall())
    return [state for (state,) in rows]


async def test_delivered(store: AsyncStore, url: str, on_database: Any) -> None:
    """A message of the outbox arrives as a webhook under its own id, in the order of its key, and leaves the table."""
    async with serving() as server:
        relay, directory = await relay_to(store, server.url())
        outbox = Outbox(url, to="acme")

        def add(connection: Any) -> list[str]:
            return [outbox.add(connection, "order.paid", {"order": each}, key="order") for each in range(20)]

        ids = on_database(add)
        report = await relay.run_once()
        assert (report.sent, report.dead, report.retried) == (20, 0, 0)
        assert states(on_database) == []
        await directory.close()
    assert [each.headers["webhook-id"] for each in server.requests] == ids
    verify = standardwebhooks.Webhook(SECRET).verify
    assert [verify(each.body, each.headers)["order"] for each in server.requests] == [*range(20)]


async def test_gone(store: AsyncStore, url: str, on_database: Any) -> None:
    """After a 410 the message is a dead letter, the endpoint is off, and what else there is for it waits."""
    async with serving(lambda _: http(410, b"closed for good")) as server:
        relay, directory = await relay_to(store, server.url())
        outbox = Outbox(url, to="acme")
        on_database(lambda connection: outbox.add(connection, "order.paid", {"order": 1}))
        report = await relay.run_once()
        assert (report.sent, report.dead) == (0, 1)
        on_database(lambda connection: outbox.add(connection, "order.paid", {"order": 2}))
        report = await relay.run_once()
        assert report.unreachable is not None
        assert "410" in report.unreachable
        assert states(on_database) == ["dead", "ready"]
        assert await directory.endpoints(100.0) == {}
        assert len(server.requests) == 1
        await directory.close()


async def test_one_that_fails_keeps_no_other(store: AsyncStore, url: str, on_database: Any) -> None:
    """A message that an endpoint refuses waits for its next try; those of other keys are delivered."""

    def refuse_one(got: Got) -> bytes:
        return http(500 if json.loads(got.body)["order"] == 3 else 200)

    async with serving(refuse_one) as server:
        relay, directory = await relay_to(store, server.url())
        outbox = Outbox(url, to="acme")

        def add(connection: Any) -> None:
            for each in range(6):
                outbox.add(connection, "order.paid", {"order": each}, key=f"order-{each}")

        on_database(add)
        report = await relay.run_once()
        assert (report.sent, report.retried, report.dead) == (5, 1, 0)
        assert states(on_database) == ["waiting"]
        (endpoint,) = await directory.table.list()
        assert endpoint.failing_since is None  # It has taken others.
        await directory.close()


async def test_away(store: AsyncStore, url: str, on_database: Any) -> None:
    """While an endpoint can't be reached, its messages lose no try; the table says since when."""
    async with serving() as server:
        where = server.url()
    relay, directory = await relay_to(store, where)
    outbox = Outbox(url, to="acme")
    on_database(lambda connection: outbox.add(connection, "order.paid", {"order": 1}))
    report = await relay.run_once()
    assert report.unreachable is not None
    assert states(on_database) == ["ready"]
    (endpoint,) = await directory.table.list()
    assert endpoint.failing_since is not None
    await directory.close()


async def test_all_endpoints(store: AsyncStore, url: str, on_database: Any) -> None:
    """The service sends to every endpoint that is on; one that is away keeps none of the others, nor does one that
    hangs.
    """
    release = asyncio.Event()

    async def until_released(_: Got) -> bytes:
        await release.wait()
        return http()

    table = AsyncEndpoints(store)
    async with serving() as good, serving(until_released) as slow:
        for name, address in (("good", good.url()), ("slow", slow.url()), ("away", "http://127.0.0.1:1/")):
            await table.add(name, address, secrets=["env:ACME_SECRET"])

        def add(connection: Any) -> None:
            for name in ("slow", "away", "good", "nowhere"):
                Outbox(url).add(connection, "order.paid", {"order": 17}, to=name)

        on_database(add)
        service = Webhooks(store, allow_private=True)
        reports: list[WebhooksReport] = []
        while not good.requests or not slow.requests or not any(each.unreachable for each in reports):
            reports.append(await service.run_once())
        assert "webhooks: " in str(reports[-1])
        release.set()
        while sum(each.sent for each in reports) < 2:
            reports.append(await service.run_once())
        service.stop()
        await service.close()
    assert states(on_database) == ["ready", "ready"]  # To the one that is away, and to none at all.


async def test_an_endpoint_that_goes(store: AsyncStore, url: str, on_database: Any) -> None:
    """One that is turned off is not sent to any more; one that is added is, within seconds."""
    table = AsyncEndpoints(store)
    async with serving() as server:
        service = Webhooks(store, allow_private=True)
        assert (await service.run_once()).is_idle
        await table.add("acme", server.url(), secrets=["env:ACME_SECRET"])
        on_database(lambda connection: Outbox(url).add(connection, "order.paid", {}, to="acme"))
        service.look_again()
        while not server.requests:
            await service.run_once()
        await table.disable("acme", "moved")
        on_database(lambda connection: Outbox(url).add(connection, "order.paid", {}, to="acme"))
        service.look_again()
        for _ in range(3):
            await service.run_once()
        await service.close()
    assert len(server.requests) == 1


async def test_a_database_that_is_down() -> None:
    """The report says why there was nothing to send, and the next looks come less and less often."""
    away = async_store("postgresql://u@127.0.0.1:1/none")
    service = Webhooks(away)
    for _ in range(6):
        assert isinstance((await service.run_once()).error, StoreUnavailable)
    assert service.interval == timedelta(seconds=1)
    await service.close()
    await away.close()


async def test_endpoints_take_turns(
    store: AsyncStore, url: str, on_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint with much to send, and slow, has its place for one turn: then others that wait come first."""
    monkeypatch.setattr(work_webhooks, "CONCURRENCY", 1)
    monkeypatch.setattr(work_webhooks, "TURN", timedelta(0))
    async with serving() as server:
        service = Webhooks(store, allow_private=True)
        table = AsyncEndpoints(store)
        for name in ("acme", "zeta"):
            await table.add(name, server.url(), secrets=["env:ACME_SECRET"])

        def add(connection: Any) -> None:
            for each in range(3 * Webhook.batch):
                Outbox(url).add(connection, "order.paid", {"order": each}, to="acme")
            Outbox(url).add(connection, "order.paid", {"order": "other"}, to="zeta")

        on_database(add)
        while len(server.requests) < 3 * Webhook.batch + 1:
            await service.run_once()
        await service.close()
    assert [json.loads(each.body)["order"] for each in server.requests].index("other") == Webhook.batch

"""Webhooks and a real inbox: what a handler writes and the receipt are one commit, in every framework."""

import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import semel.inbox as inboxes
from semel.core.delivery import request_headers
from semel.core.webhook import new_secret, read_secret, signatures
from tests.publishers.sending import full_message
from tests.webhooks.receivers import WORLDS, Post, World

SECRET = new_secret(b"s" * 32)


def headers(message_id: str, body: bytes) -> dict[str, str]:
    at = int(time.time())
    signed = signatures([read_secret(SECRET)], message_id, at, body)
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": signed}


class Orders:
    """A file with a table of orders beside the inbox, and a receiver that writes to it."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path
        self.fails = False
        url = f"sqlite:///{path}"
        is_for_loops = "Loops" in type(world.inbox).__name__
        self.inbox = (inboxes.AsyncInbox if is_for_loops else inboxes.Inbox)(url, consumer="shop", max_attempts=2)

        def paid(connection: sqlite3.Connection, event: Any) -> None:
            connection.execute("INSERT INTO orders VALUES (?)", [event.json()["order"]]).close()
            if self.fails:
                raise RuntimeError("no luck")

        async def paid_async(connection: sqlite3.Connection, event: Any) -> None:
            paid(connection, event)

        handler = paid_async if world.is_async else paid
        self.view = type(world).decorator(self.inbox, secrets=[SECRET])(handler)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("CREATE TABLE orders (number INTEGER)")

    @property
    def numbers(self) -> list[int]:
        with closing(sqlite3.connect(self.path)) as file:
            return [number for (number,) in file.execute("SELECT number FROM orders").fetchall()]


@pytest.fixture(params=WORLDS, ids=lambda kind: kind.__name__)
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Orders, Post]]:
    world: World = request.param()
    orders = Orders(world, tmp_path / "shop.db")
    async with world.serving(orders.view) as post:
        yield orders, post
    closed = orders.inbox.close()
    if closed is not None:
        await closed


async def test_delivered_twice(served: tuple[Orders, Post]) -> None:
    """Delivered twice, an event is handled once; another one is another."""
    orders, post = served
    body, other = b'{"order": 17}', b'{"order": 18}'
    answers = [await post(headers("a", body), body) for _ in range(2)]
    answers.append(await post(headers("b", other), other))
    assert [each.status for each in answers] == [200, 200, 200]
    assert [json.loads(each.body)["outcome"] for each in answers] == ["ran", "duplicate", "ran"]
    assert orders.numbers == [17, 18]


async def test_relayed_twice(served: tuple[Orders, Post]) -> None:
    """What the relay sends twice, with the application's own headers, is known by the message's id."""
    orders, post = served
    for sent in (full_message(), full_message(payload=b'{"order": 18}')):
        for outcome in ("ran", "duplicate"):
            at = int(time.time())
            signed = signatures([read_secret(SECRET)], sent.id, at, sent.payload)
            pairs = request_headers(sent, at, signed, "relay")
            ascii_only = {name.decode(): text.decode("latin-1") for name, text in pairs if text.isascii()}
            answer = await post(ascii_only, sent.payload)
            assert (answer.status, json.loads(answer.body)["outcome"]) == (200, outcome)
    assert orders.numbers == [17, 18]


async def test_parked(served: tuple[Orders, Post]) -> None:
    """A handler that fails leaves nothing. After the last try the sender is asked to keep the event."""
    orders, post = served
    orders.fails = True
    body = b'{"order": 17}'
    answers = [await post(headers("a", body), body) for _ in range(3)]
    assert [each.status for each in answers] == [500, 503, 503]
    assert json.loads(answers[2].body)["code"] == "webhook-parked"
    assert orders.numbers == []


async def test_another_payload(served: tuple[Orders, Post]) -> None:
    """Another payload under an id that is known is not taken for the same event: the sender is told what it did."""
    orders, post = served
    body, other = b'{"order": 17}', b'{"order": 18}'
    assert (await post(headers("a", body), body)).status == 200
    refused = await post(headers("a", other), other)
    assert (refused.status, json.loads(refused.body)["code"]) == (422, "webhook-id-reused")
    assert orders.numbers == [17]

"""An answer that the database can't take in time: the operation is done, and stays done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import httpx
import psycopg
import pytest

import semel.asgi
import semel.wsgi
from semel import SINGLE_TENANT, Policy
from semel.stores import store
from semel.stores.postgres import store as sync_store
from semel.stores.postgres.address import SESSION

LARGE = 2 * 1024 * 1024
POLICY = Policy.ietf(max_response_body=2 * LARGE)
#: A server on which it takes for ever to store a large answer, and which counts how often that is tried.
SLOW = b"""
CREATE SEQUENCE tries MINVALUE 0;
CREATE FUNCTION take_long() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM nextval('tries'), pg_sleep(60);
    RETURN NEW;
END $$;
CREATE TRIGGER slow BEFORE UPDATE ON semel_keys FOR EACH ROW
    WHEN (octet_length(NEW.body) > 1000000) EXECUTE FUNCTION take_long();
"""


@pytest.fixture
def url(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    with closing(store(postgres_url)) as made:
        made.migrate()
    with psycopg.connect(postgres_url) as connection:
        connection.execute(SLOW)
    monkeypatch.setitem(SESSION, "statement_timeout", "200ms")
    monkeypatch.setattr(sync_store, "_OPTIONS", "-c statement_timeout=200ms")
    return postgres_url


def posts(client: Any) -> Iterable[Any]:
    return [client.post("/report", headers={"Idempotency-Key": "a-report-of-today"}, content=b"{}") for _ in range(2)]


def through_asgi(url: str, runs: list[int]) -> list[httpx.Response]:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        runs.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"x" * LARGE})

    async def both() -> list[httpx.Response]:
        guarded = semel.asgi.IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT, policy=POLICY)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
            answers = [await each for each in posts(client)]
        await guarded.store.close()
        return answers

    return asyncio.run(both())


def through_wsgi(url: str, runs: list[int]) -> list[httpx.Response]:
    def app(_environ: Any, start_response: Any) -> Iterable[bytes]:
        runs.append(1)
        start_response("200 OK", [("content-type", "text/plain")])
        return [b"x" * LARGE]

    guarded = semel.wsgi.IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT, policy=POLICY)
    with (
        httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client,
        closing(guarded.store),
    ):
        return list(posts(client))


@pytest.mark.parametrize("through", [through_asgi, through_wsgi], ids=["asgi", "wsgi"])
def test_answer_too_large_to_store_in_time(url: str, through: Any) -> None:
    """An answer that meets the database's time limit is tried once. Its client gets it; a retry is told that the
    operation is done and its answer can't be repeated; and the handler runs once.
    """
    runs: list[int] = []
    first, retry = through(url, runs)
    with psycopg.connect(url) as connection:
        tries = connection.execute("SELECT last_value FROM tries").fetchall()

    assert (first.status_code, len(first.content)) == (200, LARGE)
    assert retry.status_code == 409
    assert retry.json()["type"].endswith("response-not-replayable")
    assert len(runs) == 1
    assert tries == [(0,)]

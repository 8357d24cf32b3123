"""The program of the page on waiting does what the page says."""

import asyncio
from pathlib import Path

import pytest

from tests.docs.served import asgi, load

KEY = {"Idempotency-Key": "order-17"}


async def test_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clicks are one payment, and each gets its answer; where the policy does not wait, a client's wish does."""
    monkeypatch.chdir(tmp_path)
    example = load("wait_app")
    async with asgi(example.app) as client:
        clicks = await asyncio.gather(*(client.post("/payments", json={"amount": 5}, headers=KEY) for _ in range(5)))
        assert [(click.status_code, click.json()) for click in clicks] == [(201, {"payment": 1})] * 5
        assert sorted("idempotent-replayed" in click.headers for click in clicks) == [False, True, True, True, True]
        wish = {"Idempotency-Key": "order-18", "Prefer": "wait=5"}
        orders = await asyncio.gather(*(client.post("/orders", json={"item": "tea"}, headers=wish) for _ in range(2)))
    told = sorted(order.headers.get("preference-applied", "") for order in orders)
    assert ([order.status_code for order in orders], told) == ([201, 201], ["", "wait=5"])
    assert example.payments == [5]

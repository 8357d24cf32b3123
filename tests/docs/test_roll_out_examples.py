"""The programs of the pages on rolling out, and on clients without keys, do what the pages say."""

from pathlib import Path

import httpx
import pytest

from tests.docs.served import asgi, load

ACCOUNT = {"X-Account": "alice"}
KEY = ACCOUNT | {"Idempotency-Key": "key-1"}
TEA = {"item": "tea"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples keep semel.db where they are started."""
    monkeypatch.chdir(tmp_path)


def is_replay(response: httpx.Response) -> bool:
    return "idempotent-replayed" in response.headers


async def test_roll_out() -> None:
    """What is reported runs each time and is counted; what is enforced is guarded, and not counted."""
    example = load("roll_out")
    async with asgi(example.app) as client:
        paid = [await client.post("/payments", json={"amount": 5}, headers=KEY) for _ in range(2)]
        unpaid = await client.post("/payments", json={"amount": 5}, headers=ACCOUNT)
        ordered = [
            await client.post("/orders", json=body, headers=headers)
            for body, headers in ((TEA, KEY), (TEA, KEY), ({"item": "cake"}, KEY), (TEA, ACCOUNT))
        ]
        counts = (await client.get("/internal/idempotency")).json()
    assert [(each.status_code, is_replay(each)) for each in paid] == [(201, False), (201, True)]
    assert unpaid.status_code == 400
    assert [each.json() for each in ordered] == [{"order": number} for number in (1, 2, 3, 4)]
    assert not any(is_replay(each) for each in ordered)
    assert counts == {"POST /orders": {"new": 1, "replay": 1, "mismatch": 1, "missing": 1}}
    assert (example.payments, example.orders) == ([5], ["tea", "tea", "cake", "tea"])


async def test_body_hash() -> None:
    """The same order within the window is one; another number, another till or another order is another."""
    example = load("body_hash_app")
    tea = {"table": 4, "lines": [{"item": "tea", "count": 2}]}
    till = {"X-Till": "7"}
    async with asgi(example.app) as client:
        first = await client.post("/orders", json=tea | {"at": 1}, headers=till)
        again = await client.post("/orders", json=tea | {"at": 2}, headers=till)
        others = [
            await client.post("/orders", json=tea, headers=till | {"X-Order-Number": "2"}),
            await client.post("/orders", json=tea, headers={"X-Till": "8"}),
            await client.post("/orders", json=tea | {"table": 5}, headers=till),
        ]
        nothing = await client.post("/orders", json={"lines": []}, headers=till)
    assert (first.json(), again.json(), is_replay(again)) == ({"order": 1}, {"order": 1}, True)
    assert [(each.json()["order"], is_replay(each)) for each in others] == [(2, False), (3, False), (4, False)]
    assert (nothing.status_code, nothing.json()["code"]) == (400, "idempotency-key-missing")

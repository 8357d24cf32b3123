"""Every program in docs/examples runs, and does what the page that shows it says."""

import asyncio
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.served import ASKING, EXAMPLES, HANG_SECONDS, asgi, load, server, wsgi

KEY = {"Idempotency-Key": '"order-17"'}
PROBLEM = "application/problem+json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Examples keep semel.db where they are started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_replay(response: httpx.Response) -> bool:
    return "idempotent-replayed" in response.headers


def test_every_example_is_short_and_tested() -> None:
    """An example is under 60 lines, and a file of this folder runs it."""
    tested = "".join(each.read_text() for each in Path(__file__).parent.glob("test_*.py"))
    for example in EXAMPLES.rglob("*.py"):
        assert len(example.read_text().splitlines()) < 60
        assert f'"{example.relative_to(EXAMPLES).with_suffix("")}"' in tested, example


async def test_quickstart() -> None:
    """A retry gets the first answer, another body 422, no key 400."""
    example = load("quickstart")
    async with asgi(example.app) as client:
        first = await client.post("/payments", json={"amount": 50}, headers=KEY)
        again = await client.post("/payments", json={"amount": 50}, headers=KEY)
        other = await client.post("/payments", json={"amount": 60}, headers=KEY)
        without = await client.post("/payments", json={"amount": 70})
    assert (first.status_code, again.status_code, other.status_code, without.status_code) == (201, 201, 422, 400)
    assert first.content == again.content
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert other.headers["content-type"] == PROBLEM
    assert example.payments == [50]


def test_fastapi_session() -> None:
    """A dependency that asks for the guard hands a route the operation's connection; the route counts as guarded."""
    example = load("fastapi_session")
    assert "x-idempotency" in example.app.openapi()["paths"]["/payments"]["post"]


async def test_fastapi() -> None:
    """Two accounts with one key never meet; a stranger gets 401, and who may not refund 403, replay or not."""
    example = load("fastapi_app")
    alice, bob = ({"Authorization": f"Bearer token-of-{name}"} for name in ("alice", "bob"))
    body = {"amount": 5}
    async with asgi(example.app) as client:
        for who in (alice, bob, alice):
            paid = await client.post("/payments", json=body, headers=KEY | who)
        nobody = await client.post("/payments", json=body, headers=KEY)
        missing = await client.post("/payments", json=body, headers=alice)
        refunds = [await client.post("/refunds", json=body, headers={"Idempotency-Key": "r"} | alice) for _ in range(2)]
        example.CLERKS.clear()
        refused = await client.post("/refunds", json=body, headers={"Idempotency-Key": "r"} | alice)
        schema = (await client.get("/openapi.json")).json()
    assert is_replay(paid)
    assert paid.json() == {"payment": 1, "account": "alice", "attempt": 1}
    assert nobody.status_code == 401
    assert (missing.status_code, missing.json()["code"]) == (400, "idempotency-key-missing")
    assert [is_replay(each) for each in (*refunds, refused)] == [False, True, False]
    assert refused.status_code == 403
    assert example.ledger == [("alice", 5), ("bob", 5), ("alice", -5)]
    assert all("x-idempotency" in schema["paths"][path]["post"] for path in ("/payments", "/refunds"))


async def test_litestar() -> None:
    """Login and permission are asked before the key; two accounts with one key never meet."""
    example = load("litestar_app")
    alice, bob = ({"Authorization": f"Bearer token-of-{name}"} for name in ("alice", "bob"))
    body = {"amount": 5}
    async with asgi(example.app) as client:
        for who in (alice, bob, alice):
            paid = await client.post("/payments", json=body, headers=KEY | who)
        nobody = await client.post("/payments", json=body, headers=KEY)
        missing = await client.post("/payments", json=body, headers=alice)
        example.frozen.add("alice")
        refused = await client.post("/payments", json=body, headers=KEY | alice)
    assert is_replay(paid)
    assert paid.json() == {"payment": 1, "account": "alice"}
    assert [each.status_code for each in (nobody, missing, refused)] == [401, 400, 403]
    assert example.ledger == [("alice", 5), ("bob", 5)]


async def test_starlette() -> None:
    """The user of the outer layer is the scope; a required key is asked for; Location is replayed."""
    example = load("starlette_app")
    alice, bob = {"X-User": "alice"}, {"X-User": "bob"}
    async with asgi(example.app) as client:
        await client.post("/orders", json={"item": "tea"}, headers=KEY | alice)
        again = await client.post("/orders", json={"item": "tea"}, headers=KEY | alice)
        bobs = await client.post("/orders", json={"item": "cake"}, headers=KEY | bob)
        missing = await client.post("/orders", json={"item": "tea"}, headers=alice)
    assert is_replay(again)
    assert again.headers["location"] == "/orders/1"
    assert (bobs.status_code, is_replay(bobs)) == (201, False)
    assert (missing.status_code, missing.json()["code"]) == (400, "idempotency-key-missing")
    assert example.orders == ["tea", "cake"]


def test_flask() -> None:
    """A Flask view is guarded after its login: nobody gets 401, each account has its own keys, and one row stays."""
    example = load("flask_app")
    alice, bob = ({"Authorization": f"Bearer token-of-{name}"} for name in ("alice", "bob"))
    with wsgi(example.app, example.app.extensions["semel"]) as client:
        nobody = client.post("/payments", json={"amount": 5}, headers=KEY)
        answers = [client.post("/payments", json={"amount": 5}, headers=KEY | alice) for _ in range(2)]
        other = client.post("/payments", json={"amount": 6}, headers=KEY | alice)
        bobs = client.post("/payments", json={"amount": 7}, headers=KEY | bob)
    assert [answer.status_code for answer in (nobody, *answers, other, bobs)] == [401, 201, 201, 422, 201]
    assert [is_replay(answer) for answer in (*answers, bobs)] == [False, True, False]
    assert answers[0].content == answers[1].content
    with example.app.app_context():
        amounts = [payment.amount for payment in example.Payment.query.order_by(example.Payment.id)]
        example.db.engine.dispose()
    assert amounts == [5, 7]


def test_wsgi() -> None:
    """Any WSGI callable can be wrapped, and a cookie goes to the first client only."""
    example = load("wsgi_app")
    with wsgi(example.app, example.app) as client:
        first, again = (client.post("/", content=b"four", headers=KEY) for _ in range(2))
    assert first.text == again.text == "run 1 with a body of 4 bytes\n"
    assert ("set-cookie" in first.headers, "set-cookie" in again.headers) == (True, False)
    assert example.runs == ["order-17"]


async def test_stripe() -> None:
    """The Stripe preset refuses in Stripe's shape and keeps server errors."""
    example = load("stripe_app")
    async with asgi(example.app) as client:
        await client.post("/v1/charges", json={"amount": 5}, headers=KEY)
        other = await client.post("/v1/charges", json={"amount": 6}, headers=KEY)
        failed, again = [
            await client.post("/v1/charges", json={"amount": 20_000}, headers={"Idempotency-Key": "big"})
            for _ in range(2)
        ]
    assert (other.status_code, other.json()["error"]["type"]) == (400, "idempotency_error")
    assert other.headers["content-type"] == "application/json"
    assert (failed.status_code, again.status_code, is_replay(again)) == (503, 503, True)
    assert example.charges == [5, 20_000]


async def test_policies() -> None:
    """Each path has its policy, and what matches no pattern is not guarded."""
    example = load("policies_app")
    async with asgi(example.app) as client:
        missing = await client.post("/payments", json={"amount": 5})
        events = [
            await client.post("/events", json={"kind": "seen", "sent_at": sent_at}, headers=KEY)
            for sent_at in ("10:00", "10:01")
        ]
        cancelled = [await client.delete(f"/orders/{number}", headers=KEY) for number in (7, 8, 7)]
        searches = [await client.post("/searches", headers=KEY) for _ in range(2)]
    assert missing.status_code == 400
    assert is_replay(events[1])
    assert events[1].json()["sent_at"] == "10:00"
    assert [is_replay(each) for each in (*cancelled, *searches)] == [False, False, True, False, False]
    assert example.runs == ["event", "cancel 7", "cancel 8", "search", "search"]


async def test_derived_key() -> None:
    """A provider gets a key that is neither the client's own nor the same for two operations."""
    example = load("derived_key_app")
    async with asgi(example.app) as client:
        for key in ("one", "one", "two"):
            await client.post("/payments", json={"amount": 5}, headers={"Idempotency-Key": key})
    assert list(example.provider.charges.values()) == [5, 5]
    assert not example.provider.charges.keys() & {"one", "two"}


async def test_no_effect() -> None:
    """A handler that says that nothing happened frees the key."""
    example = load("no_effect_app")
    async with asgi(example.app) as client:
        refused = await client.post("/transfers", json={"amount": 5}, headers=KEY)
        no_quote = await client.post("/quotes", headers={"Idempotency-Key": "quote"})
        example.bank["is_open"] = True
        done = await client.post("/transfers", json={"amount": 5}, headers=KEY)
        quote = await client.post("/quotes", headers={"Idempotency-Key": "quote"})
    assert (refused.status_code, refused.json()["code"], refused.headers["retry-after"]) == (503, "no-effect", "1")
    assert no_quote.status_code == 502
    assert (done.status_code, quote.status_code) == (201, 201)
    assert not is_replay(done)
    assert example.transfers == [5]


async def test_tutorial_unguarded_charges_twice() -> None:
    """Without a guard every request is a charge."""
    example = load_quick("tutorial/unguarded")
    async with asgi(example.app) as client:
        for _ in range(2):
            await client.post("/payments", json={"amount": 50}, headers=KEY)
    assert charges() == ["50", "50"]


async def test_tutorial_guarded_charges_once() -> None:
    """A retry is replayed, a double click gets 409, another body 422."""
    example = load_quick("tutorial/guarded")
    async with asgi(example.app) as client:
        both = await asyncio.gather(*[client.post("/payments", json={"amount": 50}, headers=KEY) for _ in range(2)])
        again = await client.post("/payments", json={"amount": 50}, headers=KEY)
        other = await client.post("/payments", json={"amount": 51}, headers=KEY)
    assert sorted(each.status_code for each in both) == [201, 409]
    assert (again.status_code, is_replay(again), other.status_code) == (201, True, 422)
    assert charges() == ["50"]


@pytest.mark.slow
@pytest.mark.parametrize("name, expected", [("tutorial/guarded", 2), ("tutorial/derived", 1)])
def test_tutorial_kill(name: str, expected: int, folder: Path) -> None:
    """After kill -9 in mid-handler the retry runs again: only a key of the provider's own stops the second charge."""
    program = (EXAMPLES / f"{name}.py").read_text()
    program = program.replace("seconds=5", "seconds=1")
    body: dict[str, Any] = {"json": {"amount": 50}, "headers": KEY}
    (folder / "payments.py").write_text(program.replace("sleep(2)", f"sleep({HANG_SECONDS})"))
    with server(folder) as (process, url):
        killer = f"until [ -s charges.txt ]; do sleep 0.01; done; kill -9 {process.pid}"
        with subprocess.Popen(["/bin/sh", "-c", killer], cwd=folder), pytest.raises(httpx.HTTPError):
            httpx.post(url, **body, **ASKING)
    (folder / "payments.py").write_text(program.replace("sleep(2)", "sleep(0)"))
    with server(folder) as (_, url):
        while (answer := httpx.post(url, **body, **ASKING)).status_code == 409:
            assert (answer.json()["code"], answer.headers["retry-after"]) == ("idempotency-key-in-progress", "1")
            threading.Event().wait(0.05)  # what the answer asks for, only more often
    assert (answer.status_code, is_replay(answer)) == (201, False)
    assert len(charges()) == expected


def load_quick(name: str) -> Any:
    """Load an example of the tutorial whose card company answers soon."""
    example: Any = load(name)
    example.time = type("Time", (), {"sleep": staticmethod(lambda _: time.sleep(0.3))})
    return example


def charges() -> list[str]:
    return [line.split()[0] for line in Path("charges.txt").read_text().splitlines()]

"""What a person finds who has the database and no secret, and what a process without the secret does: nothing wrong."""

import asyncio
import base64
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import semel
from semel import SINGLE_TENANT, Policy, stores
from semel.asgi import IdempotencyMiddleware
from semel.core.commands import Browse, Claim, Complete, FindStuck, Look
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from semel.errors import ConfigurationError, SecretMissing
from semel.stores.encrypted import Encrypted
from semel.stores.encrypted.store import AsyncEncryptedStore
from semel.stores.tiered import Tiered
from semel.testing import Clock
from semel.work import AsyncCompleter, AsyncSweeper

#: What must be found nowhere.
CANARY = "canary-4711"
KEY = {"Idempotency-Key": "key-1"}
OLD, NEW = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """One secret in the environment, unless a test says others."""
    monkeypatch.setenv("SECRETS", OLD)
    return lambda text: monkeypatch.setenv("SECRETS", text)


class Shop:
    """An app with a phase, an effect, and an answer that all have the canary."""

    def __init__(self) -> None:
        self.runs = self.phases = 0
        self.fails = False

    async def pay(self, request: Request) -> Response:
        self.runs += 1
        body = await request.json()
        operation = semel.current()

        def create(_: Any) -> dict[str, str]:
            self.phases += 1
            return {"name": CANARY}

        made = await operation.phase("created", semel.in_thread(create))
        if self.fails:
            raise semel.NoEffect
        return JSONResponse(made | body, 201, {"location": f"/payments/{CANARY}"})

    async def two(self, _: Request) -> Response:
        """Two steps after the one that it may fail behind."""
        self.runs += 1
        operation = semel.current()

        def create(_: Any) -> dict[str, str]:
            self.phases += 1
            return {"name": CANARY}

        await operation.phase("created", semel.in_thread(create))
        if self.fails:
            raise semel.NoEffect
        sent = await operation.effect("sent", self.send)
        return JSONResponse(await operation.phase("noted", semel.in_thread(create)) | sent, 201)

    async def send(self, **_: Any) -> dict[str, str]:
        return {"sent": CANARY}

    async def plain(self, _: Request) -> Response:
        self.runs += 1
        return JSONResponse({"name": CANARY}, 201)

    @asynccontextmanager
    async def at(self, store: Any, **policy: Any) -> AsyncIterator[httpx.AsyncClient]:
        routes = [Route(f"/{each.__name__}", each, methods=["POST"]) for each in (self.pay, self.two, self.plain)]
        app = IdempotencyMiddleware(
            Starlette(routes=routes), store=store, scope=SINGLE_TENANT, policy=Policy.ietf(**policy), work=False
        )
        self.middleware = app
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://shop"
        ) as client:
            yield client
        await app.store.close()


def with_secrets(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}encrypt=env:SECRETS"


def sent() -> dict[str, Any]:
    return {"headers": KEY, "json": {"card": CANARY}}


def at_rest(url: str) -> bytes:
    """All bytes of a SQLite file and of its log."""
    path = Path(url.removeprefix("sqlite:///"))
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


async def test_nothing_readable_is_stored(sqlite_url: str) -> None:
    """Of the answer's body and headers, of a step's result and of a stored request, the file shows nothing."""
    shop = Shop()
    shop.fails = True
    async with shop.at(with_secrets(sqlite_url), store_request=True) as client:
        assert (await client.post("/pay", **sent())).status_code == 503
        assert CANARY.encode() not in at_rest(sqlite_url)
        assert b"created" in at_rest(sqlite_url)  # The recovery point is for people.
        shop.fails = False
        first = await client.post("/pay", **sent())
        again = await client.post("/pay", **sent())
    assert CANARY.encode() not in at_rest(sqlite_url)
    assert (first.status_code, first.json(), first.headers["location"]) == (
        201,
        {"name": CANARY, "card": CANARY},
        f"/payments/{CANARY}",
    )
    assert (again.content, again.headers["location"]) == (first.content, first.headers["location"])
    assert again.headers["idempotent-replayed"] == "true"
    assert (shop.runs, shop.phases) == (2, 1)


async def test_atomic(migrated_postgres_url: str) -> None:
    """The same in atomic mode on PostgreSQL: what is in the row can't be read, and its replay is the first answer."""
    shop = Shop()
    async with shop.at(with_secrets(migrated_postgres_url), mode="atomic") as client:
        first = await client.post("/plain", headers=KEY)
        again = await client.post("/plain", headers=KEY)
    assert (first.content, shop.runs) == (again.content, 1)
    with psycopg.connect(migrated_postgres_url) as connection:
        row = connection.execute("SELECT semel_keys::text, body FROM semel_keys").fetchone()
    assert row is not None
    assert CANARY not in row[0]
    assert CANARY.encode() not in row[1]


async def test_a_completer_opens_the_request(sqlite_url: str) -> None:
    """A worker with the secret runs the stored request as it came."""
    shop = Shop()
    shop.fails = True
    async with shop.at(with_secrets(sqlite_url), store_request=True) as client:
        await client.post("/pay", **sent())
        shop.fails = False
        with closing(stores.store(sqlite_url)) as store:
            (record,) = store.perform(Browse(10))
        assert record.recovery_point == "created"
        Clock(sqlite_url).advance(Policy.ietf().lease)
        report = await AsyncCompleter(shop.middleware.store, shop.middleware.finish).run_once()
        assert report.finished == 1
        assert (await client.post("/pay", **sent())).json() == {"name": CANARY, "card": CANARY}


@pytest.mark.parametrize("secret", ["", "?encrypt=env:SECRETS"], ids=["none", "another"])
async def test_without_the_secret(sqlite_url: str, secrets: Callable[[str], None], secret: str) -> None:
    """A process that lacks the secret answers 503 and runs nothing: it has no answer, and no step to go on from."""
    shop = Shop()
    async with shop.at(with_secrets(sqlite_url)) as client:
        await client.post("/plain", headers={"Idempotency-Key": "done"})
        shop.fails = True
        await client.post("/pay", **sent())
    shop.fails = False
    runs = shop.runs
    secrets(NEW)
    async with shop.at(sqlite_url + secret) as client:
        refused = [
            await client.post("/plain", headers={"Idempotency-Key": "done"}),
            await client.post("/pay", **sent()),
        ]
    assert [each.status_code for each in refused] == [503, 503]
    assert {each.json()["type"] for each in refused} == {"urn:semel:problem:store-unavailable"}
    assert shop.runs == runs
    secrets(OLD)
    async with shop.at(with_secrets(sqlite_url)) as client:
        assert (await client.post("/plain", headers={"Idempotency-Key": "done"})).status_code == 201
        Clock(sqlite_url).advance(Policy.ietf().lease)
        assert (await client.post("/pay", **sent())).status_code == 201
    assert (shop.runs, shop.phases) == (runs + 1, 1)


async def test_a_new_secret(sqlite_url: str, secrets: Callable[[str], None]) -> None:
    """The first secret writes and all of them read: with the old one behind the new one, no answer is lost."""
    shop = Shop()
    async with shop.at(with_secrets(sqlite_url)) as client:
        await client.post("/plain", headers=KEY)
    secrets(f"{NEW}\n{OLD}")
    async with shop.at(with_secrets(sqlite_url)) as client:
        assert (await client.post("/plain", headers=KEY)).status_code == 201
        await client.post("/plain", headers={"Idempotency-Key": "key-2"})
    secrets(NEW)
    async with shop.at(with_secrets(sqlite_url)) as client:
        assert (await client.post("/plain", headers={"Idempotency-Key": "key-2"})).status_code == 201
        assert (await client.post("/plain", headers=KEY)).status_code == 503
    assert shop.runs == 2


@pytest.mark.parametrize("mode", ["guard", "atomic"])
@pytest.mark.parametrize("late, status", [("rerun", 201), ("refuse", 410)])
async def test_a_secret_is_left_out_after_the_retention(
    sqlite_url: str, secrets: Callable[[str], None], mode: str, late: str, status: int
) -> None:
    """What expired is needed no more, nor is its secret: a retry is a new operation, or refused, reaped or not."""
    shop = Shop()
    paths = ["/plain"] if mode == "atomic" else ["/plain", "/two"]
    async with shop.at(with_secrets(sqlite_url), mode=mode, late=late) as client:
        for path in paths:
            await client.post(path, headers={"Idempotency-Key": path})
    Clock(sqlite_url).advance(Policy.ietf().retention)
    secrets(NEW)
    async with shop.at(with_secrets(sqlite_url), mode=mode, late=late) as client:
        for path in paths:
            assert (await client.post(path, headers={"Idempotency-Key": path})).status_code == status


async def test_turned_on_later(sqlite_url: str) -> None:
    """What was stored before there was a secret is replayed as before."""
    shop = Shop()
    async with shop.at(sqlite_url) as client:
        first = await client.post("/plain", headers=KEY)
    async with shop.at(with_secrets(sqlite_url)) as client:
        again = await client.post("/plain", headers=KEY)
    assert (again.content, again.headers["idempotent-replayed"], shop.runs) == (first.content, "true", 1)


async def test_an_answer_in_another_row(sqlite_url: str) -> None:
    """An answer that was moved to another record is not given: 503, and nothing runs."""
    shop = Shop()
    async with shop.at(with_secrets(sqlite_url)) as client:
        await client.post("/plain", headers=KEY)
        await client.post("/plain", headers={"Idempotency-Key": "key-2"})
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(
                "UPDATE semel_keys SET (headers, body) = (SELECT headers, body FROM semel_keys WHERE key = 'key-1')"
                " WHERE key = 'key-2'"
            )
        refused = await client.post("/plain", headers={"Idempotency-Key": "key-2"})
        assert (refused.status_code, shop.runs) == (503, 2)
        assert (await client.post("/plain", headers=KEY)).status_code == 201


@pytest.mark.parametrize("outside", [True, False])
async def test_a_cache_has_nothing_readable(sqlite_url: str, redis_url: str, outside: bool) -> None:
    """With a cache in front, encryption is around both, wherever it was written down."""
    shop = Shop()
    store: Any = (
        Encrypted(Tiered(sqlite_url, redis_url), "env:SECRETS")
        if outside
        else Tiered(with_secrets(sqlite_url), redis_url)
    )
    async with shop.at(store) as client:
        first = await client.post("/plain", headers=KEY)
        again = await client.post("/plain", headers=KEY)
    assert (first.content, shop.runs) == (again.content, 1)
    with redis.Redis.from_url(redis_url) as client:
        kept = [client.dump(each) or b"" for each in client.scan_iter()]
    assert kept
    assert CANARY.encode() not in b"".join(kept)
    assert CANARY.encode() not in at_rest(sqlite_url)


async def test_operators(sqlite_url: str, secrets: Callable[[str], None]) -> None:
    """Who has the secret sees the record as it was; who has not still sees all records in a list."""
    shop = Shop()
    shop.fails = True
    async with shop.at(with_secrets(sqlite_url)) as client:
        await client.post("/pay", **sent())
        await client.post("/plain", headers={"Idempotency-Key": "key-2"})
    with closing(stores.store(with_secrets(sqlite_url))) as store:
        one, other = store.perform(Browse(10))
        record = store.perform(Look(other.scope, other.key))
        assert record is not None
        assert record.steps == json.dumps([{"phase": "created", "result": {"name": CANARY}}], separators=(",", ":"))
        assert one.answer is not None
        assert (b"content-type", b"application/json") in one.answer.headers
    secrets(NEW)
    with closing(stores.store(with_secrets(sqlite_url))) as store:
        assert [each.key for each in store.perform(Browse(10))] == ["key-2", "key-1"]
        with pytest.raises(SecretMissing, match="lacks the secret"):
            store.perform(Look(other.scope, other.key))


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "no secret at env:SECRETS"),
        (",", "no secret to encrypt with"),
        ("short", "not base64"),
        (base64.b64encode(b"short").decode(), "5 bytes"),
    ],
)
def test_secrets_that_are_none(secrets: Callable[[str], None], text: str, says: str) -> None:
    """A secret that is missing or too short is an error before anything is opened."""
    secrets(text)
    with pytest.raises(ConfigurationError, match=says) as error:
        stores.store("memory://?encrypt=env:SECRETS")
    assert "short" not in str(error.value)


@pytest.mark.parametrize("url", ["memory://?encrypt=4711", "memory://?encrypt=", "memory://?encrypt=env:"])
def test_a_place_that_is_none(url: str) -> None:
    """A URL says where the secrets are; one that holds a secret is refused, and not repeated."""
    with pytest.raises(ConfigurationError, match="env:NAME") as error:
        stores.store(url)
    assert "4711" not in str(error.value)


def test_two_places() -> None:
    """Two places for secrets are a mistake."""
    with pytest.raises(ConfigurationError, match="twice"):
        stores.store("memory://?encrypt=env:SECRETS&encrypt=env:OTHERS")


def test_other_settings_stay(sqlite_url: str) -> None:
    """Other settings of the URL are the store's, as before."""
    with closing(stores.store(f"{sqlite_url}?encrypt=env:SECRETS&table=ours")) as store:
        store.migrate()
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        assert ("ours",) in connection.execute("SELECT name FROM sqlite_master").fetchall()


@pytest.mark.parametrize("given", [None, Encrypted("memory://", "env:SECRETS")])
def test_no_store(given: Any) -> None:
    """Encryption is around a store, once."""
    with pytest.raises(ConfigurationError, match="Which store"):
        Encrypted(given, "env:SECRETS")


@pytest.mark.parametrize("before", ["", "?encrypt=env:SECRETS"], ids=["none", "another"])
async def test_an_operation_goes_on_with_a_new_secret(
    sqlite_url: str, secrets: Callable[[str], None], before: str
) -> None:
    """An operation that was begun before there was this secret goes on from its recovery point, and ends."""
    shop = Shop()
    shop.fails = True
    async with shop.at(sqlite_url + before) as client:
        await client.post("/two", **sent())
    shop.fails = False
    secrets(f"{NEW} {OLD}")
    Clock(sqlite_url).advance(Policy.ietf().lease)
    async with shop.at(with_secrets(sqlite_url)) as client:
        assert (await client.post("/two", **sent())).status_code == 201
    assert (shop.runs, shop.phases) == (2, 2)


async def test_one_that_is_unreadable(sqlite_url: str, secrets: Callable[[str], None]) -> None:
    """An operation that this process can't read stops neither the sweeper nor the completer: others wait behind it."""
    shop = Shop()
    shop.fails = True
    async with shop.at(with_secrets(sqlite_url), store_request=True) as client:
        await client.post("/pay", **sent())
        secrets(NEW)
    async with shop.at(with_secrets(sqlite_url), store_request=True) as client:
        await client.post("/pay", headers={"Idempotency-Key": "key-2"}, json={"card": CANARY})
        shop.fails = False
        Clock(sqlite_url).advance(timedelta(hours=1))
        report = await AsyncCompleter(shop.middleware.store, shop.middleware.finish).run_once()
        assert (report.finished, report.failed, report.error) == (1, 1, None)
        swept = await AsyncSweeper(shop.middleware.store).run_once()
        assert swept.error is None
        with closing(stores.store(with_secrets(sqlite_url))) as store:
            (stuck,) = store.perform(FindStuck(10, with_request=True, with_no_token=True))
        assert stuck.steps is not None
        assert "semel-encrypted" in stuck.steps


@pytest.mark.parametrize("made", ["store", "async_store"])
def test_encryption_is_outside(sqlite_url: str, made: str) -> None:
    """A cache in front of a store that decrypts would keep readable answers; and nothing is encrypted twice."""
    make = getattr(stores, made)
    inside = make(with_secrets(sqlite_url))
    with pytest.raises(ConfigurationError, match=r"Encrypted\(Tiered"):
        make(Tiered(inside))
    for given in (with_secrets(sqlite_url), inside, Tiered(with_secrets(sqlite_url))):
        with pytest.raises(ConfigurationError, match="twice"):
            make(Encrypted(given, "env:SECRETS"))


@pytest.mark.parametrize(
    "url", ["sqlite:///x.db#encrypt=env:SECRETS", "sqlite:///x.db&encrypt=env:SECRETS", "memory://?ENCRYPT=env:SECRETS"]
)
def test_not_in_the_query(url: str) -> None:
    """Encryption that is asked for in the wrong place is not left out in silence."""
    with pytest.raises(ConfigurationError, match="encrypt= is not where"):
        stores.store(url)


async def test_what_is_no_headers(sqlite_url: str) -> None:
    """A stored value that opens and makes no sense is an error for the request, which does not wait for ever."""
    async with stores.async_store(with_secrets(sqlite_url)) as store:
        assert isinstance(store, AsyncEncryptedStore)
        claim = Claim("s", "k", b"t" * 16, b"f", timedelta(seconds=9), timedelta(days=1))
        hold = await store.perform(claim)
        assert isinstance(hold, Hold)
        marked = ((b"semel-encrypted", base64.b64encode(store.sealer.seal("headers", ("s", "k"), b"no JSON"))),)
        await store.durable.perform(Complete(hold, Event.COMPLETE, Answer(200, marked, b"")))
        with pytest.raises(ValueError, match="Expecting value"):
            async with asyncio.timeout(20):
                await store.perform(claim)

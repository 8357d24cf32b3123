"""Endpoints in the store's database, from threads and from an event loop, and their publishers for a relay."""

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy.ext.asyncio

from semel.core.outbox import Delivered, Failed, Message, Rejected, Unreachable
from semel.core.webhook import new_secret
from semel.errors import ConfigurationError, EndpointUnknown, StoreError, StoreNotReady
from semel.publishers import Publisher
from semel.publishers.webhook import Webhook
from semel.stores import AsyncStore, Store, async_store, store
from semel.stores.tiered import Tiered
from semel.webhooks import AsyncEndpoints, Endpoints
from semel.webhooks.directory import WebhookDirectory
from tests.webhooks.endpoint import Got, http, serving

SECRET = new_secret(b"s" * 32)
HOOK = "https://acme.example/hooks"
MESSAGES = [Message(f"01920000-0000-7000-8000-00000000000{number}", "paid", "acme", b"{}") for number in range(2)]
DAY = timedelta(days=1)


@pytest.fixture
def kept(url: str) -> Iterator[Store]:
    with store(url) as opened:
        yield opened


@pytest.fixture
async def loop_store(url: str) -> AsyncIterator[AsyncStore]:
    async with async_store(url) as opened:
        yield opened


@pytest.fixture
def moved(url: str) -> Callable[[timedelta], None]:
    """Lets time pass for endpoints: everything is made older."""

    def move(by: timedelta) -> None:
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
                file.execute(
                    "UPDATE semel_webhooks SET failing_since = failing_since - ?", [by // timedelta(milliseconds=1)]
                )
        else:
            with psycopg.connect(url) as connection:
                connection.execute("UPDATE semel_webhooks SET failing_since = failing_since - %s", [by])

    return move


def test_endpoints(kept: Store) -> None:
    """An endpoint is added, listed, turned off and on, and removed."""
    endpoints = Endpoints(kept)
    assert endpoints.list() == []
    added = endpoints.add("acme", HOOK, secrets=["env:NEW", "file:/run/old"])
    endpoints.add("Zeta", "http://zeta.example:8080/", secrets=["env:Z"])
    assert (added.name, added.url, added.secrets, added.is_on) == ("acme", HOOK, ("env:NEW", "file:/run/old"), True)
    assert (added.reason, added.failing_since) == (None, None)
    assert added.created_at == pytest.approx(added.now, abs=60)
    assert [each.name for each in endpoints.list()] == ["Zeta", "acme"]
    off = endpoints.disable("acme", "on holiday \x00")
    assert (off.is_on, off.reason) == (False, "on holiday ")
    on = endpoints.enable("acme")
    assert (on.is_on, on.reason) == (True, None)
    assert endpoints.remove("acme").url == HOOK
    assert [each.name for each in endpoints.list()] == ["Zeta"]


def test_what_the_application_has(url: str) -> None:
    """An engine of the application's is taken, too; its driver reads the same statements."""
    with store(url):
        pass
    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    kept = store(engine)
    try:
        endpoints = Endpoints(kept)
        made = endpoints.add("acme", HOOK, secrets=["env:A"])
        assert [each.url for each in endpoints.list()] == [made.url] == [HOOK]
        assert not endpoints.disable("acme", "on holiday").is_on
    finally:
        kept.close()
        engine.dispose()


async def test_what_the_application_has_on_a_loop(url: str) -> None:
    """The same with an engine of an event loop."""
    async with async_store(url):
        pass
    schemes = {"postgresql:": "postgresql+asyncpg:", "sqlite:": "sqlite+aiosqlite:"}
    old, new = next(each for each in schemes.items() if url.startswith(each[0]))
    engine = sqlalchemy.ext.asyncio.create_async_engine(url.replace(old, new, 1))
    kept = async_store(engine)
    try:
        endpoints = AsyncEndpoints(kept)
        made = await endpoints.add("acme", HOOK, secrets=["env:A"])
        assert await endpoints.note_failure(made, "away") is not None
        assert (await endpoints.list())[0].failing_since is not None
    finally:
        await kept.close()
        await engine.dispose()


async def test_endpoints_on_a_loop(loop_store: AsyncStore) -> None:
    """The same on an event loop."""
    endpoints = AsyncEndpoints(loop_store)
    await endpoints.add("acme", HOOK, secrets=["env:NEW"])
    assert (await endpoints.disable("acme", "why not")).reason == "why not"
    assert (await endpoints.enable("acme")).is_on
    assert [each.name for each in await endpoints.list()] == ["acme"]
    await endpoints.remove("acme")
    with pytest.raises(EndpointUnknown):
        await endpoints.remove("acme")
    assert await endpoints.list() == []


def test_a_name_is_taken_once(kept: Store) -> None:
    """Another endpoint of the same name is refused, unless it is to take the place of the first."""
    endpoints = Endpoints(kept)
    endpoints.add("acme", HOOK, secrets=["env:OLD"])
    with pytest.raises(ConfigurationError, match="already"):
        endpoints.add("acme", "https://other.example/", secrets=["env:OLD"])
    assert endpoints.list()[0].url == HOOK
    changed = endpoints.add("acme", HOOK, secrets=["env:NEW", "env:OLD"], replace=True)
    assert changed.secrets == ("env:NEW", "env:OLD")
    assert endpoints.add("new", HOOK, secrets=["env:NEW"], replace=True).name == "new"


@pytest.mark.parametrize("name", ["enable", "remove"])
def test_unknown(kept: Store, name: str) -> None:
    """What is said of an endpoint that is not there is an error that says so."""
    with pytest.raises(EndpointUnknown, match="no endpoint 'nowhere'"):
        getattr(Endpoints(kept), name)("nowhere")
    with pytest.raises(EndpointUnknown):
        Endpoints(kept).disable("nowhere", "x")


@pytest.mark.parametrize(
    "name, where, secrets, words",
    [
        ("acme", HOOK, [SECRET], "kept elsewhere"),
        ("acme", HOOK, [], "at least one"),
        ("acme", HOOK, "env:A", "a list"),
        ("acme", HOOK, ["env:"], "names nothing"),
        ("acme", f"{HOOK}#secret=env:A", ["env:A"], "has a #"),
        ("acme", "https://user:pw@acme.example/", ["env:A"], "Remove it"),
        ("acme", "acme.example", ["env:A"], "https://host/path"),
        ("", HOOK, ["env:A"], "printable characters"),
        ("a\nb", HOOK, ["env:A"], "printable characters"),
    ],
)
def test_refused(kept: Store, name: str, where: str, secrets: Sequence[str], words: str) -> None:
    """What can't be sent to, and a secret itself, is not written to the database, nor repeated."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        Endpoints(kept).add(name, where, secrets=secrets)
    assert SECRET not in str(caught.value)
    assert Endpoints(kept).list() == []


def test_other_names(sqlite_url: str) -> None:
    """With ?table= the endpoints have a table of their own, too; behind a cache they are where they were."""
    first, second = Endpoints(sqlite_url), Endpoints(f"{sqlite_url}?table=shop_keys")
    first.add("acme", HOOK, secrets=["env:A"])
    assert second.list() == []
    tiered = store(Tiered(sqlite_url))
    assert [each.name for each in Endpoints(tiered).list()] == ["acme"]
    tiered.close()
    first.close()
    second.close()


def test_stores_without_a_table() -> None:
    """A store without a database of its own has no endpoints, and says what has."""
    with pytest.raises(ConfigurationError, match="PostgreSQL or SQLite"):
        Endpoints("memory://")


def test_no_table(empty_postgres_url: str) -> None:
    """Where the table is missing, the error names the command that makes it."""
    with closing(store(empty_postgres_url)) as kept, pytest.raises(StoreNotReady, match="semel migrate"):
        Endpoints(kept).list()


async def test_failing(loop_store: AsyncStore, moved: Callable[[timedelta], None]) -> None:
    """The first failure is remembered until a success; five days after it, the next one turns the endpoint off."""
    endpoints = AsyncEndpoints(loop_store)
    made = await endpoints.add("acme", HOOK, secrets=["env:A"])
    first = await endpoints.note_failure(made, "away")
    assert first is not None
    assert first.failing_since is not None
    moved(4 * DAY)
    again = await endpoints.note_failure(made, "away")
    assert again is not None
    assert again.failing_since == pytest.approx(first.failing_since - 4 * DAY.total_seconds())
    assert again.is_on
    assert await endpoints.note_success(made) is not None
    assert await endpoints.note_success(made) is None
    moved(2 * DAY)
    assert (await endpoints.list())[0].is_on
    await endpoints.note_failure(made, "away")
    moved(5 * DAY)
    off = await endpoints.note_failure(made, "away for long")
    assert off is not None
    assert (off.is_on, off.reason) == (False, "away for long")
    # What comes later changes nothing of it.
    assert await endpoints.note_failure(made, "still") is None
    assert (await endpoints.enable("acme")).failing_since is None


async def test_a_store_of_its_own(url: str) -> None:
    """Given a URL, endpoints have a store of their own, and close it; a directory's closes with it."""
    with store(url):
        pass
    directory = WebhookDirectory(url)
    assert await directory.endpoints(0.0) == {}
    await directory.close()
    endpoints = AsyncEndpoints(url)
    await endpoints.add("acme", HOOK, secrets=["env:A"])
    await endpoints.close()


async def test_another_url_is_another_endpoint(loop_store: AsyncStore) -> None:
    """How tries at the old URL ended says nothing of the new one."""
    endpoints = AsyncEndpoints(loop_store)
    old = await endpoints.add("acme", HOOK, secrets=["env:A"])
    await endpoints.add("acme", "https://new.example/", secrets=["env:A"], replace=True)
    assert await endpoints.note_failure(old, "away") is None
    assert await endpoints.turn_off(old, "gone") is None
    (now,) = await endpoints.list()
    assert (now.is_on, now.failing_since) == (True, None)


async def directory(kept: AsyncStore, url: str, **settings: Any) -> WebhookDirectory:
    await AsyncEndpoints(kept).add("acme", url, secrets=["env:ACME_SECRET"])
    return WebhookDirectory(kept, allow_private=True, **settings)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_SECRET", SECRET)


async def test_directory(loop_store: AsyncStore) -> None:
    """A relay gets a publisher for each endpoint that is on; the table is read every ten seconds."""
    async with serving() as server:
        made = await directory(loop_store, server.url())
        endpoints = await made.endpoints(1000.0)
        publisher = made.publisher(endpoints["acme"])
        assert isinstance(publisher, Publisher)
        assert made.publisher(endpoints["acme"]) is publisher
        await publisher.open()
        assert await publisher.publish(MESSAGES) == [Delivered()] * 2
        await made.table.disable("acme", "on holiday")
        assert [*await made.endpoints(1009.9)] == ["acme"]
        assert await made.endpoints(1010.0) == {}
        (verdict, _) = await publisher.publish(MESSAGES)
        assert isinstance(verdict, Unreachable)
        assert len(server.requests) == 2
        await made.table.enable("acme")
        again = made.publisher((await made.endpoints(2000.0))["acme"])
        assert await again.publish(MESSAGES) == [Delivered()] * 2
        await made.close()


async def test_a_new_secret(loop_store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other secrets or another URL make another publisher; the first is closed when it is idle."""
    monkeypatch.setenv("NEW_SECRET", new_secret(b"n" * 32))
    async with serving() as server:
        made = await directory(loop_store, server.url())
        first = made.publisher((await made.endpoints(0.0))["acme"])
        await first.publish(MESSAGES[:1])
        await made.table.add("acme", server.url(), secrets=["env:NEW_SECRET", "env:ACME_SECRET"], replace=True)
        second = made.publisher((await made.endpoints(20.0))["acme"])
        assert second is not first
        await second.publish(MESSAGES[:1])
        await made.endpoints(40.0)
        assert isinstance(first._webhook, Webhook)
        assert first._webhook._client is None
        await made.close()
    assert [each.headers["webhook-signature"].count("v1,") for each in server.requests] == [1, 2]


@pytest.mark.parametrize("answer", [http(410), http(500, webhook_delivery="disable")], ids=["410", "disable"])
async def test_gone(loop_store: AsyncStore, answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """An endpoint that wants no more is turned off at once, with the reason, and logged; nothing else is sent to it."""
    async with serving(lambda _: answer) as server:
        made = await directory(loop_store, server.url())
        publisher = made.publisher((await made.endpoints(0.0))["acme"])
        with caplog.at_level(logging.ERROR, logger="semel"):
            (verdict,) = await publisher.publish(MESSAGES[:1])
        assert isinstance(verdict, Rejected | Failed)
        assert [vars(each)["semel_event"] for each in caplog.records] == ["EndpointTurnedOff"]
        (endpoint,) = await made.table.list()
        assert not endpoint.is_on
        assert "The endpoint answered" in (endpoint.reason or "")
        (verdict,) = await publisher.publish(MESSAGES[1:])
        assert isinstance(verdict, Unreachable)
        assert len(server.requests) == 1
        await made.close()


async def test_days_of_failure(
    loop_store: AsyncStore, moved: Callable[[timedelta], None], caplog: pytest.LogCaptureFixture
) -> None:
    """An endpoint that fails, or is away, is turned off after five days of it, and not before."""
    status = 500

    def answer(_: Got) -> bytes:
        return http(status)

    async with serving(answer) as server:
        made = await directory(loop_store, server.url())
        publisher = made.publisher((await made.endpoints(0.0))["acme"])
        await publisher.publish(MESSAGES)
        assert (await made.table.list())[0].failing_since is not None
        status = 200
        await publisher.publish(MESSAGES)
        assert (await made.table.list())[0].failing_since is None
        status = 500
        await publisher.publish(MESSAGES)
    # From now on there is no server at all.
    moved(5 * DAY)
    publisher._noted_at = None  # A minute has passed since it was noted.
    with caplog.at_level(logging.ERROR, logger="semel"):
        (verdict, _) = await publisher.publish(MESSAGES)
    assert isinstance(verdict, Unreachable)
    (endpoint,) = await made.table.list()
    assert not endpoint.is_on
    assert (endpoint.reason or "").startswith("It has taken no webhook for 5 days. The last try: The endpoint can't be")
    assert len(caplog.records) == 1
    await made.close()


@pytest.mark.parametrize(
    "where, reference, words",
    [
        (HOOK, "env:NO_SUCH_VARIABLE", "no secret at env:NO_SUCH_VARIABLE"),
        ("https://\N{SNOWMAN}.example/", "env:ACME_SECRET", "can't be read"),
    ],
    ids=["secret", "name"],
)
async def test_set_up_wrongly(loop_store: AsyncStore, where: str, reference: str, words: str) -> None:
    """An endpoint that can't be sent to as it is set up costs its messages nothing, and raises nothing in the relay."""
    made = WebhookDirectory(loop_store)
    await made.table.add("acme", where, secrets=[reference])
    publisher = made.publisher((await made.endpoints(0.0))["acme"])
    await publisher.open()
    (verdict, _) = await publisher.publish(MESSAGES)
    await made.close()
    assert isinstance(verdict, Unreachable)
    assert words in verdict.reason


async def test_another_relay_saw_it_fail(loop_store: AsyncStore) -> None:
    """A success clears what another relay has noted, once the table was read again."""
    async with serving() as server:
        made = await directory(loop_store, server.url())
        endpoints = await made.endpoints(0.0)
        publisher = made.publisher(endpoints["acme"])
        await publisher.publish(MESSAGES)
        await made.table.note_failure(endpoints["acme"], "seen by another")
        await made.endpoints(20.0)
        await publisher.publish(MESSAGES)
        assert (await made.table.list())[0].failing_since is None
        await made.close()


async def test_a_store_that_is_away(loop_store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was delivered is delivered, though it can't be noted."""

    async def away(*_: Any) -> None:
        raise StoreError

    async with serving(lambda _: http(410)) as server:
        made = await directory(loop_store, server.url())
        publisher = made.publisher((await made.endpoints(0.0))["acme"])
        monkeypatch.setattr(made.table, "turn_off", away)
        (verdict,) = await publisher.publish(MESSAGES[:1])
        assert isinstance(verdict, Rejected)
        await made.close()

"""What a handler sets on its connection, and Semel's own statements that follow it in the same transaction."""

from __future__ import annotations

from typing import Any

import pytest

from semel.core.commands import Begin, Commit, Finish, Look, Open, Undo, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.errors import ConfigurationError
from semel.outbox import Publishing
from semel.stores import async_store, store
from semel.stores.dialect import messages_of
from semel.stores.inbox import InboxStatements
from tests.stores.connections.lending import do, rows
from tests.stores.connections.test_as_given import KINDS as GIVEN
from tests.stores.connections.test_as_given import How
from tests.stores.connections.test_trips import KINDS as OWN
from tests.stores.connections.test_trips import claim_of

#: Of own pools, of pools that were given, and of SQLAlchemy, in both colours.
WAYS: dict[str, Any] = {
    "psycopg": OWN["psycopg"],
    "asyncpg": OWN["asyncpg"],
    **{
        name: lambda url, name=name: GIVEN[name](How(url, {}, {}))
        for name in ("psycopg pool", "asyncpg pool", "engine", "async engine asyncpg")
    },
}
ANSWER = Answer(201, ((b"x-name", b"J\xe9r\xf4me \\ '"),), b"\x00\\x41'\xff")
SETTINGS = {
    "standard_conforming_strings": "off",
    "backslash_quote": "off",
    "bytea_output": "escape",
    "DateStyle": "German",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "default_transaction_read_only": "on",
    "lock_timeout": "5s",
    "search_path": "tenant, public",
}


class Shop:
    """A store of one kind, in either colour."""

    def __init__(self, store: Any) -> None:
        self.store = store

    async def done(self, call: Any, *arguments: Any) -> Any:
        got = call(*arguments)
        return await got if hasattr(got, "__await__") else got

    async def says(self, transaction: Any, sql: str) -> None:
        connection = transaction.connection
        run = getattr(connection, "exec_driver_sql", connection.execute)
        await self.done(run, sql)

    async def pay(self, sql: str, key: str = "k") -> Hold | Found:
        """Do what atomic mode does, with *sql* in the handler."""
        claim, transaction = claim_of(key), self.store.transaction()
        try:
            hold: Hold | Found = await self.done(transaction.perform, Begin(claim))
            if isinstance(hold, Hold):
                await self.says(transaction, sql)
                done = await self.done(transaction.perform, Finish(claim, hold, None, Event.COMPLETE, ANSWER))
                assert done is Verdict.DONE
            return hold
        finally:
            await self.done(transaction.perform, Undo())


@pytest.fixture
async def tenant_url(migrated_postgres_url: str) -> str:
    """The URL of a database in which a tenant has tables of the same names."""
    await do(migrated_postgres_url, "CREATE SCHEMA tenant")
    for table in ("semel_keys", "semel_audit", "semel_inbox", "semel_outbox"):
        await do(migrated_postgres_url, f"CREATE TABLE tenant.{table} (LIKE public.{table} INCLUDING ALL)")
    return migrated_postgres_url


every_way = pytest.mark.parametrize("way", WAYS)


@every_way
async def test_settings_of_a_handler(migrated_postgres_url: str, way: str) -> None:
    """Whatever a handler sets for its transaction, its answer is stored, and a retry gets it as it was."""
    async with WAYS[way](migrated_postgres_url) as given:
        shop = Shop(given.store)
        said = "; ".join(
            f"SET LOCAL {name} = {value if ',' in value else repr(value)}" for name, value in SETTINGS.items()
        )
        for part in said.split("; "):
            assert isinstance(await shop.pay(part, part), Hold)
            found = await shop.pay(part, part)
            assert isinstance(found, Found)
            assert found.answer == ANSWER


@every_way
async def test_another_schema(tenant_url: str, way: str) -> None:
    """A handler that makes another table be found by the name of Semel's is rolled back, and told what to write; where
    the store's URL names the schema, its answer is stored.
    """
    hides = ("SET LOCAL search_path = tenant, public", "CREATE TEMPORARY TABLE semel_keys (LIKE semel_keys)")
    async with WAYS[way](tenant_url) as given:
        for sql in hides:
            with pytest.raises(ConfigurationError, match=r"\?schema=public"):
                await Shop(given.store).pay(sql)
        assert isinstance(await Shop(given.store).pay("SELECT 1"), Hold)
    if way in OWN:
        shop = Shop((store if way == "psycopg" else async_store)(f"{tenant_url}?schema=public"))
        assert isinstance(await shop.pay(hides[0], "named"), Hold)
        assert isinstance(await shop.pay(hides[0], "named"), Found)
        await shop.done(shop.store.close)
    assert await rows(tenant_url, "SELECT count(*) FROM tenant.semel_keys") == [0]


@every_way
async def test_another_schema_in_a_phase(tenant_url: str, way: str) -> None:
    """So it is in a phase, of a message that is published, and of one that was received."""
    async with WAYS[way](tenant_url) as given:
        shop = Shop(given.store)
        hold = await shop.done(shop.store.perform, claim_of())
        inbox = InboxStatements(messages_of(shop.store))
        progress = Progress((Done("phase", "booked", 1),))

        async def publish(transaction: Any) -> Any:
            return await shop.done(lambda: Publishing(transaction).publish("alice", "k", "paid", {}))

        async def receive(transaction: Any) -> Any:
            return await shop.done(transaction.run, inbox.note_done("billing", "m-1", None))

        async def save(transaction: Any) -> Any:
            return await shop.done(transaction.perform, Commit(hold, progress, Progress()))

        for last in (publish, receive, save):
            transaction = shop.store.transaction()
            await shop.done(transaction.perform, Open())
            await shop.says(transaction, "SET LOCAL search_path = tenant, public")
            with pytest.raises(ConfigurationError, match=r"\?schema=public"):
                await last(transaction)
            await shop.done(transaction.perform, Undo())
        record = await shop.done(shop.store.perform, Look(hold.scope, hold.key))
        assert record is not None
        assert record.steps is None

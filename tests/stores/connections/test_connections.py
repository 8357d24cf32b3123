"""What is written on a lent connection and its record are one: on every driver, whatever becomes of the server."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest

from semel.core.commands import Begin, Open
from semel.core.record import Hold
from semel.errors import AnswerNotStored, CommitUnknown, ConfigurationError, SemelError, StoreReadOnly, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.connections import asyncpg as on_asyncpg
from semel.stores.connections import endings
from semel.stores.connections import postgres as on_postgres
from semel.stores.connections import psycopg as on_psycopg
from semel.stores.connections.asyncpg import AsyncpgConnections
from semel.stores.connections.psycopg import AsyncPsycopgConnections, PsycopgConnections
from semel.stores.postgres.address import Address
from semel.stores.postgres.joined import JoinedStatements
from semel.stores.postgres.statements import Statements
from semel.stores.statement import Joined, Names, Query
from semel.testing.conformance.base import claim_on
from tests.kit import servers
from tests.stores.connections.lending import (
    DRIVERS,
    SCHEMA,
    SQLALCHEMY,
    Kind,
    Lender,
    Lent,
    backend,
    do,
    record,
    rows,
    until,
)

KINDS = DRIVERS | SQLALCHEMY
ASYNC_KINDS = {name: kind for name, kind in KINDS.items() if "async" in name}

#: Waits at COMMIT for whoever holds this lock.
SLOW_COMMIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON rides DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait();
"""
FOREIGN = "ALTER TABLE rides ADD COLUMN owner integer REFERENCES rides DEFERRABLE INITIALLY DEFERRED"
#: Sets down at COMMIT who the session says it works for, as an audit trigger does.
AUDIT = """
CREATE TABLE seen (who text);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN
        INSERT INTO seen VALUES (current_setting('app.account', true) || ' as ' || current_user);
        RETURN NULL;
    END $$;
CREATE CONSTRAINT TRIGGER see AFTER INSERT ON rides DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION see();
GRANT INSERT ON seen, rides, records TO pg_read_all_data;
"""
GOSSIP = """
CREATE FUNCTION gossip() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE WARNING 'another ride'; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER gossip AFTER INSERT ON rides DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION gossip();
"""


@pytest.fixture
def url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(SCHEMA.encode(), prepare=False)
    return postgres_url


@pytest.fixture(params=KINDS)
async def lender(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Lender]:
    async with KINDS[request.param](url) as made:
        yield made


@pytest.fixture(params=ASYNC_KINDS)
async def async_lender(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Lender]:
    async with KINDS[request.param](url) as made:
        yield made


async def written(url: str) -> tuple[list[int], list[str]]:
    return await rows(url, "SELECT id FROM rides"), await rows(url, "SELECT key FROM records")


async def begun(lender: Lender) -> tuple[Lent, int]:
    """Begin a transaction that has written something; return its server process too."""
    lent = await lender.begin()
    pid: int = await lent.run(backend())
    await lent.execute("INSERT INTO rides VALUES (1)")
    return lent, pid


async def still_works(lender: Lender, url: str) -> None:
    """Nothing that went wrong may stay in the pool: as many transactions as it allows at once, all of them good."""
    lents = [await lender.begin() for _ in range(2)]
    for number, lent in enumerate(lents):
        assert await lent.run(record(f"after {number}")) == [f"after {number}"]
        await lent.commit()
    assert (await written(url))[1] == ["after 0", "after 1"]


async def both_or_neither(url: str) -> None:
    """A COMMIT that nobody waits for is carried out, or it is not; then all is taken away again."""
    assert await written(url) in (([], []), ([1], ["k"]))
    await do(url, "TRUNCATE rides, records")


class TestBothOrNeither:
    async def test_commit(self, lender: Lender, url: str) -> None:
        """The handler's write and the record are committed together, and nobody sees either before."""
        lent, _ = await begun(lender)
        assert await lent.run(record("k")) == ["k"]
        assert await written(url) == ([], [])

        await lent.commit()
        assert await written(url) == ([1], ["k"])

    async def test_rollback(self, lender: Lender, url: str) -> None:
        """Undone, neither is there."""
        lent, _ = await begun(lender)
        await lent.run(record("k"))
        await lent.rollback()

        assert await written(url) == ([], [])
        await still_works(lender, url)

    async def test_connection_is_used_again(self, lender: Lender) -> None:
        """One transaction after another goes over the same connection."""
        pids = set()
        for key in ("a", "b", "c"):
            lent = await lender.begin()
            pids.add(await lent.run(backend()))
            await lent.run(record(key))
            await lent.commit()
        assert len(pids) == 1

    async def test_handler_ends_it(self, lender: Lender, url: str) -> None:
        """A handler that commits by itself is told so; a session's own commit ends only its savepoint."""
        lent, _ = await begun(lender)
        await lent.commit_inside()
        if hasattr(lent.connection, "flush"):
            assert await written(url) == ([], [])
            await lent.run(record("k"))
            await lent.commit()
            assert await written(url) == ([1], ["k"])
            return
        with pytest.raises(ConfigurationError, match="ended inside the handler"):
            await lent.run(record("k"))
        await lent.rollback()
        assert await written(url) == ([1], [])


class TestErrors:
    async def test_duplicate(self, lender: Lender, url: str) -> None:
        """An error about the data is the driver's own."""
        await do(url, "INSERT INTO records VALUES ('k')")
        lent = await lender.begin()
        with pytest.raises(Exception, match="duplicate key") as caught:
            await lent.run(record("k"))
        assert not isinstance(caught.value, SemelError)
        await lent.rollback()
        await do(url, "DELETE FROM records")
        await still_works(lender, url)

    async def test_deferred_constraint(self, lender: Lender, url: str) -> None:
        """A constraint that is checked at COMMIT is the application's own error, and nothing is written."""
        await do(url, FOREIGN)
        lent = await lender.begin()
        await lent.execute("INSERT INTO rides (id, owner) VALUES (1, 2)")
        await lent.run(record("k"))
        with pytest.raises(Exception, match="violates foreign key constraint") as caught:
            await lent.commit()

        assert not isinstance(caught.value, SemelError)
        assert await written(url) == ([], [])
        await still_works(lender, url)

    @pytest.mark.parametrize("how", ["SET LOCAL", "SET"])
    async def test_deferred_trigger_sees_what_the_handler_set(self, lender: Lender, url: str, how: str) -> None:
        """A trigger that is deferred to COMMIT runs for the user, and in the role, that the handler has set."""
        await do(url, AUDIT)
        for user in ("ann", "bob"):
            lent = await lender.begin()
            await lent.execute(f"{how} app.account = '{user}'")
            await lent.execute(f"{how} ROLE pg_read_all_data")
            await lent.execute(f"INSERT INTO rides VALUES ({len(user)}{ord(user[0])})")
            await lent.run(record(user))
            await lent.commit()

        assert await rows(url, "SELECT who FROM seen") == ["ann as pg_read_all_data", "bob as pg_read_all_data"]

    async def test_swallowed_error(self, lender: Lender, url: str) -> None:
        """A handler that swallows a database error gets nothing committed, neither with a record nor without."""
        for has_record in (True, False):
            lent, _ = await begun(lender)
            with pytest.raises(Exception, match="division by zero"):
                await lent.execute("SELECT 1 / 0")
            if has_record:
                with pytest.raises(Exception, match="current transaction is aborted") as caught:
                    await lent.run(record("k"))
                assert not isinstance(caught.value, SemelError)
                await lent.rollback()
            elif _is_engine_on_asyncpg(lent):
                await lent.rollback()  # SQLAlchemy keeps the reply to COMMIT to itself; the statement before it tells
            else:
                with pytest.raises(Exception, match=r"statement of this transaction had failed|transaction is aborted"):
                    await lent.commit()
        assert await written(url) == ([], [])
        await still_works(lender, url)

    async def test_trigger_that_warns(self, lender: Lender, url: str) -> None:
        """A warning of the application's own trigger at COMMIT is no trouble."""
        await do(url, GOSSIP)
        lent, _ = await begun(lender)
        await lent.run(record("k"))
        await lent.commit()

        assert await written(url) == ([1], ["k"])


def _is_engine_on_asyncpg(lent: Lent) -> bool:
    return getattr(getattr(lent.connection, "dialect", None), "driver", None) == "asyncpg"


class TestLostConnections:
    async def test_in_the_handler(self, lender: Lender, url: str) -> None:
        """A connection that is lost while the handler runs is the store's trouble; nothing is written."""
        lent, pid = await begun(lender)
        await do(url, f"SELECT pg_terminate_backend({pid}, 5000)")
        with pytest.raises(StoreUnavailable):
            await lent.run(record("k"))
        await lent.rollback()

        assert await written(url) == ([], [])
        await still_works(lender, url)

    async def test_in_commit(self, lender: Lender, url: str) -> None:
        """A connection that is lost while COMMIT is under way leaves its outcome unknown, and says so."""
        await do(url, SLOW_COMMIT)
        lent, pid = await begun(lender)
        await lent.run(record("k"))
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as rival:
            await rival.execute("SELECT pg_advisory_lock(1)")
            committing = asyncio.create_task(lent.commit())
            await until(url, f"SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = {pid}")
            await do(url, f"SELECT pg_terminate_backend({pid}, 5000)")
            with pytest.raises(CommitUnknown):
                await committing

        assert await written(url) == ([], [])
        await still_works(lender, url)

    async def test_idle(self, lender: Lender, url: str) -> None:
        """Connections that were lost while nobody used them are replaced, and at most one request is told of it."""
        lents = [await lender.begin() for _ in range(2)]
        for lent in lents:
            pid = await lent.run(backend())
            await lent.rollback()
            await do(url, f"SELECT pg_terminate_backend({pid}, 5000)")
        if lents[0].unit.__class__.__module__.endswith("sqlalchemy"):
            # An engine finds out with the first statement, which is ours; then it replaces them all.
            with pytest.raises(StoreUnavailable):
                await lender.begin()
        await still_works(lender, url)


class TestCancelled:
    async def test_in_a_statement(self, async_lender: Lender, url: str) -> None:
        """A task that is cancelled in a statement leaves no connection on which the reply is still to come."""
        lent, pid = await begun(async_lender)
        async with await psycopg.AsyncConnection.connect(url) as rival:
            await rival.execute("LOCK TABLE records")
            running = asyncio.create_task(lent.run(record("k")))
            await until(url, f"SELECT wait_event = 'relation' FROM pg_stat_activity WHERE pid = {pid}")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await lent.rollback()

        await until(url, f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {pid}")
        assert await written(url) == ([], [])
        await still_works(async_lender, url)

    async def test_in_commit(self, async_lender: Lender, url: str) -> None:
        """A task that is cancelled in COMMIT leaves none either."""
        await do(url, SLOW_COMMIT)
        lent, pid = await begun(async_lender)
        await lent.run(record("k"))
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as rival:
            await rival.execute("SELECT pg_advisory_lock(1)")
            committing = asyncio.create_task(lent.commit())
            await until(url, f"SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = {pid}")
            committing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await committing

        await until(url, f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {pid}")
        await both_or_neither(url)
        await still_works(async_lender, url)

    async def test_commit_without_an_end(self, async_lender: Lender, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A COMMIT that is not answered in time has an unknown outcome."""
        for module in (on_postgres, _sqlalchemy()):
            monkeypatch.setattr(module, "COMMIT_SECONDS", 0.3)
        await do(url, SLOW_COMMIT)
        lent, pid = await begun(async_lender)
        await lent.run(record("k"))
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as rival:
            await rival.execute("SELECT pg_advisory_lock(1)")
            with pytest.raises(CommitUnknown):
                await lent.commit()

        await until(url, f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {pid}")
        await both_or_neither(url)
        await still_works(async_lender, url)


def _sqlalchemy() -> Any:
    from semel.stores.connections import sqlalchemy  # noqa: PLC0415 - its name is the package's

    return sqlalchemy


class TestPools:
    async def test_all_in_use(self, lender: Lender, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """While all connections are in use, one more transaction waits a while and is then told how many there are."""
        for module in (endings, on_asyncpg, on_psycopg):
            monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
        lents = [await lender.begin() for _ in range(2)]
        with pytest.raises(StoreUnavailable, match="all 2 connections are in use") as caught:
            await lender.begin()
        assert caught.value.was_sent is False
        for lent in lents:
            await lent.rollback()
        await still_works(lender, url)

    @pytest.mark.parametrize("make", [PsycopgConnections, AsyncpgConnections])
    async def test_own_pool_says_how_to_have_more(self, make: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The store's own pool is made larger with `?pool=` in its URL."""
        for module in (on_asyncpg, on_psycopg):
            monkeypatch.setattr(module, "WAIT_SECONDS", 0.2)
        lender = Lender(make(Address.of(url + "?pool=1")), is_sqlalchemy=False)
        lent = await lender.begin()
        with pytest.raises(StoreUnavailable, match=r"\?pool="):
            await lender.begin()
        await lent.rollback()
        closed = lender.connections.close()
        if closed is not None:
            await closed

    @pytest.mark.parametrize("make", [PsycopgConnections, AsyncpgConnections])
    async def test_unreachable_is_said_at_once(self, make: Any) -> None:
        """A server that refuses connections is not waited for, and the password is not shown."""
        lender = Lender(make(Address.of("postgresql://me:secret@127.0.0.1:1/db")), is_sqlalchemy=False)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="can't be reached") as caught:
                await lender.begin()
            assert "secret" not in str(caught.value)
        assert time.monotonic() - began < 5

    async def test_given_pool_that_cannot_connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An application's pool with no server behind it is told from one whose connections are all in use."""
        monkeypatch.setattr(on_psycopg, "WAIT_SECONDS", 0.2)
        nowhere = "postgresql://me:secret@127.0.0.1:1/db"
        with (
            psycopg_pool.ConnectionPool(nowhere, min_size=1, max_size=1, open=True) as pool,
            pytest.raises(StoreUnavailable, match=r"can't be reached.*refused"),
        ):
            PsycopgConnections.of(pool).begin(Open())
        async with psycopg_pool.AsyncConnectionPool(nowhere, min_size=1, max_size=1, open=False) as their_pool:
            with pytest.raises(StoreUnavailable, match=r"can't be reached.*refused"):
                await AsyncPsycopgConnections.of(their_pool).begin(Open())

    def test_forked_child(self, url: str) -> None:
        """A forked child has a pool of its own; the parent's transaction goes on untouched."""
        connections = PsycopgConnections(Address.of(url))
        unit = connections.begin(Open())
        unit.connection.execute("INSERT INTO rides VALUES (1)")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside threads from 3.12 on
            child = os.fork()
        if child == 0:
            code = 1
            try:
                theirs = connections.begin(Open())
                theirs.run(record("child"))
                theirs.commit()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        unit.run(record("parent"))
        unit.commit()
        connections.close()
        assert asyncio.run(written(url)) == ([1], ["child", "parent"])

    def test_asyncpg_pool_on_another_loop(self, url: str) -> None:
        """The pool belongs to the loop that it was made on; another loop gets another."""
        connections = AsyncpgConnections(Address.of(url))

        async def once() -> None:
            unit = await connections.begin(Open())
            await unit.run(backend())
            await unit.rollback()

        with asyncio.Runner() as one, asyncio.Runner() as another:
            one.run(once())
            another.run(once())
            one.run(asyncio.sleep(0))  # what was closed from outside is closed in the next turn
            another.run(connections.close())

    @pytest.mark.parametrize("make", [PsycopgConnections, AsyncpgConnections])
    async def test_what_a_handler_set_is_not_there_for_the_next(self, make: Any, url: str) -> None:
        """On connections of our own neither a role nor a setting of one handler's outlives its transaction."""
        connections = make(Address.of(url + "?pool=1"))
        lender = Lender(connections, is_sqlalchemy=False)
        first = await lender.begin()
        await first.execute("SET ROLE pg_read_all_data")
        await first.execute("SET app.tenant = '42'")
        await first.commit()
        seen = Joined(Query("SELECT current_user, current_setting('app.tenant', true)"), {}, lambda rows: rows[0])
        second = await lender.begin()
        user, tenant = await second.run(seen)
        await second.rollback()
        await asyncio.to_thread(connections.close) if make is PsycopgConnections else await connections.close()
        assert user != "pg_read_all_data"
        assert not tenant

    @pytest.mark.parametrize("make", [PsycopgConnections, AsyncpgConnections])
    async def test_what_a_handler_set_is_gone_after_a_rollback_too(self, make: Any, url: str) -> None:
        """A transaction that is undone does not bring back what the one before it has set."""
        connections = make(Address.of(url + "?pool=1"))
        lender = Lender(connections, is_sqlalchemy=False)
        first = await lender.begin()
        await first.execute("SET app.tenant = '42'")
        await first.commit()
        await (await lender.begin()).rollback()
        seen = Joined(Query("SELECT current_setting('app.tenant', true)"), {}, lambda rows: rows[0][0])
        third = await lender.begin()
        tenant = await third.run(seen)
        await third.rollback()
        await asyncio.to_thread(connections.close) if make is PsycopgConnections else await connections.close()
        assert not tenant

    @pytest.mark.parametrize("make", [PsycopgConnections, AsyncpgConnections])
    async def test_session_that_a_handler_made_read_only(self, make: Any, url: str) -> None:
        """A connection of our own on which a record can't be written is not used again."""
        await asyncio.to_thread(store(url).migrate)
        connections = make(Address.of(url + "?pool=1"))
        lender = Lender(connections, is_sqlalchemy=False)
        first = await lender.begin()
        await first.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        await first.commit()
        look = JoinedStatements(Statements(Names()), "the server").begin(Begin(claim_on("alice")))
        second = await lender.begin()
        with pytest.raises(StoreReadOnly):
            await second.run(look)
        await second.rollback()
        third = await lender.begin()
        assert isinstance((await third.run(look)).seen, Hold)
        await third.rollback()
        await asyncio.to_thread(connections.close) if make is PsycopgConnections else await connections.close()

    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_through_a_pooler(self, kind: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Through a pooler, what a handler has set is there for its deferred triggers, and for no other client."""

        async def is_not_direct(_connection: object) -> bool:
            return False

        monkeypatch.setattr(on_psycopg, "is_direct", lambda _connection: False)
        monkeypatch.setattr(on_asyncpg, "is_direct_async", is_not_direct)
        await do(url, AUDIT + FOREIGN)
        async with DRIVERS[kind](url) as lender:
            lent = await lender.begin()
            await lent.execute("SET app.account = 'ann'")
            await lent.execute("SET ROLE pg_read_all_data")
            await lent.execute("INSERT INTO rides VALUES (1)")
            raw = getattr(lent.connection, "_con", lent.connection)
            await lent.commit()
            # The session that the pooler lends next is this one, seen from outside of any transaction of ours.
            if kind == "asyncpg":
                left = tuple(await raw.fetchrow("SELECT current_user, current_setting('app.account', true)"))
            else:
                left = raw.execute("SELECT current_user, current_setting('app.account', true)").fetchone()
            lent = await lender.begin()
            await lent.execute("INSERT INTO rides VALUES (2, 3)")
            with pytest.raises((psycopg.errors.ForeignKeyViolation, asyncpg.ForeignKeyViolationError)):
                await lent.commit()
            await still_works(lender, url)
        assert await rows(url, "SELECT who FROM seen") == ["ann as pg_read_all_data"]
        assert left == ("semel", "")

    async def test_own_asyncpg_pool_needs_no_round_trip_to_reset(self, url: str) -> None:
        """A transaction on the store's own asyncpg pool costs BEGIN, its own statements and COMMIT, and no more."""
        connections = AsyncpgConnections(Address.of(url + "?pool=1"))
        unit = await connections.begin(Open())
        sent: list[str] = []
        unit.connection._con.add_query_logger(lambda query: sent.append(query.query))
        await unit.run(backend())
        await unit.commit()
        await (await connections.begin(Open())).rollback()
        await connections.close()
        assert len(sent) == 4  # a statement, COMMIT, BEGIN, ROLLBACK
        assert sent[1] == "COMMIT"

    async def test_given_asyncpg_pool_keeps_what_it_has_set(self, url: str) -> None:
        """What the application sets on the connections of its own asyncpg pool stays set."""

        class Plain(asyncpg.Connection):
            def get_reset_query(self) -> str:
                return ""

        async def init(connection: asyncpg.Connection[Any]) -> None:
            await connection.execute("SET app.region = 'eu'")

        async with asyncpg.create_pool(url, min_size=0, max_size=1, connection_class=Plain, init=init) as pool:
            unit = await AsyncpgConnections.of(pool).begin(Open())
            await unit.run(record("k"))
            await unit.commit()
            assert await pool.fetchval("SELECT current_setting('app.region', true)") == "eu"

    def test_given_psycopg_pool_keeps_its_ways(self, url: str) -> None:
        """A connection goes back to the application's pool as it came, and keeps to the isolation it asks for."""

        def strict(connection: psycopg.Connection[Any]) -> None:
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE

        with psycopg_pool.ConnectionPool(url, configure=strict, min_size=1, max_size=1, open=True) as pool:
            unit = PsycopgConnections.of(pool).begin(Open())
            level = unit.connection.execute("SHOW transaction_isolation").fetchone()
            unit.commit()
            with pool.connection() as connection:
                assert (level, connection.autocommit) == (("serializable",), False)

    def test_serialisation_failure_at_commit(self, url: str) -> None:
        """Under SERIALIZABLE, a commit that another one forbids is the store's trouble: nothing was written."""

        def strict(connection: psycopg.Connection[Any]) -> None:
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE

        with psycopg_pool.ConnectionPool(url, configure=strict, min_size=0, max_size=2, open=True) as pool:
            connections = PsycopgConnections.of(pool)
            one, two = connections.begin(Open()), connections.begin(Open())
            for number, unit in enumerate((one, two)):
                unit.connection.execute("SELECT count(*) FROM rides")
                unit.connection.execute("INSERT INTO rides VALUES (%s)", [number])
            one.commit()
            with pytest.raises(StoreUnavailable, match="in the way") as caught:
                two.commit()
            assert not isinstance(caught.value, CommitUnknown)


class TestReplica:
    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls) -> Iterator[str]:
        """A server of this test's own: its settings are changed."""
        with servers.postgres(settings={"synchronous_commit": "on"}) as server:
            with psycopg.connect(server.url, autocommit=True) as connection:
                connection.execute(SCHEMA.encode(), prepare=False)
            yield server.url

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
    async def test_commit_that_did_not_reach_the_replica(self, alone: str, kind: Kind) -> None:
        """A commit whose wait for the replica was cancelled is there, may be lost with the server, and is not
        reported as stored.
        """
        await do(alone, "TRUNCATE rides, records")
        await do(alone, "ALTER SYSTEM SET synchronous_standby_names = 'nowhere'")
        await do(alone, "SELECT pg_reload_conf()")
        try:
            await until(alone, "SELECT setting = 'nowhere' FROM pg_settings WHERE name = 'synchronous_standby_names'")
            async with kind(alone) as lender:
                lent, pid = await begun(lender)
                await lent.run(record("k"))
                committing = asyncio.create_task(lent.commit())
                await until(alone, f"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = {pid}")
                await do(alone, f"SELECT pg_cancel_backend({pid})")
                with pytest.raises(AnswerNotStored, match="replica"):
                    await committing
        finally:
            await do(alone, "ALTER SYSTEM RESET synchronous_standby_names")
            await do(alone, "SELECT pg_reload_conf()")
            await until(alone, "SELECT setting = '' FROM pg_settings WHERE name = 'synchronous_standby_names'")
        assert await written(alone) == ([1], ["k"])

    @pytest.mark.parametrize("kind", ASYNC_KINDS.values(), ids=ASYNC_KINDS.keys())
    async def test_commit_that_is_given_up(self, alone: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        """A commit that waits for the replica for too long is not cancelled: it is shown once the replica has it."""
        for module in (on_postgres, _sqlalchemy()):
            monkeypatch.setattr(module, "COMMIT_SECONDS", 0.3)
        await do(alone, "TRUNCATE rides, records")
        await do(alone, "ALTER SYSTEM SET synchronous_standby_names = 'nowhere'")
        await do(alone, "SELECT pg_reload_conf()")
        try:
            await until(alone, "SELECT setting = 'nowhere' FROM pg_settings WHERE name = 'synchronous_standby_names'")
            async with kind(alone) as lender:
                lent, pid = await begun(lender)
                await lent.run(record("k"))
                with pytest.raises(CommitUnknown):
                    await lent.commit()
            await until(alone, f"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = {pid}")
            assert await written(alone) == ([], [])
        finally:
            await do(alone, "ALTER SYSTEM RESET synchronous_standby_names")
            await do(alone, "SELECT pg_reload_conf()")
        await until(alone, "SELECT count(*) = 1 FROM rides")
        assert await written(alone) == ([1], ["k"])


class TestGiven:
    def test_psycopg_pool_is_a_store(self, url: str) -> None:
        """A psycopg pool in place of a URL: the store is where the pool connects to."""
        with psycopg_pool.ConnectionPool(url, min_size=0, max_size=2, open=True) as pool:
            assert str(store(pool).address) == url  # type: ignore[attr-defined]  # a PostgresStore

    async def test_asyncpg_pool_is_a_store(self, url: str) -> None:
        """An asyncpg pool in place of a URL: the store is where the pool connects to."""
        async with asyncpg.create_pool(url, min_size=0) as pool:
            assert str(async_store(pool).address) == url  # type: ignore[attr-defined]  # an AsyncPostgresStore

    async def test_asyncpg_pool_from_parts(self) -> None:
        """A pool that was given its address in parts is named all the same, without its password."""
        pool = asyncpg.create_pool(host="db", port=5433, user="me", password="p@ss", database="app", min_size=0)
        assert AsyncpgConnections.url_of(pool) == "postgresql://me@db:5433/app"
        hosts = asyncpg.create_pool("postgresql://me:p@one:1,two:2/app", min_size=0)
        assert str(async_store(hosts).address) == "postgresql://me@/app"  # type: ignore[attr-defined]  # PostgreSQL's

    async def test_asyncpg_pool_that_does_not_tell(self) -> None:
        """A pool that does not say how it connects can't be followed; the URL has to be given."""
        pool = asyncpg.create_pool(host="db", min_size=0)
        delattr(pool, "_connect_kwargs")
        with pytest.raises(ConfigurationError, match="url="):
            async_store(pool)

    @pytest.mark.parametrize(
        "conninfo, kwargs, expected",
        [
            ("host=db port=5433 user=me password=p@ss dbname=app", {}, "postgresql://me@db:5433/app"),
            ("dbname=app", {"host": "/run/pg", "autocommit": True}, "postgresql:///app?host=%2Frun%2Fpg"),
            ("postgresql://db/app?sslmode=require", {}, "postgresql://db/app"),
            ("host=a,b port=1,2 dbname=app", {}, "postgresql:///app?host=a%2Cb&port=1%2C2"),
        ],
    )
    def test_address_of_a_psycopg_pool(self, conninfo: str, kwargs: dict[str, Any], expected: str) -> None:
        """However a pool was told where to connect to, messages name the same place."""
        pool = psycopg_pool.ConnectionPool(conninfo, kwargs=kwargs, min_size=0, max_size=1, open=False)
        assert PsycopgConnections.url_of(pool) == expected

    def test_wrong_colour(self) -> None:
        """A sync pool under an event loop would block it, and an async one has no loop in a thread."""
        pool = psycopg_pool.ConnectionPool("postgresql://db/app", min_size=0, max_size=1, open=False)
        with pytest.raises(ConfigurationError, match="async one"):
            async_store(pool)

    def test_something_else(self) -> None:
        """What is neither a URL nor known is refused by name."""
        with pytest.raises(ConfigurationError, match="not dict"):
            store({})

"""What is special to PostgreSQL: what a claim costs, how it finds its rows, and what goes wrong with servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest

from semel.core.commands import Again, Browse, Claim, Complete, FindStuck, Look, Park, Release, Renew, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.errors import ConfigurationError, StoreNotReady, StoreReadOnly, StoreRefused, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.postgres import migrating
from semel.stores.postgres import store as sync_store
from semel.stores.postgres.address import SESSION, Address
from semel.stores.postgres.async_store import AsyncPostgresStore
from semel.stores.postgres.builder import queries_of
from semel.stores.postgres.statements import PACKAGE, Statements
from semel.stores.postgres.store import PostgresStore
from semel.stores.statement import Names, load_migrations
from tests.kit import servers
from tests.kit.servers.base import until

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')


def claim(key: str, scope: str = "alice") -> Claim:
    return Claim(scope, key, os.urandom(16), b"fingerprint", LEASE, RETENTION)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    made.migrate()
    with made:
        yield made


def finished(postgres: PostgresStore, key: str) -> None:
    hold = postgres.perform(claim(key))
    assert isinstance(hold, Hold)
    assert postgres.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE


class TestCost:
    def test_replay_is_one_statement_and_takes_no_transaction_id(
        self, postgres: PostgresStore, postgres_url: str
    ) -> None:
        """A replay is one statement that writes nothing: no row version, no transaction id, no WAL record."""
        finished(postgres, "k")
        with psycopg.connect(postgres_url, autocommit=True) as watcher:
            before = _row_and_next_xid(watcher)
            for _ in range(50):
                found = postgres.perform(claim("k"))
                assert isinstance(found, Found)
                assert found.answer == ANSWER

            assert _row_and_next_xid(watcher) == before

    async def test_first_execution_is_two_statements_and_replay_is_one(self, postgres_url: str) -> None:
        """A first execution costs the server two statements, a replay one."""
        store(postgres_url).migrate()
        async with AsyncPostgresStore(postgres_url) as postgres:
            seen = await _watched(postgres)
            hold = await postgres.perform(replace(claim("k"), traceparent=f"00-{'a' * 32}-{'b' * 16}-01"))
            assert isinstance(hold, Hold)
            await postgres.perform(Complete(hold, Event.COMPLETE, ANSWER))

            assert len(seen) == 2

            await postgres.perform(claim("k"))

            assert len(seen) == 3

    async def test_crowd_on_one_key_goes_out_as_few_statements(self, postgres_url: str) -> None:
        """Sixty-four claims on one new key in one process are two batches at most, and one of them wins."""
        store(postgres_url).migrate()
        async with AsyncPostgresStore(postgres_url) as postgres:
            seen = await _watched(postgres)
            got = await asyncio.gather(*[postgres.perform(claim("hot")) for _ in range(64)])

            assert len([each for each in got if isinstance(each, Hold)]) == 1
            assert len([each for each in got if isinstance(each, Found)]) == 63
            assert len(seen) <= 2

    @pytest.mark.parametrize("trace", [f"00-{'a' * 32}-{'b' * 16}-01", None])
    async def test_traces_take_no_statement_of_their_own(self, postgres_url: str, trace: str | None) -> None:
        """Requests that are claimed together keep each their own trace, and that takes no further statement."""
        store(postgres_url).migrate()
        claims = [replace(claim("a"), traceparent=trace), claim("b"), claim("a"), claim("c")]
        async with AsyncPostgresStore(postgres_url) as postgres:
            seen = await _watched(postgres)
            got = await asyncio.gather(*map(postgres.perform, claims))

            assert [type(each) for each in got] == [Hold, Hold, Found, Hold]
            assert isinstance(got[2], Found)
            assert got[2].traceparent == trace
            assert len(seen) <= 2

            stored = {each.key: each.traceparent for each in await postgres.perform(Browse(3))}
            assert stored == {"a": trace, "b": None, "c": None}

    @pytest.mark.parametrize("rows", [0, 50_000])
    @pytest.mark.parametrize("name", ["claim", "claims", "complete", "completes", "renew"])
    def test_statements_look_every_key_up_by_the_primary_key(self, postgres_url: str, rows: int, name: str) -> None:
        """On a table that was never analysed, empty or large, no statement reads the table from end to end."""
        store(postgres_url).migrate()
        with psycopg.connect(postgres_url, autocommit=True, cursor_factory=psycopg.RawCursor) as connection:
            for setting, value in SESSION.items():
                connection.execute("SELECT set_config($1, $2, false)", [setting, value])
            connection.execute("ALTER TABLE semel_keys SET (autovacuum_enabled = off)")
            _fill(connection, rows)
            plan = _generic_plan(connection, name)

            assert "Seq Scan" not in plan
            assert "semel_keys_pkey" in plan


class TestAlone:
    """What goes out by itself is another statement than what goes out together, and they say the same."""

    async def test_claims(self, postgres_url: str) -> None:
        """A key that is there is found to be the same by a claim that comes alone and by one in company."""
        store(postgres_url).migrate()
        soon = timedelta(microseconds=1)
        async with AsyncPostgresStore(postgres_url) as postgres:
            for key in ("live", "lapsed", "expired", "done", "failed", "stripped", "parked"):
                terms = replace(claim(key), lease=soon if key in {"lapsed", "expired"} else LEASE)
                hold = await postgres.perform(replace(terms, retention=soon) if key == "expired" else terms)
                assert isinstance(hold, Hold)
                if key in {"done", "failed", "stripped"}:
                    event = Event.FAIL if key == "failed" else Event.COMPLETE
                    answer = Answer(204, (), None) if key == "stripped" else ANSWER
                    assert await postgres.perform(Complete(hold, event, answer)) is Verdict.DONE
                elif key == "parked":
                    await postgres.perform(Park(hold))
                alone = await postgres.perform(claim(key))
                together, _ = await asyncio.gather(*[postgres.perform(claim(each)) for each in (key, f"beside {key}")])
                assert isinstance(alone, Found)
                assert isinstance(together, Found)
                assert replace(alone, retention_left=None) == replace(together, retention_left=None)

    async def test_answers(self, postgres_url: str) -> None:
        """An answer is stored once by its own worker, and by no other, whether it comes alone or in company."""
        store(postgres_url).migrate()
        async with AsyncPostgresStore(postgres_url) as postgres:
            for keys in (["lone"], ["one", "two"]):
                holds = [hold for key in keys if isinstance(hold := await postgres.perform(claim(key)), Hold)]
                strangers = [replace(hold, token=os.urandom(16)) for hold in holds]
                for workers, verdict in (
                    (strangers, Verdict.FENCED),
                    (holds, Verdict.DONE),
                    (holds, Verdict.DONE),  # The reply to the first was lost, as far as the worker knows.
                    (strangers, Verdict.FENCED),
                ):
                    sent = [postgres.perform(Complete(each, Event.COMPLETE, ANSWER)) for each in workers]
                    assert set(await asyncio.gather(*sent)) == {verdict}


class TestRivals:
    def test_overlapping_batches_never_deadlock(self, postgres_url: str) -> None:
        """Processes that claim the same keys in different orders at the same time neither deadlock nor fail."""
        store(postgres_url).migrate()

        async def storm() -> list[Any]:
            rivals = [AsyncPostgresStore(postgres_url) for _ in range(4)]
            keys = [f"k{number}" for number in range(40)]
            asked = [
                rival.perform(claim(key))
                for rounds in range(10)
                for number, rival in enumerate(rivals)
                for key in (keys if (number + rounds) % 2 else reversed(keys))
            ]
            got = await asyncio.gather(*asked)
            for rival in rivals:
                await rival.close()
            return got

        got = asyncio.run(storm())

        assert sum(isinstance(each, Hold) for each in got) == 40
        assert all(isinstance(each, Hold | Found | Again) for each in got)

    def test_claim_that_waited_for_a_release_wins(self, postgres: PostgresStore, postgres_url: str) -> None:
        """A claim that wins a key while it is being freed is told so, though its view still shows the old record."""
        hold = postgres.perform(claim("k"))
        assert isinstance(hold, Hold)
        with psycopg.connect(postgres_url) as releasing, ThreadPoolExecutor() as rivals:
            releasing.execute("DELETE FROM semel_keys")
            got = rivals.submit(postgres.perform, claim("k"))
            _until_somebody_waits(postgres_url)
            releasing.commit()

            assert isinstance(got.result(), Hold)

    @pytest.mark.parametrize("colour", ["sync", "async"])
    def test_locked_row_does_not_hold_up_renewals(self, postgres_url: str, colour: str) -> None:
        """While one row is locked by somebody's open transaction, and a release waits for it, all else is renewed."""
        store(postgres_url).migrate()
        with psycopg.connect(postgres_url) as operator:
            if colour == "sync":
                renewed = _renewed_beside_a_lock(postgres_url, operator)
            else:
                renewed = asyncio.run(_renewed_beside_a_lock_on_a_loop(postgres_url, operator))

        assert renewed == frozenset()

    def test_poisoned_row_fails_alone(self, postgres: PostgresStore) -> None:
        """A row that the database refuses fails its own request and none of its neighbours in the batch."""
        good, bad = claim("good"), Claim("alice", "bad", b"too short", b"", LEASE, RETENTION)
        outcomes = postgres._claims._outcomes([good, bad])

        assert isinstance(outcomes[0], Hold | Found)
        assert isinstance(outcomes[1], StoreRefused)
        assert "too short" not in str(outcomes[1])

    def test_stores_on_both_drivers_share_one_table(self, postgres: PostgresStore, postgres_url: str) -> None:
        """What one process stored through psycopg another replays through asyncpg."""
        finished(postgres, "k")

        async def look() -> object:
            async with AsyncPostgresStore(postgres_url) as other:
                return await other.perform(claim("k"))

        found = asyncio.run(look())

        assert isinstance(found, Found)
        assert found.answer == ANSWER


class TestTrouble:
    @pytest.mark.parametrize("open_store", [store, async_store])
    @pytest.mark.parametrize(
        "url, named",
        [
            ("postgresql://localhost:99999/db", "port"),
            ("postgresql://localhost/db?table=drop table", "drop table"),
            ("postgresql://localhost/db?schema=a;b", "a;b"),
            ("postgresql://localhost/db?table=", "table"),
            ("mysql://localhost/db", "mysql"),
            ("semel.db", "scheme"),
            ("postgresql://me:pa[ss@localhost/db", "%XX"),
        ],
    )
    def test_wrong_url_is_an_error_that_says_what_is_wrong(self, open_store: Any, url: str, named: str) -> None:
        """A URL that can't be right is refused when the store is made, and the error names the fault."""
        with pytest.raises(ConfigurationError, match=named):
            open_store(url)

    @pytest.mark.parametrize("end", ["/secret@h/shop", "?secret@h/shop", "#secret@h/shop"])
    def test_a_password_that_is_not_escaped(self, end: str) -> None:
        """A password with characters that end a host is in no message, and people are told how to write it."""
        with pytest.raises(ConfigurationError, match="%2F") as raised:
            store(f"postgresql://user:hush{end}")
        assert "hush" not in str(raised.value)
        assert "secret" not in str(raised.value)

    async def test_a_url_without_a_host(self, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the URL has no host, it is in the parameters or in the environment, as libpq has it; messages say the
        URL as it was given.
        """
        parts = urlsplit(postgres_url)
        bare = f"postgresql://{parts.path}"
        url = f"{bare}?host={parts.hostname}&port={parts.port}&user={parts.username}"
        with pytest.raises(
            StoreNotReady,
            match=rf"semel migrate 'postgresql:.*\?host={parts.hostname}&port={parts.port}&user={parts.username}'",
        ):
            store(url).perform(claim("k"))
        assert store(url).migrate()
        monkeypatch.setenv("PGHOST", str(parts.hostname))
        monkeypatch.setenv("PGPORT", str(parts.port))
        monkeypatch.setenv("PGUSER", str(parts.username))
        for number, each in enumerate((url, bare)):
            with store(each) as sync:
                assert isinstance(sync.perform(claim(f"sync {number}")), Hold)
            async with async_store(each) as opened:
                held = await opened.perform(claim(f"async {number}"))
                assert isinstance(held, Hold)

    async def test_parameters_reach_the_server_as_they_are(self, postgres_url: str) -> None:
        """A space in a parameter of the driver's is a space, and a plus a plus, whichever driver reads it."""
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA foo")
        url = f"{postgres_url}?options={quote('-c search_path=foo')}"
        store(url).migrate()
        async with async_store(url) as opened:
            held = await opened.perform(claim("k"))
            assert isinstance(held, Hold)
        with store(url) as sync:
            assert isinstance(sync.perform(claim("k")), Found)
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT key FROM foo.semel_keys").fetchall() == [("k",)]
        assert Address.of("postgresql://h/db?password=a+b%20c").url == "postgresql://h/db?password=a%2Bb%20c"

    async def test_no_server_is_an_error_that_names_the_address(self) -> None:
        """Where no server listens, the error names the address, without the password, and says nothing was sent."""
        url = "postgresql://semel:secret@127.0.0.1:1/db"
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as sync_error:
            store(url).perform(claim("k"))
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as async_error:
            await async_store(url).perform(claim("k"))
        for error in (sync_error.value, async_error.value):
            assert "secret" not in str(error)
            assert not error.was_sent

    async def test_no_table_is_an_error_that_names_the_command(self, postgres_url: str) -> None:
        """Where the table is missing, the error says which command makes it."""
        with pytest.raises(StoreNotReady, match="semel migrate postgresql://"):
            store(postgres_url).perform(claim("k"))
        with pytest.raises(StoreNotReady, match="semel migrate postgresql://"):
            await async_store(postgres_url).open()

    async def test_replica_is_an_error_that_says_so(self, postgres_url: str) -> None:
        """A server that takes no writes is told apart from one that is down."""
        store(postgres_url).migrate()
        database = urlsplit(postgres_url).path[1:]
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on".encode())
        with pytest.raises(StoreReadOnly, match="primary"):
            store(postgres_url).perform(claim("k"))
        with pytest.raises(StoreReadOnly, match="primary"):
            store(postgres_url).open()
        with pytest.raises(StoreReadOnly, match="primary"):
            await async_store(postgres_url).perform(claim("k"))

    def test_server_that_comes_back_is_used_again(self) -> None:
        """A store survives its server's crash: it fails while the server is down, and works when it is up again."""
        with servers.postgres(settings={"fsync": "on"}) as server:  # With settings it is ours, and may be killed.
            postgres = PostgresStore(server.url)
            postgres.migrate()
            finished(postgres, "before")
            server.kill()
            with pytest.raises(StoreUnavailable):
                postgres.perform(claim("while"))
            server.start()

            assert isinstance(postgres.perform(claim("before")), Found)
            assert isinstance(postgres.perform(claim("after")), Hold)

            postgres.close()

    def test_connections_are_not_shared_with_a_forked_child(self, postgres: PostgresStore) -> None:
        """A forked child opens connections of its own, and its parent's go on working."""
        finished(postgres, "parent")
        child = os.fork()
        if child == 0:
            got = postgres.perform(claim("child"))
            os._exit(0 if isinstance(got, Hold) else 1)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert isinstance(postgres.perform(claim("parent")), Found)
        assert isinstance(postgres.perform(claim("child")), Found)


class TestSchema:
    def test_migrations_in_order_equal_the_schema(self, postgres_server: servers.PostgresServer) -> None:
        """A database that was migrated step by step is the same as one made from schema.sql."""
        schema = (files(PACKAGE) / "schema.sql").read_text()
        with psycopg.connect(postgres_server.url) as connection:
            fresh = _described(connection, [schema], "fresh")
            migrated = _described(connection, [sql for _, sql in load_migrations(PACKAGE, Names())], "migrated")
            connection.rollback()

        assert migrated == fresh

    def test_migrating_again_does_nothing(self, postgres_url: str) -> None:
        """``migrate`` says what it applied, and a second time there is nothing to apply."""
        assert store(postgres_url).migrate() == [name for name, _ in load_migrations(PACKAGE, Names())]
        assert store(postgres_url).migrate() == []

    def test_migrating_waits_for_whoever_migrates(
        self, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The limits that keep a request from waiting do not cut a migration short."""
        monkeypatch.setattr(sync_store, "_OPTIONS", "-c lock_timeout=10ms")
        with psycopg.connect(postgres_url) as other, ThreadPoolExecutor() as threads:
            other.execute("SELECT pg_advisory_xact_lock(%s)", [migrating.MIGRATION_LOCK])
            migrated = threads.submit(store(postgres_url).migrate)
            until("it has said that it waits", lambda: "Waiting for it" in caplog.text or migrated.done())
            other.rollback()

            assert migrated.result() == [name for name, _ in load_migrations(PACKAGE, Names())]

    @pytest.mark.parametrize("audit", ["on", "all"])
    def test_every_query_can_be_prepared(self, postgres_url: str, audit: Any) -> None:
        """The database accepts every statement in queries.sql, in every variant."""
        store(postgres_url).migrate()
        with psycopg.connect(postgres_url) as connection:
            # ``note_finish`` is the beginning of others.
            queries = {name: query for name, query in queries_of(Names(), audit).items() if name != "note_finish"}
            for name, query in queries.items():
                connection.execute(f"PREPARE the_{name} AS {query.numbered}".encode())
            prepared = {name for (name,) in connection.execute("SELECT name FROM pg_prepared_statements")}

        assert prepared == {f"the_{name}" for name in queries}

    def test_table_and_schema_can_have_names_of_their_own(self, postgres_url: str) -> None:
        """``?schema=`` and ``?table=`` put the records elsewhere, and nothing of Semel's stands outside of that."""
        elsewhere = f"{postgres_url}?schema=billing&table=idem"
        store(elsewhere).migrate()
        with PostgresStore(elsewhere) as postgres:
            finished(postgres, "k")
            record = postgres.perform(Look("alice", "k"))
            assert record is not None
            assert record.answer == ANSWER
            assert len(postgres.perform(Browse(10))) == 1
            assert postgres.perform(FindStuck(10)) == ()
            assert postgres.perform(Browse(10, state=State.PENDING)) == ()
        with psycopg.connect(postgres_url) as connection:
            made = connection.execute(
                "SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname NOT LIKE 'pg_%' "
                "AND schemaname <> 'information_schema' ORDER BY 1"
            ).fetchall()

        assert made == [
            ("billing.idem",),
            ("billing.idem_audit",),
            ("billing.idem_counts",),
            ("billing.idem_inbox",),
            ("billing.idem_migrations",),
            ("billing.idem_outbox",),
            ("billing.idem_watermark",),
            ("billing.idem_webhooks",),
        ]


def _until_somebody_waits(url: str, *, longer_than: str = "0", or_done: Future[Any] | None = None) -> None:
    with psycopg.connect(url, autocommit=True) as watcher:
        waiting = f"SELECT EXISTS (SELECT FROM pg_locks WHERE clock_timestamp() - waitstart > interval '{longer_than}')"
        while not watcher.execute(waiting.encode()).fetchall()[0][0]:
            if or_done is not None and or_done.done():
                return


def _renewed_beside_a_lock(url: str, operator: psycopg.Connection[Any]) -> frozenset[Hold]:
    with PostgresStore(url) as postgres, ThreadPoolExecutor() as threads:
        locked, free = (postgres.perform(claim(key)) for key in ("locked", "free"))
        assert isinstance(locked, Hold)
        assert isinstance(free, Hold)
        operator.execute("SELECT FROM semel_keys WHERE key = 'locked' FOR UPDATE")
        released = threads.submit(postgres.perform, Release(locked))
        _until_somebody_waits(url)
        lost = postgres.perform(Renew(((locked, LEASE), (free, LEASE))))
        operator.rollback()
        assert released.result() is Verdict.DONE
        return lost


async def _renewed_beside_a_lock_on_a_loop(url: str, operator: psycopg.Connection[Any]) -> frozenset[Hold]:
    async with AsyncPostgresStore(url) as postgres:
        locked, free = [await postgres.perform(claim(key)) for key in ("locked", "free")]
        assert isinstance(locked, Hold)
        assert isinstance(free, Hold)
        operator.execute("SELECT FROM semel_keys WHERE key = 'locked' FOR UPDATE")
        released = postgres.perform(Release(locked))
        await asyncio.to_thread(_until_somebody_waits, url)
        lost = await postgres.perform(Renew(((locked, LEASE), (free, LEASE))))
        operator.rollback()
        assert await released is Verdict.DONE
        return lost


async def _watched(postgres: AsyncPostgresStore) -> list[str]:
    """The statements that go out from now on; asyncpg's own, sent once per connection, are behind us."""
    for keys in (["lone"], ["one", "two"]):  # What goes out alone and what goes out together are two statements.
        holds = await asyncio.gather(*[postgres.perform(claim(key)) for key in keys])
        await asyncio.gather(
            *[postgres.perform(Complete(hold, Event.COMPLETE, ANSWER)) for hold in holds if isinstance(hold, Hold)]
        )
    seen: list[str] = []
    for link in postgres._links:
        if link._connection is not None:
            link._connection.add_query_logger(lambda record: seen.append(record.query))
    return seen


def _row_and_next_xid(connection: psycopg.Connection[Any]) -> Any:
    return connection.execute(
        "SELECT ctid, xmin, xmax, pg_snapshot_xmax(pg_current_snapshot()) FROM semel_keys"
    ).fetchall()


def _fill(connection: psycopg.Connection[Any], rows: int) -> None:
    connection.execute(
        "INSERT INTO semel_keys "
        "(scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at) "
        "SELECT 'alice', 'k' || n, 'processing', 1, decode(md5(n::text), 'hex'), '', now(), now(), now() "
        "FROM generate_series(1, $1::int) AS n",
        [rows],
    )


def _generic_plan(connection: psycopg.Connection[Any], name: str) -> str:
    connection.execute("SET plan_cache_mode = force_generic_plan")
    hold, other = (Hold("alice", key, 1, b"x" * 16) for key in ("k1", "k2"))
    statements = Statements(Names())
    statement: Any = {
        "claim": statements.claim([claim("k1")]),
        "claims": statements.claim([claim("k1"), claim("k2")]),
        "complete": statements.complete([Complete(hold, Event.COMPLETE, ANSWER)]),
        "completes": statements.complete([Complete(each, Event.COMPLETE, ANSWER) for each in (hold, other)]),
        "renew": statements.renew(Renew(((hold, LEASE),))),
    }[name]
    plan = connection.execute(f"EXPLAIN {statement.sql}".encode(), statement.parameters)
    return "\n".join(line for (line,) in plan)


def _described(connection: psycopg.Connection[Any], script: list[str], schema: str) -> list[Any]:
    connection.execute(f"CREATE SCHEMA {schema}".encode())
    connection.execute(f"SET search_path = {schema}".encode())
    for sql in script:
        connection.execute(sql.encode())
    columns = connection.execute(
        "SELECT table_name, ordinal_position, column_name, data_type, is_nullable, collation_name, column_default "
        "FROM information_schema.columns WHERE table_schema = %s ORDER BY 1, 2",
        [schema],
    ).fetchall()
    constraints = connection.execute(
        "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = %s::regnamespace ORDER BY 1",
        [schema],
    ).fetchall()
    indexes = connection.execute(
        "SELECT indexname, replace(indexdef, %s || '.', '') FROM pg_indexes WHERE schemaname = %s ORDER BY 1",
        [schema, schema],
    ).fetchall()
    return [columns, constraints, indexes]

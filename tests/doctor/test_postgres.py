"""Faults of a PostgreSQL database, planted in a real one."""

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from semel.doctor import Limits, Verdict, examine
from semel.stores import store
from tests.conftest import migrate
from tests.doctor.planting import examined, finding, not_ok, plants
from tests.kit import servers

ROOT = Path(__file__).parents[2]


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for each in statements:
            connection.execute(each.encode())


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A role without privileges."""
    name = f"doctor_{uuid4().hex[:12]}"
    execute(postgres_url, f"CREATE ROLE {name} LOGIN")
    yield name
    execute(postgres_url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{role}@{parts.netloc.rpartition('@')[2]}").geturl()


#: Faults in tables that can be planted together: by what they have in common, the statement for each check.
FAULTS = {
    "alone": {"postgres-tables": "DROP TABLE semel_outbox"},
    "version": {"postgres-schema": "DELETE FROM semel_keys_migrations WHERE name LIKE '0005%'"},
    "primary key": {
        "postgres-claim-plan": "ALTER TABLE semel_keys DROP CONSTRAINT semel_keys_pkey",
        "postgres-completion-plan": "SELECT 'the same'",
        "postgres-indexes": "SELECT 'the same'",
    },
    "together": {
        "postgres-one-table": "CREATE SCHEMA other CREATE TABLE semel_keys ()",
        "postgres-logged": "ALTER TABLE semel_keys SET UNLOGGED",
        "postgres-row-security": "ALTER TABLE semel_keys ENABLE ROW LEVEL SECURITY",
        "postgres-schema-newer": "INSERT INTO semel_keys_migrations (name) VALUES ('9999_pre_future')",
        "postgres-indexes": "DROP INDEX semel_keys_age",
        "postgres-reap-plan": "DROP INDEX semel_keys_expiry",
        "postgres-autovacuum": "ALTER TABLE semel_keys SET (autovacuum_enabled = false)",
    },
}
#: By check: a setting that a database may have of its own.
SETTINGS = {
    "postgres-writable": "default_transaction_read_only = on",
    "postgres-synchronous-commit": "synchronous_commit = off",
    "postgres-isolation": "default_transaction_isolation = 'serializable'",
    "postgres-statement-timeout": "statement_timeout = '500ms'",
    "postgres-lock-timeout": "lock_timeout = '10ms'",
    "postgres-idle-timeout": "idle_in_transaction_session_timeout = '1s'",
}


def wrong(url: str) -> set[str]:
    """The checks that find something wrong; the server of these tests does not wait for its disk."""
    return {name for name, verdict, _ in not_ok(examine(url)) if verdict == "wrong"} - {"postgres-fsync"}


@plants(*(name for several in FAULTS.values() for name in several))
@pytest.mark.parametrize("what", FAULTS)
def test_tables(postgres_url: str, what: str) -> None:
    """Faults in Semel's tables are found, all of them, and nothing else is."""
    execute(postgres_url, *FAULTS[what].values())
    assert wrong(postgres_url) == set(FAULTS[what])


@plants(*SETTINGS)
def test_settings(postgres_url: str) -> None:
    """A setting of the database is found where a new session would have it, and its source is told."""
    database = urlsplit(postgres_url).path[1:]
    execute(postgres_url, *(f"ALTER DATABASE {database} SET {each}" for each in SETTINGS.values()))
    report = examine(postgres_url)
    for name in SETTINGS:
        found = finding(report, name)
        assert found.verdict is Verdict.WRONG
        assert "database" in found.evidence


def test_synchronous_commit_of_another_role(postgres_url: str, role: str) -> None:
    """A role of the application's that commits without waiting for the disk is found by any other role."""
    database = urlsplit(postgres_url).path[1:]
    execute(postgres_url, f"ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = off")
    found = examined(postgres_url, "postgres-synchronous-commit")
    assert found.verdict is Verdict.WRONG
    assert role in found.evidence
    execute(postgres_url, found.mend)
    assert examined(postgres_url, "postgres-synchronous-commit").verdict is Verdict.OK


def test_a_column_that_is_missing(postgres_url: str, role: str) -> None:
    """A role that may not read the migrations is told of an old schema by the columns that it lacks."""
    url = as_role(postgres_url, role)
    assert "Every column is there" in examined(url, "postgres-schema").evidence
    execute(postgres_url, "ALTER TABLE semel_keys DROP COLUMN milestone")
    found = examined(url, "postgres-schema")
    assert found.verdict is Verdict.WRONG
    assert found.evidence == "Columns are missing: semel_keys.milestone."


def test_an_invalid_index(postgres_url: str) -> None:
    """An index that CREATE INDEX CONCURRENTLY has left half built is found, with the command that builds it."""
    mark = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'semel_keys_age'::regclass"
    execute(postgres_url, mark)
    found = examined(postgres_url, "postgres-indexes")
    assert found.verdict is Verdict.WRONG
    assert found.mend == "REINDEX INDEX CONCURRENTLY semel_keys_age"


@plants("postgres-grants", "postgres-service-grants")
def test_grants(postgres_url: str, role: str) -> None:
    """What a role lacks is named, with the GRANT that gives it."""
    execute(postgres_url, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    report = examine(as_role(postgres_url, role), only=["postgres-*grants"])
    serving, working = (finding(report, f"postgres-{name}") for name in ("grants", "service-grants"))
    assert serving.verdict is working.verdict is Verdict.WRONG
    assert "INSERT, UPDATE, DELETE on semel_keys" in serving.evidence
    execute(postgres_url, *serving.mend.split(";")[:-1], *working.mend.split(";")[:-1])
    again = examine(as_role(postgres_url, role), only=["postgres-*grants"])
    assert not_ok(again) == []
    assert "may not reap or relay" in finding(again, "postgres-service-grants").evidence


DROP_TODAY = """
DO $$ BEGIN EXECUTE format('DROP TABLE semel_answers_%s', to_char(now() AT TIME ZONE 'UTC', 'YYMMDD')); END $$
"""


@plants("postgres-answer-trigger", "postgres-partitions-ahead", "postgres-default-partition")
def test_partitions(postgres_url: str, role: str) -> None:
    """Of the partitioned layout it is told where the trigger is off or has no table, where partitions are missing or
    left, where answers are in the default one, and what a role lacks; of a plain one nothing.
    """
    names = ["postgres-answer-trigger", "postgres-partitions-ahead", "postgres-default-partition"]
    assert wrong(postgres_url) == set()
    with contextlib.closing(store(postgres_url)) as keys:
        keys.lay_out("partitioned")
    assert wrong(postgres_url) == set()
    grants = finding(examine(as_role(postgres_url, role), only=["postgres-grants"]), "postgres-grants")
    assert "SELECT, INSERT on semel_answers" in grants.evidence
    execute(postgres_url, "INSERT INTO semel_answers VALUES (current_date + 30, '', '')")
    assert wrong(postgres_url) == {"postgres-default-partition"}
    execute(
        postgres_url,
        "ALTER TABLE semel_keys DISABLE TRIGGER semel_keys_answer",
        "CREATE TABLE semel_answers_200101 PARTITION OF semel_answers FOR VALUES IN ('2020-01-01')",
        DROP_TODAY,
    )
    report = examine(postgres_url)
    assert {name for name, _, _ in not_ok(report)} & set(names) == set(names)
    assert "long over and still there: 2020-01-01" in finding(report, "postgres-partitions-ahead").evidence
    execute(postgres_url, finding(report, "postgres-answer-trigger").mend)
    assert examined(postgres_url, "postgres-answer-trigger").verdict is Verdict.OK
    execute(postgres_url, "DROP TABLE semel_answers")
    assert wrong(postgres_url) == {"postgres-answer-trigger"}
    with contextlib.closing(store(postgres_url)) as keys:
        keys.lay_out("plain")
    assert wrong(postgres_url) == set()


def test_a_role_that_may_not_read(postgres_url: str, role: str) -> None:
    """What a role may not see can't be told, with the reason; it is not taken for wrong."""
    report = examine(as_role(postgres_url, role))
    for name in ("postgres-schema-newer", "postgres-claim-plan", "store-parked"):
        found = finding(report, name)
        assert found.verdict is Verdict.CANNOT_TELL, found
        assert "permission denied" in found.evidence
    assert finding(report, "postgres-grants").verdict is Verdict.WRONG


@plants("postgres-dead-rows", "postgres-bloat")
def test_dead_rows_and_bloat(postgres_url: str) -> None:
    """Rows that vacuum has not removed are found; and the room that they leave, when it has."""
    execute(
        postgres_url,
        "ALTER TABLE semel_keys SET (autovacuum_enabled = false)",
        "INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,"
        " completed_at, expires_at) SELECT 's', 'key ' || n, 'complete', 1, decode(md5(''), 'hex'), '\\x00', 200, '[]',"
        " convert_to(repeat('x', 900), 'UTF8'), now(), now(), now() + interval '1 day'"
        " FROM generate_series(1, 11000) AS n",
        "DELETE FROM semel_keys WHERE key <> 'key 11000'",
    )
    limits = Limits(bloat_bytes=1024 * 1024)
    assert examined(postgres_url, "postgres-dead-rows").verdict is Verdict.WRONG
    assert examined(postgres_url, "postgres-bloat", limits=limits).verdict is Verdict.CANNOT_TELL
    execute(postgres_url, "VACUUM (ANALYZE) semel_keys")
    assert examined(postgres_url, "postgres-dead-rows").verdict is Verdict.OK
    found = examined(postgres_url, "postgres-bloat", limits=limits)
    assert found.verdict is Verdict.WRONG
    assert "semel_keys has" in found.evidence


@plants("postgres-oldest-transaction")
def test_a_forgotten_transaction(postgres_url: str, role: str) -> None:
    """A session that is idle in a transaction is named; to a role that may not see it, it can't be told."""
    limits = Limits(oldest_transaction=timedelta())
    with psycopg.connect(postgres_url, application_name="forgotten") as connection:
        connection.execute("SELECT 1")
        found = examined(postgres_url, "postgres-oldest-transaction", limits=limits)
        assert found.verdict is Verdict.WRONG
        assert f"forgotten (pid {connection.info.backend_pid}" in found.evidence
        assert "idle in transaction" in found.evidence
        hidden = examined(as_role(postgres_url, role), "postgres-oldest-transaction", limits=limits)
        assert hidden.verdict is Verdict.CANNOT_TELL


@plants("postgres-wraparound", "postgres-fsync")
def test_of_the_whole_server(postgres_url: str) -> None:
    """What is so for all databases of a server is found from any of them."""
    assert examined(postgres_url, "postgres-wraparound", limits=Limits(wraparound=0)).verdict is Verdict.WRONG
    assert examined(postgres_url, "postgres-fsync").verdict is Verdict.WRONG


@plants("postgres-encoding")
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_encoding(postgres_url: str, encoding: str) -> None:
    """A database that can't hold every character is found."""
    name = f"latin_{uuid4().hex[:12]}"
    execute(postgres_url, f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    try:
        url = urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        assert examined(url, "postgres-encoding").verdict is Verdict.WRONG
    finally:
        execute(postgres_url, f"DROP DATABASE {name}")


@plants("postgres-pooler")
def test_pooler(pgbouncer_url: str) -> None:
    """A pooler is told apart from a server; it is wrong only where the URL asks for what it takes away."""
    assert "pooler between" in examined(pgbouncer_url, "postgres-pooler").evidence
    assert examined(f"{pgbouncer_url}?takeover=instant", "postgres-pooler").verdict is Verdict.WRONG


def test_everything_through_a_pooler(pgbouncer_url: str) -> None:
    """Every check works through a pooler in transaction mode, over and over, and leaves nothing in its sessions."""
    for _ in range(2):
        assert [name for name, *_ in not_ok(examine(pgbouncer_url))] == ["postgres-fsync"]


@plants(
    "postgres-connections",
    "postgres-fsync",
    "postgres-full-page-writes",
    "postgres-prepared-transactions",
    "postgres-replication-slots",
    "postgres-synchronous-standbys",
)
def test_a_sick_server() -> None:
    """Faults of a server are all found at once, and none hides another."""
    settings = {
        "fsync": "off",
        "full_page_writes": "off",
        "autovacuum": "off",
        "max_prepared_transactions": "2",
        "wal_level": "logical",
        "max_connections": "14",
    }
    with servers.postgres(settings=settings) as server, contextlib.ExitStack() as ends:
        migrate(server.url)
        execute(
            server.url,
            "SELECT pg_create_logical_replication_slot('forgotten', 'pgoutput')",
            "BEGIN; CREATE TABLE half (); PREPARE TRANSACTION 'half done'",
            "ALTER SYSTEM SET synchronous_standby_names = '2 (ghost, shade)'",
            "SELECT pg_reload_conf()",
        )
        for _ in range(9):
            ends.enter_context(psycopg.connect(server.url))
        report = examine(server.url, limits=Limits(prepared_transaction=timedelta()))
        found = {name for name, verdict, _ in not_ok(report) if verdict == "wrong"}
        assert found == {
            "postgres-autovacuum",
            "postgres-connections",
            "postgres-fsync",
            "postgres-full-page-writes",
            "postgres-prepared-transactions",
            "postgres-replication-slots",
            "postgres-synchronous-standbys",
        }
        assert "'half done'" in finding(report, "postgres-prepared-transactions").evidence
        assert "forgotten" in finding(report, "postgres-replication-slots").mend


def test_a_healthy_server() -> None:
    """Nothing is wrong with a server as it comes, and every check can tell so. The application's role, with what the
    docs grant it, can tell all but what other sessions do, and whether a newer version was there.
    """
    with servers.postgres(settings={"fsync": "on"}) as server:
        migrate(server.url)
        assert not_ok(examine(server.url)) == []
        page = (ROOT / "docs" / "how-to" / "postgresql.md").read_text()
        execute(server.url, re.findall(r"```sql\n(CREATE ROLE.*?)```", page, re.DOTALL)[0])
        with psycopg.connect(server.url):
            report = examine(as_role(server.url, "semel_app"))
        hidden = {"postgres-schema-newer", "postgres-oldest-transaction"}
        assert {(name, verdict) for name, verdict, _ in not_ok(report)} == {(name, "cannot tell") for name in hidden}
        assert "GRANT pg_read_all_stats" in finding(report, "postgres-oldest-transaction").evidence


@pytest.mark.slow
def test_a_replica() -> None:
    """A standby is told to be one. Everything else can be told of it, too."""
    with servers.postgres(settings={"fsync": "on"}) as server:
        migrate(server.url)
        with servers.postgres_standby(server) as standby:
            assert [name for name, *_ in not_ok(examine(standby.url))] == ["postgres-writable"]
            found = finding(examine(server.url), "postgres-synchronous-standbys")
            assert found.evidence == "synchronous_standby_names is empty; 1 standbys are connected."


def test_nothing_is_written(postgres_url: str) -> None:
    """An examination takes no transaction number, without which no row can be changed."""
    look = "SELECT pg_current_snapshot()::text, (SELECT count(*) FROM pg_class)"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        before = connection.execute(look).fetchone()
        examine(postgres_url)
        assert connection.execute(look).fetchone() == before


@plants("postgres-reachable")
def test_a_server_that_is_not_there() -> None:
    """A server that refuses is wrong, and everything else is skipped, with the reason."""
    report = examine(f"postgresql://semel:secret@127.0.0.1:{servers.free_port()}/shop")
    first, *others = report.findings
    assert (first.check.name, first.verdict) == ("postgres-reachable", Verdict.WRONG)
    assert {each.evidence for each in others} == {"Skipped, because postgres-reachable is wrong."}
    assert "secret" not in str(report)


def test_a_wrong_database(postgres_url: str) -> None:
    """A database that does not exist is told in the server's words."""
    url = urlsplit(postgres_url)._replace(path="/nowhere").geturl()
    assert 'database "nowhere" does not exist' in examined(url, "postgres-reachable").evidence


def test_an_empty_database(empty_postgres_url: str) -> None:
    """A database without tables is told what to type, and nothing is asked of tables that are not there."""
    report = examine(empty_postgres_url)
    found = finding(report, "postgres-tables")
    assert found.verdict is Verdict.WRONG
    assert found.mend == f"semel migrate {empty_postgres_url}"
    assert finding(report, "store-parked").is_skipped


def test_another_schema_and_table(empty_postgres_url: str) -> None:
    """A store with a schema and a table name of its own is examined there."""
    url = f"{empty_postgres_url}?schema=guard&table=shop_keys"
    migrate(url)
    assert [name for name, *_ in not_ok(examine(url))] == ["postgres-fsync"]
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute(sql.SQL("ALTER TABLE guard.shop_keys SET UNLOGGED"))
    assert "shop_keys" in examined(url, "postgres-logged").evidence

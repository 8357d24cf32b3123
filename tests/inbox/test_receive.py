"""A message is handled once, over every kind of connection, whatever is delivered again, fails, or happens at once."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from semel.errors import (
    ConfigurationError,
    MessageDiffers,
    MessageUnidentified,
    NoEffect,
    StoreNotReady,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from semel.inbox import AsyncInbox, Busy, Duplicate, Inbox, Parked, Ran
from semel.stores import async_store, store
from semel.stores.tiered import Tiered
from tests.inbox.consumers import (
    GIVEN_KINDS,
    HANG_SECONDS,
    KINDS,
    POSTGRES_KINDS,
    USUAL,
    consumer,
    execute,
    parcels,
    receipts,
)

REDELIVERIES = 1000
MESSAGES = 20


class Boom(Exception):
    """What a handler raises."""


def fail() -> None:
    raise Boom("no stock\nleft")


def hold_up(running: threading.Event, may_end: threading.Event) -> None:
    running.set()
    assert may_end.wait(HANG_SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_once(kind: str, url: str) -> None:
    """A first delivery runs the handler, in the driver's own type, and commits; the second runs nothing."""
    with consumer(kind, url) as billing:
        assert billing.receive("m-1", b"{}") == Ran("shipped m-1")
        assert billing.receive("m-1", b"{}") == Duplicate()
        assert billing.receive("m-2") == Ran("shipped m-2")
        assert billing.runs == 2
    assert parcels(url) == ["m-1", "m-2"]
    assert receipts(url) == {"m-1": ("done", 0), "m-2": ("done", 0)}


@pytest.mark.parametrize("kind", KINDS)
def test_failures_are_counted_and_the_last_one_parks(kind: str, url: str) -> None:
    """A failed try leaves nothing but its count. The last one parks the message, and no delivery runs it any more."""
    with consumer(kind, url, max_attempts=3) as billing:
        billing.then = fail
        for tries in (1, 2):
            with pytest.raises(Boom):
                billing.receive("m-1")
            assert receipts(url) == {"m-1": ("failing", tries)}
        assert billing.receive("m-1") == Parked(3, "Boom: no stock left")
        assert receipts(url) == {"m-1": ("parked", 3)}
        billing.then = lambda: None
        assert billing.receive("m-1") == Parked(3, "Boom: no stock left")
        assert billing.runs == 3
    assert parcels(url) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_message_succeeds_later(kind: str, url: str) -> None:
    """A message that failed is handled by a later delivery, once; how often it had failed stays on record."""
    with consumer(kind, url) as billing:
        billing.then = fail
        with pytest.raises(Boom):
            billing.receive("m-1", b"1")
        billing.then = lambda: None
        assert billing.receive("m-1", b"1") == Ran("shipped m-1")
        assert billing.receive("m-1", b"1") == Duplicate()
    assert parcels(url) == ["m-1"]
    assert receipts(url) == {"m-1": ("done", 1)}
    assert execute(url, "SELECT error FROM semel_inbox") == [(None,)]


@pytest.mark.parametrize("kind", KINDS)
def test_another_payload_is_refused(kind: str, url: str) -> None:
    """Another payload under the same id is refused, whatever became of the first, and nothing is run or changed."""
    with consumer(kind, url) as billing:
        billing.receive("m-1", b"one")
        billing.then = fail
        with pytest.raises(Boom):
            billing.receive("m-2", b"one")
        before, runs = receipts(url), billing.runs
        for message in ("m-1", "m-2"):
            with pytest.raises(MessageDiffers):
                billing.receive(message, b"other")
        assert (receipts(url), billing.runs) == (before, runs)


def test_another_payload_is_shown(sqlite_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the message, the consumer, and the digests of both payloads."""
    with Inbox(sqlite_url, consumer="billing") as inbox:
        inbox.receive("m-1", lambda _: None, payload=b"one")
        with pytest.raises(MessageDiffers) as refused:
            inbox.receive("m-1", lambda _: None, payload=b"other")
    (record,) = caplog.records
    assert record.getMessage().startswith("MessageReused: ")
    assert all(each in record.getMessage() for each in ("m-1", "billing", refused.value.stored, refused.value.received))


def test_arguments_are_compared(sqlite_url: str) -> None:
    """What the handler is called with is the payload, if none is given and it is data; None compares nothing."""
    with Inbox(sqlite_url, consumer="billing") as inbox:
        inbox.receive("m-1", lambda _, order: order, {"order": 17})
        assert inbox.receive("m-1", lambda _, order: order, {"order": 17}) == Duplicate()
        with pytest.raises(MessageDiffers):
            inbox.receive("m-1", lambda _, order: order, {"order": 18})
        assert inbox.receive("m-1", lambda _, order: order, {"order": 18}, payload=None) == Duplicate()


@pytest.mark.parametrize("payload", [b'{"order": 17}', '{"order": 17}', {"order": 17}])
def test_one_argument_is_the_payload(sqlite_url: str, payload: object) -> None:
    """A message is the same whether its payload is what the handler is called with, or is given, or both."""
    with Inbox(sqlite_url, consumer="billing") as inbox:
        inbox.receive("m-1", lambda _, content: content, payload)
        assert inbox.receive("m-1", lambda _: None, payload=payload) == Duplicate()
        received = inbox.handler(id=lambda _: "m-1", payload=lambda content: content)(lambda _, content: content)
        assert received(payload) == Duplicate()


@pytest.mark.parametrize("kind", USUAL)
def test_consumers_are_independent(kind: str, url: str) -> None:
    """Two consumers of one message both handle it, also at the same time, and one's failure is not the other's."""
    with consumer(kind, url) as billing, consumer(kind, url, consumer="shipping", max_attempts=1) as shipping:
        shipping.then = fail
        both = billing.start("m-1", b"1"), shipping.start("m-1", b"2")
        assert [each.result(HANG_SECONDS) for each in both] == [Ran("shipped m-1"), Parked(1, "Boom: no stock left")]
        assert billing.receive("m-1", b"1") == Duplicate()
    assert receipts(url) == {"m-1": ("done", 0)}
    assert receipts(url, "shipping") == {"m-1": ("parked", 1)}


@pytest.mark.parametrize("kind", [*USUAL, "session psycopg", "async engine asyncpg"])
def test_a_thousand_redeliveries(kind: str, url: str) -> None:
    """Twenty messages, delivered a thousand times by two consumers with threads or tasks: twenty parcels."""
    with consumer(kind, url) as one, consumer(kind, url) as other:
        started = [(one, other)[number % 2].start(f"m-{number % MESSAGES}", b"1") for number in range(REDELIVERIES)]
        wait(started, timeout=HANG_SECONDS)
        verdicts = [each.result(0) for each in started]
        while busy := [number for number, each in enumerate(verdicts) if each == Busy()]:
            for number in busy:
                verdicts[number] = one.receive(f"m-{number % MESSAGES}", b"1")
    assert parcels(url) == sorted(f"m-{number}" for number in range(MESSAGES))
    assert sum(isinstance(each, Ran) for each in verdicts) == MESSAGES
    assert sum(each == Duplicate() for each in verdicts) == REDELIVERIES - MESSAGES


@pytest.mark.parametrize("kind", POSTGRES_KINDS)
def test_busy(kind: str, url: str) -> None:
    """While one delivery is being handled, another of the same message is told so at once, and has to come again."""
    running, may_end = threading.Event(), threading.Event()
    with consumer(kind, url) as one, consumer(kind, url) as other:
        one.then = partial(hold_up, running, may_end)
        first = one.start("m-1")
        assert running.wait(HANG_SECONDS)
        assert other.receive("m-1") == Busy()
        assert other.receive("m-2") == Ran("shipped m-2")
        may_end.set()
        assert first.result(HANG_SECONDS) == Ran("shipped m-1")
        assert other.receive("m-1") == Duplicate()


@pytest.mark.parametrize("kind", ["sqlite", "async sqlite"])
def test_on_sqlite_the_second_waits(kind: str, url: str) -> None:
    """A file has one writer: the second delivery waits for the first to end, and is a duplicate then."""
    running, may_end = threading.Event(), threading.Event()
    with consumer(kind, url) as one:
        one.then = partial(hold_up, running, may_end)
        first = one.start("m-1")
        assert running.wait(HANG_SECONDS)
        second = one.start("m-1")
        may_end.set()
        assert first.result(HANG_SECONDS) == Ran("shipped m-1")
        assert second.result(HANG_SECONDS) == Duplicate()


#: Stands before the server's own function, and waits there until a test opens the gate: the snapshot is older then.
GATE = """
CREATE SCHEMA gates;
CREATE FUNCTION gates.pg_try_advisory_xact_lock(number bigint) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1);
    RETURN pg_catalog.pg_try_advisory_xact_lock(number);
END $$;
"""


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize("kind", GIVEN_KINDS)
def test_a_rival_after_the_snapshot(kind: str, url: str, level: str) -> None:
    """A rival commits after the snapshot and before the lock is taken, in any isolation: one parcel, a duplicate."""
    name = execute(url, "SELECT current_database()")[0][0]
    with consumer("psycopg", url) as rival:
        assert rival.receive("m-0") == Ran("shipped m-0")
        execute(url, f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level}'")
        execute(url, GATE)
        execute(url, f'ALTER DATABASE "{name}" SET search_path = gates, pg_catalog, public')
        with consumer(kind, url) as late, psycopg.connect(url, autocommit=True) as gate:
            gate.execute("SELECT pg_advisory_lock(1)")
            second = late.start("m-1")
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1 AND NOT granted"
            pause = threading.Event()
            while execute(url, waiting)[0][0] == 0:
                pause.wait(0.01)
            # Its connection is older than the gate.
            assert rival.receive("m-1") == Ran("shipped m-1")
            gate.execute("SELECT pg_advisory_unlock(1)")
            assert second.result(HANG_SECONDS) == Duplicate()
            assert late.receive("m-2") == Ran("shipped m-2")
    assert parcels(url) == ["m-0", "m-1", "m-2"]


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_a_redelivery_writes_nothing(kind: str, url: str) -> None:
    """A duplicate takes no transaction number: no row version, nothing in the write-ahead log."""
    with consumer(kind, url) as billing:
        billing.receive("m-1")
        seen = "SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_all_tables WHERE relname = 'semel_inbox'"
        row = execute(url, "SELECT xmin::text, xmax::text, ctid::text FROM semel_inbox")
        number = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        before = execute(url, number)[0][0]
        assert [billing.receive("m-1") for _ in range(50)] == [Duplicate()] * 50
        # The server's own upkeep takes a few of them.
        assert execute(url, number)[0][0] - before < 50
        assert execute(url, "SELECT xmin::text, xmax::text, ctid::text FROM semel_inbox") == row
        assert execute(url, seen)[0][0] is not None


@pytest.mark.parametrize("kind", USUAL)
def test_what_is_not_counted(kind: str, url: str) -> None:
    """NoEffect says that the handler could not begin: it is raised, and spends none of the message's tries."""

    def not_now() -> None:
        raise NoEffect

    with consumer(kind, url, max_attempts=1) as billing:
        billing.then = not_now
        for _ in range(3):
            with pytest.raises(NoEffect):
                billing.receive("m-1")
        assert receipts(url) == {}
        billing.then = lambda: None
        assert billing.receive("m-1") == Ran("shipped m-1")


@pytest.mark.parametrize("kind", POSTGRES_KINDS)
def test_a_conflict_is_not_counted(kind: str, url: str) -> None:
    """A serialization failure in the handler is another transaction's doing: raised, and not counted."""
    execute(url, "CREATE FUNCTION clash() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '40001'; END $$")
    execute(url, "CREATE TRIGGER clash BEFORE INSERT ON parcels EXECUTE FUNCTION clash()")
    with consumer(kind, url, max_attempts=1) as billing:
        with pytest.raises(Exception, match=r"."):
            billing.receive("m-1")
        assert receipts(url) == {}
        execute(url, "DROP TRIGGER clash ON parcels")
        assert billing.receive("m-1") == Ran("shipped m-1")


@pytest.mark.parametrize("kind", POSTGRES_KINDS)
def test_a_constraint_at_commit_is_a_failure(kind: str, url: str) -> None:
    """A constraint of the application's that is checked at COMMIT fails the try, as an error in the handler does."""
    execute(url, "ALTER TABLE parcels ADD CONSTRAINT one UNIQUE (message) DEFERRABLE INITIALLY DEFERRED")
    execute(url, "INSERT INTO parcels VALUES ('m-1')")
    with consumer(kind, url) as billing:
        with pytest.raises(Exception, match="one"):
            billing.receive("m-1")
        assert receipts(url) == {"m-1": ("failing", 1)}
    assert parcels(url) == ["m-1"]


@pytest.mark.parametrize("kind", USUAL)
def test_no_table(kind: str, url: str) -> None:
    """Without its table nothing is run, and the error says which command to run; also when an inbox is opened."""
    execute(url, "DROP TABLE semel_inbox")
    with pytest.raises(StoreNotReady, match="semel migrate"), Inbox(url, consumer="billing"):
        pass
    with consumer(kind, url) as billing:
        with pytest.raises(StoreNotReady, match="semel migrate"):
            billing.receive("m-1")
        assert billing.runs == 0


@pytest.mark.parametrize("kind", POSTGRES_KINDS)
def test_a_read_only_database(kind: str, url: str) -> None:
    """Where nothing can be written nothing is run, and no verdict allows an ack; a duplicate is known all the same."""
    with consumer(kind, url) as before:
        assert before.receive("m-1") == Ran("shipped m-1")
    name = execute(url, "SELECT current_database()")[0][0]
    execute(url, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with consumer(kind, url) as billing:
        with pytest.raises(StoreReadOnly):
            billing.receive("m-2")
        assert billing.receive("m-1") == Duplicate()
        assert billing.runs == 0


#: What a handler may say, after which its receipt can't be written.
LEFT_BEHIND = (
    "SET LOCAL ROLE pg_monitor",
    "SET LOCAL search_path TO pg_catalog",
    "SET TRANSACTION READ ONLY",
)


@pytest.mark.parametrize("sql", LEFT_BEHIND)
@pytest.mark.parametrize("kind", ["psycopg", "asyncpg", "async engine asyncpg"])
def test_a_handler_that_leaves_its_role(kind: str, sql: str, url: str) -> None:
    """A handler after which the receipt can't be written, as with ``SET LOCAL ROLE``, has failed: that is counted, and
    in the end the message is parked. The next one is handled.
    """
    with consumer(kind, url, max_attempts=2) as billing:
        write = billing._write

        def leave(connection: Any, _message: str) -> Any:
            return connection.execute(text(sql) if type(connection).__module__.startswith("sqlalchemy") else sql)

        billing._write = leave  # type: ignore[assignment, method-assign]
        with pytest.raises(StoreRefused, match="the handler has to set back what it SETs"):
            billing.receive("m-1")
        assert receipts(url) == {"m-1": ("failing", 1)}
        assert isinstance(billing.receive("m-1"), Parked)
        billing._write = write  # type: ignore[method-assign]
        assert billing.receive("m-2") == Ran("shipped m-2")


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg", "engine psycopg", "async engine asyncpg"])
def test_a_role_without_privileges(kind: str, url: str) -> None:
    """A role that may not write receipts is refused before the handler runs, with what it needs."""
    execute(url, "DROP ROLE IF EXISTS reader_of_messages")
    execute(url, "CREATE ROLE reader_of_messages")
    execute(url, "GRANT ALL ON ALL TABLES IN SCHEMA public TO reader_of_messages")
    execute(url, "REVOKE INSERT, UPDATE ON semel_inbox FROM reader_of_messages")
    try:
        name = execute(url, "SELECT current_database()")[0][0]
        execute(url, f'ALTER DATABASE "{name}" SET role = reader_of_messages')
        with consumer(kind, url) as billing:
            with pytest.raises(StoreNotReady, match="needs SELECT, INSERT and UPDATE on semel_inbox"):
                billing.receive("m-1")
            assert billing.runs == 0
    finally:
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("SET ROLE NONE")
            admin.execute("DROP OWNED BY reader_of_messages")
            admin.execute(f'ALTER DATABASE "{admin.info.dbname}" RESET role'.encode())
            admin.execute("DROP ROLE reader_of_messages")


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg", "engine psycopg", "async engine asyncpg"])
def test_an_unreachable_database(kind: str, tmp_path: Path) -> None:
    """A database that can't be reached is an error, and no verdict."""
    with consumer(kind, "postgresql://u@127.0.0.1:1/none") as billing:
        with pytest.raises(StoreUnavailable):
            billing.receive("m-1")
        assert billing.runs == 0


@pytest.mark.parametrize("kind", ["sqlite", "async sqlite"])
def test_a_handler_that_ends_its_transaction(kind: str, url: str) -> None:
    """A handler must not commit by itself: its writes would be there without the receipt."""
    with consumer(kind, url) as billing:
        billing.receive("m-0")

        def commits(connection: sqlite3.Connection, _message: str) -> None:
            connection.execute("COMMIT")

        billing._ship = billing._ship_async = commits  # type: ignore[assignment, method-assign]
        with pytest.raises(ConfigurationError, match=r"ended|Don't COMMIT"):
            billing.receive("m-1")


def test_a_connection_begun_anew_in_the_handler(postgres_url: str) -> None:
    """A handler that commits and begins another transaction on PostgreSQL is found out, too."""

    def cheats(connection: "psycopg.Connection[object]") -> None:
        connection.execute("COMMIT")
        connection.execute("BEGIN")

    with Inbox(postgres_url, consumer="billing") as inbox, pytest.raises(ConfigurationError, match="Don't COMMIT"):
        inbox.receive("m-1", cheats)


@pytest.mark.parametrize("kind", ["asyncpg", "async sqlite", "async engine asyncpg", "async session sqlite"])
def test_cancelled(kind: str, url: str) -> None:
    """A consumer that is cancelled in its handler leaves nothing, counts nothing, and its connection is in order."""
    running, may_end = threading.Event(), threading.Event()
    with consumer(kind, url) as billing:
        billing.then = partial(hold_up, running, may_end)
        first = billing.start("m-1")
        assert running.wait(HANG_SECONDS)
        first.cancel()
        may_end.set()
        billing.then = lambda: None
        while (verdict := billing.receive("m-1")) == Busy():  # The cancellation is under way.
            pass
        assert verdict == Ran("shipped m-1")
        assert billing.runs == 2
    assert parcels(url) == ["m-1"]
    assert receipts(url) == {"m-1": ("done", 0)}


@pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
def test_through_pgbouncer(kind: str, url: str, pgbouncer_url: str) -> None:
    """In transaction mode, too: the lock ends with the transaction."""
    with consumer(kind, pgbouncer_url, max_attempts=2) as billing:
        assert billing.receive("m-1") == Ran("shipped m-1")
        assert billing.receive("m-1") == Duplicate()
        billing.then = fail
        with pytest.raises(Boom):
            billing.receive("m-2")
        assert billing.receive("m-2") == Parked(2, "Boom: no stock left")
    assert parcels(url) == ["m-1"]


def test_the_decorator(sqlite_url: str) -> None:
    """A function of a connection and a message becomes one of a message, which returns the verdict."""
    with Inbox(sqlite_url, consumer="billing") as inbox:

        @inbox.handler(id=lambda message: message["id"], payload=lambda message: message)
        def pay(connection: object, message: dict[str, object]) -> object:
            """Pay."""
            assert connection is not None
            return message["sum"]

        assert pay({"id": "m-1", "sum": 5}) == Ran(5)
        assert pay({"sum": 5, "id": "m-1"}) == Duplicate()
        with pytest.raises(MessageDiffers):
            pay({"id": "m-1", "sum": 6})
        assert (pay.__name__, pay.__doc__) == ("pay", "Pay.")


async def test_the_async_decorator(sqlite_url: str) -> None:
    """The same on an event loop; a plain function runs in a thread."""
    here = threading.get_ident()
    async with AsyncInbox(sqlite_url, consumer="billing") as inbox:

        @inbox.handler(id=lambda message: message["id"])
        async def pay(connection: object, message: dict[str, object]) -> object:
            return message["sum"]

        @inbox.handler(id=lambda message: message["id"])
        def plain(connection: object, message: dict[str, object]) -> object:
            assert threading.get_ident() != here
            return message["sum"]

        assert await pay({"id": "m-1", "sum": 5}) == Ran(5)
        assert await pay({"id": "m-1", "sum": 5}) == Duplicate()
        assert await plain({"id": "m-2", "sum": 7}) == Ran(7)


def test_settings_are_checked(sqlite_url: str) -> None:
    """What can't be is refused when the inbox is made, with the reason."""
    with pytest.raises(TypeError, match="consumer"):
        Inbox(sqlite_url)  # type: ignore[call-arg]
    for bad in ("", "a\nb", None):
        with pytest.raises(ConfigurationError, match="consumer"):
            Inbox(sqlite_url, consumer=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_attempts"):
        Inbox(sqlite_url, consumer="billing", max_attempts=0)
    with pytest.raises(ConfigurationError, match="retention"):
        Inbox(sqlite_url, consumer="billing", retention=14)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="AsyncInbox"):
        Inbox(async_store(sqlite_url), consumer="billing")
    with pytest.raises(ConfigurationError, match="would block"):
        AsyncInbox(store(sqlite_url), consumer="billing")


@pytest.mark.parametrize("given", ["memory://", "redis://localhost:1/0"])
@pytest.mark.parametrize("make", [Inbox, AsyncInbox])
def test_no_inbox_without_transactions(make: type[Inbox] | type[AsyncInbox], given: str) -> None:
    """Redis and memory have no transaction to join, and the error says why that is the point."""
    with pytest.raises(ConfigurationError, match=r"no transaction to join.*one commit"):
        make(given, consumer="billing")


def test_a_tiered_store(sqlite_url: str) -> None:
    """Behind a cache the durable store has the inbox."""
    with Inbox(Tiered(durable=sqlite_url), consumer="billing") as inbox:
        assert inbox.receive("m-1", lambda _: 1) == Ran(1)
        assert inbox.receive("m-1", lambda _: 1) == Duplicate()


def test_a_named_table(postgres_url: str) -> None:
    """The inbox of another table name, in another schema, is another inbox."""
    execute(postgres_url, "CREATE SCHEMA shop")
    named = f"{postgres_url}{'&' if '?' in postgres_url else '?'}table=shop_keys&schema=shop"
    with closing(store(named)) as opened:
        opened.migrate()
    with Inbox(named, consumer="billing") as inbox, Inbox(postgres_url, consumer="billing") as usual:
        assert inbox.receive("m-1", lambda _: 1) == Ran(1)
        assert usual.receive("m-1", lambda _: 2) == Ran(2)
        assert inbox.receive("m-1", lambda _: 1) == Duplicate()
    assert execute(postgres_url, "SELECT count(*) FROM shop.shop_keys_inbox") == [(1,)]


def test_a_wrong_handler_is_refused(sqlite_url: str) -> None:
    """A handler that can't be called, or not awaited here, is an error before anything is begun: no try is counted."""

    async def unawaited(_connection: object) -> None: ...

    with Inbox(sqlite_url, consumer="billing") as inbox:
        with pytest.raises(ConfigurationError, match="can't be called"):
            inbox.receive("m-1", lambda _connection, _one: None)
        with pytest.raises(ConfigurationError, match="AsyncInbox"):
            inbox.receive("m-1", unawaited)
        with pytest.raises(MessageUnidentified):
            inbox.receive("", lambda _: None)
    assert receipts(sqlite_url) == {}


async def test_a_plain_handler_with_an_awaited_connection(postgres_url: str) -> None:
    """A plain function can't use asyncpg's connection: an error that is not counted as a try."""
    async with AsyncInbox(postgres_url, consumer="billing", max_attempts=1) as inbox:
        with pytest.raises(ConfigurationError, match="async def"):
            await inbox.receive("m-1", lambda connection: connection.execute("SELECT 1"))
    assert receipts(postgres_url) == {}


def test_a_handler_that_returns_a_coroutine(sqlite_url: str) -> None:
    """What was never awaited has done nothing: no receipt says that it was handled."""

    async def pay(_connection: object) -> None: ...

    with Inbox(sqlite_url, consumer="billing") as inbox, pytest.raises(ConfigurationError, match="coroutine"):
        inbox.receive("m-1", lambda connection: pay(connection))  # noqa: PLW0108 - it is not `async def`
    assert receipts(sqlite_url) == {}


@pytest.mark.parametrize("kind", USUAL)
def test_a_handler_that_is_a_generator(kind: str, url: str) -> None:
    """A function with `yield` in it does nothing when it is called: an error, and no receipt."""

    def plain(connection: object, message: str) -> Iterator[None]:
        yield

    async def waiting(connection: object, message: str) -> AsyncIterator[None]:
        yield

    with consumer(kind, url) as billing:
        billing._ship, billing._ship_async = plain, waiting  # type: ignore[assignment, method-assign]
        with pytest.raises(ConfigurationError, match=r"yield|async def"):
            billing.receive("m-1")
    assert receipts(url) == {}


@pytest.mark.parametrize("kind", USUAL)
def test_an_error_without_words(kind: str, url: str) -> None:
    """An error that can't even say what it is about is counted as any other, so that its message is parked."""

    class Speechless(Exception):
        def __str__(self) -> str:
            raise AttributeError("response")

    def fail_speechless() -> None:
        raise Speechless

    with consumer(kind, url, max_attempts=2) as billing:
        billing.then = fail_speechless
        with pytest.raises(Speechless):
            billing.receive("m-1")
        assert billing.receive("m-1") == Parked(2, "Speechless")


async def test_something_else_was_cancelled(sqlite_url: str) -> None:
    """A handler that waited for what another has cancelled was not cancelled itself: its try has failed."""

    async def wait(_connection: object) -> None:
        other = asyncio.ensure_future(asyncio.sleep(HANG_SECONDS))
        other.cancel()
        await other

    async with AsyncInbox(sqlite_url, consumer="billing", max_attempts=2) as inbox:
        with pytest.raises(RuntimeError, match="waited for was cancelled"):
            await inbox.receive("m-1", wait)
        assert await inbox.receive("m-1", wait) == Parked(2, "RuntimeError: What the handler waited for was cancelled.")

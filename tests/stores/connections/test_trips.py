"""What a transaction of the store's costs in round trips, and that what is sent together stands or falls together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import psycopg_pool
import pytest

from semel.core.commands import Begin, Claim, Commit, Complete, Finish, Look, Open, Settle, Undo, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.errors import CommitUnknown, ConfigurationError, StoreReadOnly
from semel.stores import async_store, store
from semel.stores.base import Store
from semel.stores.connections.pool import AllInUse, AsyncPool, Pool
from semel.stores.connections.script import MAX_SCRIPT_BYTES, literal
from semel.stores.transaction import at_once
from tests.stores.connections.lending import do, rows, until
from torture.proxy import Cut, Lost, Proxy, is_commit

ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')
PROGRESS = Progress((Done("phase", "ride_created", {"id": 7}),))
SLOW_COMMIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON rides DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait();
"""
WAITS_FOR = "SELECT wait_event = '{}' FROM pg_stat_activity WHERE datname = current_database()"


class Shop:
    """A store, in either colour, whose handlers write rides."""

    def __init__(self, made: Any) -> None:
        self.store = made

    async def do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(self.store, Store):
            return await asyncio.to_thread(call, *arguments)
        return await call(*arguments)

    async def perform(self, command: Any) -> Any:
        return await self.do(self.store.perform, command)

    async def begun(self, claim: Claim) -> tuple[Any, Any]:
        transaction = self.store.transaction()
        return transaction, await self.do(transaction.perform, Begin(claim))

    async def ride(self, transaction: Any, number: int = 1) -> None:
        await self.do(transaction.connection.execute, f"INSERT INTO rides VALUES ({number})")

    async def finished(self, transaction: Any, claim: Claim, hold: Hold, answer: Answer = ANSWER) -> Verdict:
        finish = Finish(claim, hold, None, Event.COMPLETE, answer)
        verdict: Verdict = await self.do(transaction.perform, finish)
        return verdict

    async def paid(self, key: str, number: int) -> None:
        """Do all of it."""
        claim = claim_of(key)
        transaction, hold = await self.begun(claim)
        await self.ride(transaction, number)
        assert await self.finished(transaction, claim, hold) is Verdict.DONE


@asynccontextmanager
async def own(url: str, make: Any = store) -> AsyncIterator[Shop]:
    shop = Shop(make(url + "?pool=1"))
    yield shop
    await shop.do(shop.store.close)


@asynccontextmanager
async def own_async(url: str) -> AsyncIterator[Shop]:
    async with own(url, async_store) as shop:
        yield shop


@asynccontextmanager
async def psycopg_pool_given(url: str) -> AsyncIterator[Shop]:
    kwargs = {"autocommit": True, "prepare_threshold": None}
    with psycopg_pool.ConnectionPool(url, kwargs=kwargs, min_size=0, max_size=1, open=True) as pool:
        shop = Shop(store(pool))
        yield shop
        await shop.do(shop.store.close)


@asynccontextmanager
async def async_psycopg_pool_given(url: str) -> AsyncIterator[Shop]:
    kwargs = {"autocommit": True, "prepare_threshold": None}
    async with psycopg_pool.AsyncConnectionPool(url, kwargs=kwargs, min_size=0, max_size=1, open=False) as pool:
        shop = Shop(async_store(pool))
        yield shop
        await shop.do(shop.store.close)


@asynccontextmanager
async def asyncpg_pool_given(url: str) -> AsyncIterator[Shop]:
    async with asyncpg.create_pool(url, min_size=0, max_size=1) as pool:
        shop = Shop(async_store(pool))
        yield shop
        await shop.do(shop.store.close)


KINDS: dict[str, Callable[[str], AbstractAsyncContextManager[Shop]]] = {
    "psycopg": own,
    "asyncpg": own_async,
    "psycopg pool": psycopg_pool_given,
    "psycopg async pool": async_psycopg_pool_given,
    "asyncpg pool": asyncpg_pool_given,
}

#: How a handler begins another transaction. psycopg prepares what is sent on our own connections, one statement a time.
ANOTHER = {kind: ("ROLLBACK", "BEGIN") if kind == "psycopg" else ("ROLLBACK; BEGIN",) for kind in KINDS}

every_kind = pytest.mark.parametrize("kind", KINDS)


def claim_of(key: str = "k") -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", timedelta(seconds=60), timedelta(hours=1))


@pytest.fixture
async def url(postgres_url: str) -> str:
    await asyncio.to_thread(store(postgres_url).migrate)
    await do(postgres_url, "CREATE TABLE rides (id integer PRIMARY KEY)")
    return postgres_url


async def written(url: str) -> tuple[list[int], list[str]]:
    return await rows(url, "SELECT id FROM rides ORDER BY id"), await rows(
        url, "SELECT key FROM semel_keys ORDER BY key"
    )


class Wire:
    """What goes over connections that handlers write on, and what is cut."""

    def __init__(self, cut: Cut | None = None) -> None:
        self.sent: list[str] = []
        self.lost: list[Lost] = []
        self._cut = cut

    def choose(self, sql: str, _marks: tuple[str, ...]) -> Cut | None:
        self.sent.append(sql)
        return self._cut if is_commit(sql) and not self.lost else None

    def tell(self, lost: Lost) -> None:
        self.lost.append(lost)


@pytest.fixture
def wire(url: str) -> Iterator[tuple[Wire, str]]:
    heard = Wire()
    with Proxy(url, heard.choose, heard.tell) as proxy:
        yield heard, proxy.address(url)


class TestTrips:
    @every_kind
    async def test_atomic(self, kind: str, wire: tuple[Wire, str]) -> None:
        """Around what the handler sends there is one round trip before it and one after it, as around any transaction:
        BEGIN has the locks and the look with it, and COMMIT the record.
        """
        heard, address = wire
        async with KINDS[kind](address) as shop:
            await shop.paid("warm", 1)
            heard.sent.clear()
            await shop.paid("k", 2)
            ours = [sql for sql in heard.sent if "pg_advisory_unlock_all" not in sql]  # asyncpg's pool resets by that
            assert len(ours) == 3
            assert "BEGIN" in ours[0]
            assert ours[1] == "INSERT INTO rides VALUES (2)"
            assert is_commit(ours[2])

    @every_kind
    async def test_phase(self, kind: str, wire: tuple[Wire, str]) -> None:
        """A phase takes no more round trips than its own transaction would."""
        heard, address = wire
        async with KINDS[kind](address) as shop:
            hold = await shop.perform(claim_of())
            for number, before in ((1, Progress()), (2, PROGRESS)):
                heard.sent.clear()
                transaction = shop.store.transaction()
                await shop.do(transaction.perform, Open())
                await shop.ride(transaction, number)
                progress = Progress((*PROGRESS.steps, *PROGRESS.steps)[:number])
                assert await shop.do(transaction.perform, Commit(hold, progress, before)) is Verdict.DONE
            assert len([sql for sql in heard.sent if "pg_advisory_unlock_all" not in sql]) == 3


class TestTogether:
    @every_kind
    async def test_fenced(self, kind: str, url: str) -> None:
        """A record that came up while the handler ran undoes what it wrote; the connection is good for the next."""
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.ride(transaction)
            assert isinstance(await shop.perform(claim_of()), Hold)
            assert await shop.finished(transaction, claim, hold) is Verdict.FENCED
            assert await written(url) == ([], ["k"])
            await shop.paid("next", 2)
            assert await written(url) == ([2], ["k", "next"])

    @every_kind
    async def test_fenced_phase(self, kind: str, url: str) -> None:
        """A phase whose hold is lost writes nothing."""
        async with KINDS[kind](url) as shop:
            hold = await shop.perform(claim_of())
            strange = Hold(hold.scope, hold.key, 2, hold.token)
            transaction = shop.store.transaction()
            await shop.do(transaction.perform, Open())
            await shop.ride(transaction)
            assert await shop.do(transaction.perform, Commit(strange, PROGRESS)) is Verdict.FENCED
            assert await rows(url, "SELECT id FROM rides") == []
            record = await shop.perform(Look("alice", "k"))
            assert record.steps is None

    @every_kind
    async def test_stale_record(self, kind: str, url: str) -> None:
        """A record that a dead worker left is ended in its place; one that has changed since is left alone."""
        async with KINDS[kind](url) as shop:
            left = await shop.perform(claim_of())
            for is_fenced in (True, False):
                await do(url, "UPDATE semel_keys SET lease_expires_at = clock_timestamp() - interval '1 hour'")
                claim = claim_of()
                transaction, seen = await shop.begun(claim)
                assert isinstance(seen, Found)
                assert seen.may_be_taken
                await shop.ride(transaction)
                if is_fenced:
                    await do(url, "UPDATE semel_keys SET lease_expires_at = clock_timestamp() + interval '1 hour'")
                heir = Hold("alice", "k", 2, claim.token)
                finish = Finish(claim, heir, left, Event.COMPLETE, ANSWER)
                verdict = await shop.do(transaction.perform, finish)
                assert verdict is (Verdict.FENCED if is_fenced else Verdict.DONE)
            assert await written(url) == ([1], ["k"])
            assert await rows(url, "SELECT event FROM semel_audit WHERE event = 'taken over'") == ["taken over"]

    @every_kind
    @pytest.mark.parametrize("body", [b"{}", b"x" * MAX_SCRIPT_BYTES], ids=["short", "long"])
    async def test_another_transaction(self, kind: str, body: bytes, url: str) -> None:
        """A handler that ends the transaction and begins another in the same breath is found out: the record is not
        committed without what was written before.
        """
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.ride(transaction)
            for sql in ANOTHER[kind]:
                await shop.do(transaction.connection.execute, sql)
            with pytest.raises(ConfigurationError, match="ended inside the handler"):
                await shop.finished(transaction, claim, hold, Answer(201, (), body))
            assert await written(url) == ([], [])
            await shop.paid("next", 2)

    @every_kind
    async def test_another_transaction_in_a_phase(self, kind: str, url: str) -> None:
        """The same in a phase."""
        async with KINDS[kind](url) as shop:
            hold = await shop.perform(claim_of())
            transaction = shop.store.transaction()
            await shop.do(transaction.perform, Open())
            await shop.ride(transaction)
            for sql in ANOTHER[kind]:
                await shop.do(transaction.connection.execute, sql)
            with pytest.raises(ConfigurationError, match="ended inside the handler"):
                await shop.do(transaction.perform, Commit(hold, PROGRESS))
            record = await shop.perform(Look("alice", "k"))
            assert record.steps is None

    @every_kind
    async def test_reset_inside(self, kind: str, url: str) -> None:
        """A handler may reset what is set in its session."""
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.ride(transaction)
            await shop.do(transaction.connection.execute, "RESET ALL")
            assert await shop.finished(transaction, claim, hold) is Verdict.DONE
            assert await written(url) == ([1], ["k"])

    @every_kind
    async def test_deferred_constraint(self, kind: str, url: str) -> None:
        """What a constraint refuses at COMMIT is the application's own error, though our record came with it."""
        await do(url, "ALTER TABLE rides ADD COLUMN owner integer REFERENCES rides DEFERRABLE INITIALLY DEFERRED")
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.do(transaction.connection.execute, "INSERT INTO rides VALUES (1, 2)")
            with pytest.raises((psycopg.errors.ForeignKeyViolation, asyncpg.ForeignKeyViolationError)):
                await shop.finished(transaction, claim, hold)
            assert await written(url) == ([], [])
            await shop.paid("next", 2)

    @every_kind
    async def test_duplicate_of_the_applications_own(self, kind: str, url: str) -> None:
        """A unique constraint of the application's that is deferred to COMMIT is not taken for a fence."""
        await do(
            url, "CREATE TABLE seats (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO seats VALUES (1)"
        )
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.do(transaction.connection.execute, "INSERT INTO seats VALUES (1)")
            with pytest.raises((psycopg.errors.UniqueViolation, asyncpg.UniqueViolationError)):
                await shop.finished(transaction, claim, hold)
            assert await written(url) == ([], [])

    @every_kind
    async def test_busy_and_answered(self, kind: str, url: str) -> None:
        """A rival learns that the key is in use; a finished record is its answer, whatever transaction has the lock."""
        async with KINDS[kind](url) as shop, own(url) as other:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            rival, seen = await other.begun(claim_of())
            assert isinstance(seen, Found)
            assert (seen.state, seen.lease_is_over) == (State.PROCESSING, False)
            await other.do(rival.perform, Undo())
            await shop.finished(transaction, claim, hold)
            first, answered = await shop.begun(claim_of())
            second, also = await other.begun(claim_of())
            await shop.do(first.perform, Undo())
            await other.do(second.perform, Undo())
            assert answered.answer == also.answer == ANSWER

    @every_kind
    @pytest.mark.parametrize("body", [b"", bytes(range(256)), b"x" * MAX_SCRIPT_BYTES], ids=["none", "odd", "large"])
    async def test_bodies(self, kind: str, body: bytes, url: str) -> None:
        """Whatever an answer consists of, it comes back as it was: large ones, which go by themselves, too."""
        answer = Answer(200, ((b"x-note", b"it's \xe9 \\ 100 %(s)s ; --"),), body)
        key = "it's \N{SNOWMAN} \\ 100 %(s)s ; --"
        async with KINDS[kind](url) as shop:
            claim = claim_of(key)
            transaction, hold = await shop.begun(claim)
            assert await shop.finished(transaction, claim, hold, answer) is Verdict.DONE
            record = await shop.perform(Look("alice", key))
            assert record.answer == answer


class TestLost:
    @every_kind
    @pytest.mark.parametrize("cut", list(Cut))
    async def test_reply_to_commit(self, kind: str, cut: Cut, url: str) -> None:
        """A COMMIT whose reply is lost, with the record that was sent with it, is unknown, and the server's word on
        another connection settles it.
        """
        heard = Wire(cut)
        with Proxy(url, heard.choose, heard.tell) as proxy:
            async with KINDS[kind](proxy.address(url)) as shop:
                claim = claim_of()
                transaction, hold = await shop.begun(claim)
                await shop.ride(transaction)
                with pytest.raises(CommitUnknown):
                    await shop.finished(transaction, claim, hold)
                await shop.do(transaction.perform, Undo())
                record = await shop.perform(Settle(hold))
                while cut is Cut.LATE and record is None:  # it arrives after a while
                    record = await shop.perform(Settle(hold))
                assert (record is None) == (cut is Cut.BEFORE)
                assert await written(url) == (([], []) if cut is Cut.BEFORE else ([1], ["k"]))
                await shop.paid("next", 2)

    @pytest.mark.parametrize("kind", [each for each in KINDS if "async" in each])
    async def test_cancelled_in_commit(self, kind: str, url: str) -> None:
        """A task that is cancelled while the record is committed leaves no connection on which a reply is to come."""
        await do(url, SLOW_COMMIT)
        async with KINDS[kind](url) as shop:
            claim = claim_of()
            transaction, hold = await shop.begun(claim)
            await shop.ride(transaction)
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as rival:
                await rival.execute("SELECT pg_advisory_lock(1)")
                finishing = asyncio.create_task(shop.finished(transaction, claim, hold))
                await until(url, WAITS_FOR.format("advisory"))
                finishing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await finishing
            record = await shop.perform(Settle(hold))
            assert await written(url) == (([], []) if record is None else ([1], ["k"]))
            await shop.paid("next", 2)

    @pytest.mark.parametrize("kind", [each for each in KINDS if "async" in each])
    async def test_cancelled_in_begin(self, kind: str, url: str) -> None:
        """A task that is cancelled while it begins leaves neither a lock nor a connection in a transaction."""
        async with KINDS[kind](url) as shop:
            await shop.paid("warm", 1)
            async with await psycopg.AsyncConnection.connect(url) as rival:
                await rival.execute("LOCK TABLE semel_keys")
                beginning = asyncio.create_task(shop.begun(claim_of()))
                await until(url, WAITS_FOR.format("relation"))
                beginning.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await beginning
            await shop.paid("k", 2)


class TestSessions:
    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_handler_that_deallocates(self, kind: str, url: str) -> None:
        """What a handler has deallocated of ours costs it a new connection, and no later request an error."""
        async with KINDS[kind](url) as shop:
            await shop.paid("a", 1)
            transaction, _hold = await shop.begun(claim_of("b"))
            await shop.do(transaction.connection.execute, "DEALLOCATE ALL")
            await shop.do(transaction.perform, Undo())
            await shop.paid("c", 3)
            assert await written(url) == ([1, 3], ["a", "c"])

    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_what_a_driver_deallocates(self, kind: str, url: str) -> None:
        """A handler that is rolled back, after statements that its driver has prepared, costs no later one an error."""
        async with KINDS[kind](url) as shop:
            await shop.paid("a", 1)
            transaction, _hold = await shop.begun(claim_of("b"))
            await shop.ride(transaction, 2)
            await shop.do(transaction.perform, Undo())
            await shop.paid("c", 3)
            assert await written(url) == ([1, 3], ["a", "c"])

    @pytest.mark.parametrize("kind", ["psycopg", "asyncpg"])
    async def test_tables_that_come_later(self, kind: str, postgres_url: str) -> None:
        """A database without Semel's tables is told of, and the same store serves once they are there."""
        async with KINDS[kind](postgres_url) as shop:
            for _ in range(2):
                with pytest.raises(Exception, match="semel migrate"):
                    await shop.begun(claim_of())
            await asyncio.to_thread(store(postgres_url).migrate)
            await do(postgres_url, "CREATE TABLE rides (id integer PRIMARY KEY)")
            await shop.paid("k", 1)

    async def test_kept_connection_is_of_no_use(self, url: str) -> None:
        """A handler that keeps its asyncpg connection can't write in the transaction of the next."""
        async with own_async(url) as shop:
            transaction, _hold = await shop.begun(claim_of())
            kept = transaction.connection
            await shop.do(transaction.perform, Undo())
            following, _hold = await shop.begun(claim_of("next"))
            with pytest.raises(asyncpg.InterfaceError, match="released"):
                await kept.execute("INSERT INTO rides VALUES (1)")
            await shop.do(following.perform, Undo())


ODD = ["", "plain", "it's", "back\\slash", "\n\t", "\N{SNOWMAN}", "\x7f", "%s", ";--", "$1", "a" * 300]


class TestLiterals:
    @pytest.mark.parametrize("conforming", ["on", "off"])
    @pytest.mark.parametrize("encoding", ["UTF8", "SJIS", "LATIN1"])
    def test_whatever_the_session(self, url: str, conforming: str, encoding: str) -> None:
        """A value that is written into a text is read as it was, in every session."""
        values: list[Any] = [*ODD, b"", bytes(range(256)), None, True, False, 0, -7, 2**40, 1.5, 1e-9]
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"SET standard_conforming_strings = {conforming}".encode(), prepare=False)
            connection.execute(f"SET client_encoding = '{encoding}'".encode(), prepare=False)
            for value in values:
                kind = {str: "text", bytes: "bytea", bool: "boolean", float: "float8"}.get(type(value), "bigint")
                sql = f"SELECT CAST({literal(value)} AS {kind}) IS NOT DISTINCT FROM CAST($1 AS {kind})"
                connection.execute("SET client_encoding = 'UTF8'", prepare=False)
                (is_same,) = psycopg.RawCursor(connection).execute(sql.encode(), [value]).fetchone() or (None,)
                connection.execute(f"SET client_encoding = '{encoding}'".encode(), prepare=False)
                assert is_same, value
                assert sql.isascii()

    def test_what_can_not_be_written(self) -> None:
        """What no driver could send, and what has no spelling, is refused."""
        with pytest.raises(UnicodeEncodeError):
            literal("\udc80")
        with pytest.raises(TypeError):
            literal(object())


class TestPools:
    def test_threads(self) -> None:
        """There are never more than so many; a place is free again when a connection is given back, or is none."""
        made: list[int] = []
        closed: list[int] = []

        def connect() -> int:
            made.append(len(made) + 1)
            return made[-1]

        pool = Pool(2, connect, closed.append)
        one, two = pool.take(0), pool.take(0)
        with pytest.raises(AllInUse):
            pool.take(0)
        pool.give_back(None)
        pool.give_back(two)
        assert (pool.take(0), pool.take(0)) == (two, 3)
        pool.give_back(3)
        pool.idle.close()
        pool.give_back(two)
        assert (one, closed) == (1, [3, 2])

    async def test_waiter_that_gives_up(self) -> None:
        """A task that is cancelled while it waits for a connection takes none from the next."""

        async def connect() -> object:
            return object()

        pool = AsyncPool(1, connect, lambda _: None)
        first = await pool.take(0)
        waiting = [asyncio.create_task(pool.take(60)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        pool.give_back(first)
        assert await waiting[1] is first
        with pytest.raises(AllInUse):
            await pool.take(0)

    async def test_connecting_fails(self) -> None:
        """A connection that can't be made leaves its place free."""
        tries = iter([ConnectionError("no"), ConnectionError("no"), None])

        async def connect() -> object:
            if error := next(tries):
                raise error
            return object()

        pool = AsyncPool(1, connect, lambda _: None)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await pool.take(0)
        assert await pool.take(0)


def test_waiting_in_a_thread_is_a_mistake() -> None:
    """What runs in a thread must not wait for an event loop: it is told so, and not left hanging."""
    with pytest.raises(RuntimeError, match="event loop"):
        at_once(asyncio.sleep(1))


@pytest.mark.parametrize("audit, expected", [("on", ["taken over"]), ("all", ["completed", "failed"]), ("off", [])])
async def test_trail(url: str, audit: str, expected: list[str]) -> None:
    """The trail has a finished record only where it took another's place, or where it has everything."""
    shop = Shop(store(f"{url}?audit={audit}"))
    await shop.paid("a", 1)
    left, claim = await shop.perform(claim_of("b")), claim_of("b")
    await do(url, "UPDATE semel_keys SET lease_expires_at = clock_timestamp() WHERE key = 'b'")
    transaction, _seen = await shop.begun(claim)
    finish = Finish(claim, Hold("alice", "b", 2, claim.token), left, Event.FAIL, ANSWER)
    assert await shop.do(transaction.perform, finish) is Verdict.DONE
    await shop.do(shop.store.close)
    assert await rows(url, "SELECT event FROM semel_audit WHERE event <> 'claimed' ORDER BY at") == expected


async def test_complete_is_not_in_the_way(url: str) -> None:
    """A key that was answered without a transaction is answered in one, too."""
    async with own(url) as shop:
        hold = await shop.perform(claim_of())
        await shop.perform(Complete(hold, Event.COMPLETE, ANSWER))
        transaction, seen = await shop.begun(claim_of())
        await shop.do(transaction.perform, Undo())
        assert seen.answer == ANSWER


@every_kind
async def test_read_only_and_serializable_by_default(url: str, kind: str) -> None:
    """A database that takes no writes by its own setting says so at once, though its transactions are serializable and
    another one is open: a deferrable one would wait for that.
    """
    with psycopg.connect(url, autocommit=True) as operator:
        name = operator.info.dbname
        for setting in ("default_transaction_isolation = serializable", "default_transaction_read_only = on"):
            operator.execute(f'ALTER DATABASE "{name}" SET {setting}'.encode())
        with psycopg.connect(url) as other:
            other.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ WRITE")
            other.execute("SELECT * FROM semel_keys")
            async with KINDS[kind](url) as shop:
                transaction = shop.store.transaction()
                with pytest.raises(StoreReadOnly):
                    await shop.do(transaction.perform, Begin(claim_of()))
                await shop.do(transaction.perform, Undo())

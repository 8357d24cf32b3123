"""What is special to SQLAlchemy: engines and sessions in place of a URL, on PostgreSQL and on SQLite."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError, PendingRollbackError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from semel.core.commands import Begin, Claim, Finish, Look, Open, ReadTrail, Undo, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event, State
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import async_store, store
from semel.stores.connections.sqlalchemy import AsyncSQLAlchemyConnections, SQLAlchemyConnections
from semel.stores.transaction import Unit
from tests.stores.connections.lending import SCHEMA, SQLITE, Lender, record

ANSWER = Answer(201, ((b"content-type", b"application/json"),), b'{"id": 1}')


def claim(key: str = "k") -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", timedelta(seconds=30), timedelta(hours=24))


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL;" + SCHEMA)
    return path


@pytest.fixture(params=SQLITE)
async def lender(request: pytest.FixtureRequest, file: Path) -> AsyncIterator[Lender]:
    async with SQLITE[request.param](f"sqlite:///{file}") as made:
        yield made


def written(file: Path) -> tuple[list[int], list[str]]:
    with closing(sqlite3.connect(file)) as connection:
        rides = connection.execute("SELECT id FROM rides").fetchall()
        return [ride for (ride,) in rides], [key for (key,) in connection.execute("SELECT key FROM records").fetchall()]


class TestSQLite:
    async def test_commit(self, lender: Lender, file: Path) -> None:
        """The handler's write and the record are committed together, and nobody sees either before."""
        lent = await lender.begin()
        await lent.execute("INSERT INTO rides VALUES (1)")
        assert await lent.run(record("k")) == ["k"]
        assert written(file) == ([], [])

        await lent.commit()
        assert written(file) == ([1], ["k"])

    async def test_rollback(self, lender: Lender, file: Path) -> None:
        """Undone, neither is there, and the lock is free."""
        lent = await lender.begin()
        await lent.execute("INSERT INTO rides VALUES (1)")
        await lent.run(record("k"))
        await lent.rollback()

        assert written(file) == ([], [])
        again = await lender.begin()
        await again.run(record("again"))
        await again.commit()
        assert written(file) == ([], ["again"])

    async def test_duplicate(self, lender: Lender, file: Path) -> None:
        """An error about the data is SQLAlchemy's own."""
        lent = await lender.begin()
        await lent.run(record("k"))
        with pytest.raises(IntegrityError):
            await lent.run(record("k"))
        await lent.rollback()
        assert written(file) == ([], [])

    async def test_handler_ends_it(self, lender: Lender, file: Path) -> None:
        """A handler that commits by itself is told so; a session's own commit ends only its savepoint."""
        lent = await lender.begin()
        await lent.execute("INSERT INTO rides VALUES (1)")
        await lent.commit_inside()
        if hasattr(lent.connection, "flush"):
            assert written(file) == ([], [])
            await lent.rollback()
            assert written(file) == ([], [])
            return
        with pytest.raises(ConfigurationError, match="ended inside the handler"):
            await lent.run(record("k"))
        await lent.rollback()
        assert written(file) == ([1], [])

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_one_writer(self, file: Path, is_async: bool) -> None:
        """The write lock is taken at the beginning, so a second transaction waits there, and not after its handler."""
        made: Any
        if is_async:
            made = create_async_engine(f"sqlite+aiosqlite:///{file}", connect_args={"timeout": 0})
            lender = Lender(AsyncSQLAlchemyConnections(made), is_sqlalchemy=True)
        else:
            made = create_engine(f"sqlite:///{file}", connect_args={"timeout": 0})
            lender = Lender(SQLAlchemyConnections(made), is_sqlalchemy=True)
        lent = await lender.begin()
        with pytest.raises(StoreUnavailable, match="locked"):
            await lender.begin()
        await lent.rollback()
        await (await lender.begin()).rollback()
        await made.dispose() if is_async else made.dispose()

    async def test_cancelled(self, file: Path) -> None:
        """A task that is cancelled in a statement leaves the file unlocked."""
        made = create_async_engine(f"sqlite+aiosqlite:///{file}")
        lender = Lender(AsyncSQLAlchemyConnections(made), is_sqlalchemy=True)
        lent = await lender.begin()
        running = asyncio.create_task(lent.run(record("k")))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await lent.rollback()

        again = await lender.begin()
        await again.run(record("again"))
        await again.commit()
        assert written(file) == ([], ["again"])
        await made.dispose()


def begun(sessions: Any) -> Unit:
    unit = SQLAlchemyConnections(sessions).begin(Open())
    assert isinstance(unit, Unit)
    return unit


class TestSession:
    """On PostgreSQL, where a failed statement fails its transaction."""

    @pytest.fixture
    def sessions(self, postgres_url: str) -> Any:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(SCHEMA.encode(), prepare=False)
        engine = create_engine("postgresql+psycopg" + postgres_url[postgres_url.index(":") :])
        yield sessionmaker(engine)
        engine.dispose()

    def test_flushed_first(self, sessions: Any) -> None:
        """What was only added to a session is written before the record, and its errors are the handler's."""
        unit = begun(sessions)
        unit.connection.add(Ride(id=1))
        unit.run(record("k"))
        unit.commit()
        assert _written(sessions) == ([1], ["k"])

        unit = begun(sessions)
        unit.connection.add(Ride(id=1))
        with pytest.raises(IntegrityError, match="rides_pkey"):
            unit.run(record("other"))
        unit.rollback()
        assert _written(sessions) == ([1], ["k"])

    def test_failed_flush_that_was_swallowed(self, sessions: Any) -> None:
        """A session whose flush has failed has lost what it was to write: its record is not committed either."""
        unit = begun(sessions)
        session: Session = unit.connection
        session.add(Ride(id=1))
        session.flush()
        session.execute(text("SAVEPOINT theirs"))
        session.add_all([Ride(id=2)])
        session.flush()
        session.expunge_all()
        session.add(Ride(id=2))
        with pytest.raises(IntegrityError):
            session.flush()
        unit.run(record("k"))
        with pytest.raises(PendingRollbackError):
            unit.commit()
        assert _written(sessions) == ([], [])

    def test_rolled_back_and_tried_again(self, sessions: Any) -> None:
        """A handler may roll its session back and write something else instead."""
        unit = begun(sessions)
        unit.connection.add(Ride(id=1))
        unit.connection.flush()
        unit.connection.rollback()
        with unit.connection.begin():
            unit.connection.add(Ride(id=2))
        unit.run(record("k"))
        unit.commit()
        assert _written(sessions) == ([2], ["k"])

    def test_autocommit_engine(self, sessions: Any) -> None:
        """An engine without transactions is refused."""
        engine = sessions.kw["bind"].execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            SQLAlchemyConnections(engine).begin(Open())


def _written(sessions: Any) -> tuple[list[int], list[str]]:
    with sessions() as session:
        rides = session.execute(text("SELECT id FROM rides")).all()
        return [ride for (ride,) in rides], [key for (key,) in session.execute(text("SELECT key FROM records")).all()]


class TestStore:
    """The stores' own statements, over an engine in place of a URL."""

    @pytest.mark.parametrize("is_session", [False, True], ids=["engine", "sessionmaker"])
    @pytest.mark.parametrize("database", ["postgresql+psycopg", "sqlite"])
    def test_sync(self, database: str, is_session: bool, request: pytest.FixtureRequest) -> None:
        """Begin, run, finish: the second request finds the answer, and what was undone is not there."""
        url: str = request.getfixturevalue("postgres_url" if database.startswith("post") else "sqlite_url")
        engine = create_engine(database + url[url.index(":") :])
        keys = store(sessionmaker(engine) if is_session else engine)
        keys.migrate()
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE rides (id integer PRIMARY KEY)"))
        try:
            for is_undone in (True, False):
                transaction, mine = keys.transaction(), claim()
                hold = transaction.perform(Begin(mine))
                assert isinstance(hold, Hold)
                transaction.connection.execute(text("INSERT INTO rides VALUES (1)"))
                if is_undone:
                    transaction.perform(Undo())
                else:
                    assert transaction.perform(Finish(mine, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE
                found = keys.perform(Look("alice", "k"))
                assert (found is None) == is_undone
            second = keys.transaction()
            seen = second.perform(Begin(claim()))
            second.perform(Undo())
            assert isinstance(seen, Found)
            assert (seen.state, seen.answer) == (State.COMPLETE, ANSWER)
            with engine.connect() as connection:
                assert connection.execute(text("SELECT id FROM rides")).all() == [(1,)]
            assert [line.event for line in keys.perform(ReadTrail("alice", "k"))] == []
        finally:
            keys.close()
            engine.dispose()

    @pytest.mark.parametrize("is_session", [False, True], ids=["engine", "sessionmaker"])
    @pytest.mark.parametrize("database", ["postgresql+psycopg", "postgresql+asyncpg", "sqlite+aiosqlite"])
    async def test_async(self, database: str, is_session: bool, request: pytest.FixtureRequest) -> None:
        """The same on an event loop."""
        url: str = request.getfixturevalue("postgres_url" if database.startswith("post") else "sqlite_url")
        await asyncio.to_thread(store(url).migrate)
        engine = create_async_engine(database + url[url.index(":") :])
        keys = async_store(async_sessionmaker(engine) if is_session else engine)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE rides (id integer PRIMARY KEY)"))
        try:
            for is_undone in (True, False):
                transaction, mine = keys.transaction(), claim()
                hold = await transaction.perform(Begin(mine))
                assert isinstance(hold, Hold)
                await transaction.connection.execute(text("INSERT INTO rides VALUES (1)"))
                if is_undone:
                    await transaction.perform(Undo())
                else:
                    assert await transaction.perform(Finish(mine, hold, None, Event.COMPLETE, ANSWER)) is Verdict.DONE
                found = await keys.perform(Look("alice", "k"))
                assert (found is None) == is_undone
            second = keys.transaction()
            seen = await second.perform(Begin(claim()))
            await second.perform(Undo())
            assert isinstance(seen, Found)
            assert (seen.state, seen.answer) == (State.COMPLETE, ANSWER)
            assert [line.event for line in await keys.perform(ReadTrail("alice", "k"))] == []
        finally:
            await keys.close()
            await engine.dispose()


class TestOneWriter:
    """SQLite lets one transaction write at a time; who need not write does not wait for it."""

    def test_same_key(self, sqlite_url: str) -> None:
        """A second request with the key finds the first one in progress, with its fingerprint, and does not wait."""
        engine = create_engine(sqlite_url)
        keys = store(engine)
        keys.migrate()
        first, second = keys.transaction(), keys.transaction()
        assert isinstance(first.perform(Begin(claim())), Hold)
        found = second.perform(Begin(claim()))
        second.perform(Undo())
        assert isinstance(found, Found)
        assert (found.state, found.fingerprint) == (State.PROCESSING, b"fingerprint")

        first.perform(Undo())
        assert isinstance(second.perform(Begin(claim())), Hold)
        second.perform(Undo())
        keys.close()
        engine.dispose()

    async def test_replay(self, sqlite_url: str) -> None:
        """An answer is replayed while the handler of another key has the write lock."""
        engine = create_async_engine("sqlite+aiosqlite" + sqlite_url[sqlite_url.index(":") :])
        keys = async_store(engine)
        await asyncio.to_thread(store(sqlite_url).migrate)
        one, mine = keys.transaction(), claim("one")
        hold = await one.perform(Begin(mine))
        assert isinstance(hold, Hold)
        await one.perform(Finish(mine, hold, None, Event.COMPLETE, ANSWER))

        other, again = keys.transaction(), keys.transaction()
        begun = await other.perform(Begin(claim("other")))
        assert isinstance(begun, Hold)
        found = await again.perform(Begin(claim("one")))
        assert isinstance(found, Found)
        assert found.answer == ANSWER
        await other.perform(Undo())
        await keys.close()
        await engine.dispose()


class TestGiven:
    @pytest.mark.parametrize(
        "given, expected",
        [
            ("postgresql+psycopg://me:p%40ss@db:5433/app?sslmode=require", "postgresql://me@db:5433/app"),
            ("postgresql+psycopg://db/app", "postgresql://db/app"),
            ("sqlite:////tmp/a b.db", "sqlite:////tmp/a%20b.db"),
        ],
    )
    def test_address_of_an_engine(self, given: str, expected: str) -> None:
        """Messages name where an engine connects to, without its password."""
        assert SQLAlchemyConnections.url_of(create_engine(given)) == expected

    @pytest.mark.parametrize(
        "given, expected",
        [
            ("postgresql+asyncpg://me@db/app?ssl=require", "postgresql://me@db/app"),
            ("postgresql+asyncpg://me@db/app?prepared_statement_cache_size=0", "postgresql://me@db/app"),
            ("postgresql+psycopg://me@db/app?connect_timeout=3", "postgresql://me@db/app"),
            ("postgresql+asyncpg:///app?host=/run/pg", "postgresql:///app?host=%2Frun%2Fpg"),
        ],
    )
    def test_address_of_an_async_engine(self, given: str, expected: str) -> None:
        """Messages name where an engine connects to, and nothing else that its driver is told."""
        assert AsyncSQLAlchemyConnections.url_of(create_async_engine(given)) == expected

    def test_wrong_colour(self) -> None:
        """A sync engine under an event loop would block it, and an async one has no loop in a thread."""
        with pytest.raises(ConfigurationError, match="async one"):
            async_store(create_engine("sqlite:///x.db"))
        with pytest.raises(ConfigurationError, match=r"async_store\(\)"):
            store(create_async_engine("sqlite+aiosqlite:///x.db"))

    def test_another_driver(self) -> None:
        """A driver whose COMMIT nobody has looked at is refused by name."""
        engine = create_engine("postgresql+pg8000://db/app", module=psycopg)
        with pytest.raises(ConfigurationError, match=r"postgresql\+pg8000"):
            SQLAlchemyConnections(engine)

    def test_in_memory(self) -> None:
        """A database that only one connection sees can't hold records for others."""
        with pytest.raises(ConfigurationError, match="no plain file"):
            store(create_engine("sqlite://"))

    def test_unbound_sessionmaker(self) -> None:
        """A sessionmaker without an engine says nothing of where to connect to."""
        with pytest.raises(ConfigurationError, match="bound to no engine"):
            store(sessionmaker())

    def test_url_beside_an_engine(self, postgres_url: str) -> None:
        """A URL beside the engine says what the engine does not: another table."""
        engine = create_engine("postgresql+psycopg" + postgres_url[postgres_url.index(":") :])
        made: Any = store(engine, url=f"{postgres_url}?table=other")
        assert made.address.names.table == "other"
        engine.dispose()

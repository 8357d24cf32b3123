"""Every store of Semel's, in both colours, passes the one suite that any store must pass."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from semel import stores
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing.clock import Clock
from semel.testing.conformance import Candidate, StoreConformance
from tests.kit import servers

Open = Callable[[str], Store | AsyncStore]


class TestMemory(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        memory = MemoryStore()
        return Candidate(open=lambda: memory, age=Clock(memory).advance)


@pytest.mark.slow  # The records of TestMemory.
class TestAsyncMemory(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        memory = MemoryStore()
        return Candidate(open=lambda: AsyncMemoryStore(memory=memory), age=Clock(memory).advance)


def sqlite_candidate(path: Path, open_store: Open) -> Candidate:
    url = f"sqlite:///{path}"
    return Candidate(open=lambda: open_store(url), age=Clock(url).advance)


class TestSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", stores.store)


@pytest.mark.slow  # The statements of TestSQLite, in a thread.
class TestAsyncSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", stores.async_store)


#: Every answer with a body is a large one.
ALL = """
CREATE OR REPLACE TRIGGER semel_keys_answer BEFORE INSERT OR UPDATE OF body ON semel_keys
   FOR EACH ROW WHEN (octet_length(NEW.body) > 0 OR NEW.answer_day IS NOT NULL) EXECUTE FUNCTION semel_move_answer(0)
"""


def postgres_candidate(
    server: servers.PostgresServer, open_store: Open, *, is_partitioned: bool = False
) -> Iterator[Candidate]:
    name = f"semel_{uuid4().hex}"
    url = urlsplit(server.url)._replace(path=f"/{name}").geturl()

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        with closing(stores.store(url)) as store:
            store.migrate()
            if is_partitioned:
                store.lay_out("partitioned")
                with psycopg.connect(url) as tables:
                    tables.execute(ALL)
        yield Candidate(open=lambda: open_store(url), age=Clock(url).advance)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


class TestPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.store)


class TestAsyncPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.async_store)


@pytest.mark.slow  # The statements of TestPostgres, with a trigger.
class TestPartitionedPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.store, is_partitioned=True)


@pytest.mark.slow  # As above, on a loop.
class TestAsyncPartitionedPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        yield from postgres_candidate(postgres_server, stores.async_store, is_partitioned=True)

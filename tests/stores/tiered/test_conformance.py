"""A tiered store passes the suite that every store passes: over SQLite in threads, over PostgreSQL on a loop.

The suite bends time: it makes records older than they are, which no clock of a cache can know. So its ``age`` empties
the caches.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import redis

from semel import stores
from semel.stores.base import AsyncStore, Store
from semel.stores.tiered import Tiered
from semel.stores.tiered.store import AsyncTieredStore, TieredStore
from semel.testing.conformance import Candidate, StoreConformance
from tests.kit import servers
from tests.stores.shared.test_conformance import postgres_candidate, sqlite_candidate

AnyStore = Store | AsyncStore


class Tier:
    """Puts caches in front of every store that is opened, and empties them when it is told to."""

    def __init__(self, url: str, open_store: Callable[[Tiered], AnyStore]) -> None:
        self._url = url
        self._open = open_store
        self._opened: list[AnyStore] = []

    def over(self, durable: object) -> AnyStore:
        made = self._open(Tiered(durable=durable, cache=self._url, namespace="conformance"))
        self._opened.append(made)
        return made

    def aging(self, age: Callable[[timedelta], None]) -> Callable[[timedelta], None]:
        def age_and_forget(duration: timedelta) -> None:
            age(duration)
            self.forget()

        return age_and_forget

    def forget(self) -> None:
        for each in self._opened:
            assert isinstance(each, TieredStore | AsyncTieredStore)
            each.forget()
        with redis.Redis.from_url(self._url) as client:
            client.ping()  # What others had sent before is done by now.
            client.flushdb()


@pytest.fixture(scope="class")
def tier(redis_server: servers.RedisServer) -> Tier:
    return Tier(redis_server.url, stores.store)


@pytest.fixture(scope="class")
def async_tier(redis_server: servers.RedisServer) -> Tier:
    return Tier(redis_server.url, stores.async_store)


class TestOverSQLite(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tier: Tier, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        below = sqlite_candidate(tmp_path_factory.mktemp("tiered") / "semel.db", tier.over)
        return Candidate(open=below.open, age=tier.aging(below.age))


@pytest.mark.slow  # TestOverSQLite is the same in front.
class TestAsyncOverPostgres(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, async_tier: Tier, postgres_server: servers.PostgresServer) -> Iterator[Candidate]:
        for below in postgres_candidate(postgres_server, async_tier.over):
            yield Candidate(open=below.open, age=async_tier.aging(below.age))

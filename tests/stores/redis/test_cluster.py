"""What is special to a Redis Cluster: keys go where they belong, slots that move are followed, a dead node is told."""

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import pytest
import redis

from semel import stores
from semel.core.commands import Browse, Claim, Command, Complete, FindStuck, Look, Release, Renew, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import StoreNotReady, StoreUnavailable
from semel.stores.redis.protocol import slot_of
from semel.stores.redis.records import digest_of
from semel.stores.redis.store import RedisStore
from tests.kit import servers
from tests.kit.servers.base import until
from tests.kit.servers.resp import RedisRefused, ask, ask_facts
from tests.stores.redis.world import Asking, cluster_url

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")

#: A client that could choose its slot would put all of its keys onto one server.
ODD_KEYS = ["{a}", "{a}b", "a{}b", "{a\nb}", "x\r\ny", "{{a}}", "}a{", "*", "a b"]


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"", LEASE, RETENTION)


@pytest.fixture
def nodes(redis_cluster: servers.RedisCluster) -> tuple[servers.RedisServer, ...]:
    for node in redis_cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.flushall()
    return redis_cluster.nodes


@pytest.fixture(params=["threads", "loop"])
def perform(request: pytest.FixtureRequest, nodes: tuple[servers.RedisServer, ...]) -> Iterator[Any]:
    with Asking(cluster_url(nodes), request.param) as asking:
        yield asking


def _count(node: servers.RedisServer) -> int:
    found = ask(node.port, "KEYS", "semel:*")
    assert isinstance(found, list)
    return len(found)


class TestCluster:
    def test_odd_keys(self, perform: Any) -> None:
        """Braces and line breaks in a client's key are only characters, and choose no server."""
        for key in ODD_KEYS:
            hold = perform(claim(key))
            assert isinstance(hold, Hold)
            assert perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        assert {each.key for each in perform(Browse(100))} == set(ODD_KEYS)
        tagged = {slot_of(b"semel:" + digest_of("alice", f"{{a}}{number}")) for number in range(50)}
        assert len(tagged) > 40

    def test_keys_are_spread(self, perform: Any, nodes: tuple[servers.RedisServer, ...]) -> None:
        """One batch reaches every server, each of which holds a share of the records."""
        holds = perform.all([claim(f"key {number}") for number in range(300)])
        assert all(isinstance(each, Hold) for each in holds)
        assert all(_count(node) > 50 for node in nodes)
        assert perform(Renew(tuple((hold, LEASE) for hold in holds))) == frozenset()
        assert set(perform.all([Complete(each, Event.COMPLETE, ANSWER) for each in holds])) == {Verdict.DONE}
        assert len(perform(Browse(1000))) == 300

    def test_a_slot_that_moves_is_followed(self, perform: Any, nodes: tuple[servers.RedisServer, ...]) -> None:
        """While a slot is on its way, and when it has arrived, its keys are found where they are."""
        old, new = claim("old"), claim("new of the same slot")
        slot, held = slot_of(_name("old")), perform(old)
        assert isinstance(held, Hold)
        source = next(node for node in nodes if _has(node, slot))
        target = next(node for node in nodes if node is not source)
        ids = {node.port: str(ask(node.port, "CLUSTER", "MYID")) for node in (source, target)}
        ask(target.port, "CLUSTER", "SETSLOT", str(slot), "IMPORTING", ids[source.port])
        ask(source.port, "CLUSTER", "SETSLOT", str(slot), "MIGRATING", ids[target.port])
        try:
            # The old key is still there; after it has gone over, the old server says whom to ask.
            assert isinstance(perform(claim("old")), Found)
            ask(source.port, "MIGRATE", "127.0.0.1", str(target.port), _name("old").decode(), "0", "5000")
            assert isinstance(perform(claim("old")), Found)
            assert perform(Release(held)) is Verdict.DONE
            assert isinstance(perform(claim("old")), Hold)
        finally:
            for node in nodes:
                ask(node.port, "CLUSTER", "SETSLOT", str(slot), "NODE", ids[target.port])
        assert isinstance(perform(claim("old")), Found)
        assert isinstance(perform(new), Hold)

    def test_scripts_are_told_to_every_server(self, perform: Any, nodes: tuple[servers.RedisServer, ...]) -> None:
        """Each server is told the scripts that it does not know."""
        perform.all([claim(f"key {number}") for number in range(30)])
        for node in nodes:
            ask(node.port, "SCRIPT", "FLUSH")
        got = perform.all([claim(f"key {number}") for number in range(60)])
        assert [isinstance(each, Hold) for each in got] == [False] * 30 + [True] * 30

    def test_what_is_on_no_list_is_found(self, perform: Any, nodes: tuple[servers.RedisServer, ...]) -> None:
        """A walk goes through every server."""
        perform.all([claim(f"key {number}") for number in range(30)])
        with Asking(cluster_url(nodes), "threads") as other:
            found = other.all([Look("alice", f"key {number}") for number in range(30)])
            assert all(found)
            assert other(FindStuck(100)) == ()
        listed = [name for node in nodes for name in _lists(node)]
        assert len(listed) == len(set(listed)) > 3


class TestWrongAddresses:
    def test_a_node_is_no_lone_server(self, nodes: tuple[servers.RedisServer, ...]) -> None:
        """One node by itself has a part of the keys: who gives its address is told how to write it."""
        with closing(RedisStore(nodes[0].url)) as store, pytest.raises(StoreNotReady, match=r"redis\+cluster://"):
            store.open()

    def test_a_lone_server_is_no_cluster(self, redis_server: servers.RedisServer) -> None:
        """And the other way round."""
        url = f"redis+cluster://127.0.0.1:{redis_server.port}"
        with closing(stores.store(url)) as store, pytest.raises(StoreNotReady, match="redis://"):
            store.perform(claim("key"))


def test_a_dead_node() -> None:
    """Without one of its servers a Cluster can't serve, which is an error; when it is whole again, so is the store."""
    settings = {"appendonly": "yes", "appendfsync": "always"}
    with servers.redis_cluster(settings=settings) as cluster, RedisStore(cluster_url(cluster.nodes)) as store:
        holds = [store.perform(claim(f"key {number}")) for number in range(30)]
        dead = cluster.nodes[2]
        dead.kill()
        errors = [_error(store, claim(f"at once {number}")) for number in range(30)]
        assert any(isinstance(each, StoreUnavailable) for each in errors)
        cluster.until_missed(dead)
        errors = [_error(store, claim(f"later {number}")) for number in range(30)]
        assert all(isinstance(each, StoreUnavailable) for each in errors)
        dead.start()
        cluster.until_whole()
        for number, hold in enumerate(holds):
            found = store.perform(claim(f"key {number}"))
            assert isinstance(hold, Hold)
            assert isinstance(found, Found)
            assert found.token == hold.token


@pytest.mark.parametrize("colour", ["threads", "loop"])
def test_a_node_of_the_address_that_is_a_replica_by_now(colour: str) -> None:
    """When the node that the URL names has handed its slots to its replica, whoever uses the Cluster goes on, and
    whoever starts now finds the way all the same.
    """
    with servers.redis_cluster() as cluster:
        named = cluster.nodes[0]
        replica = cluster.add_replica(named)
        with Asking(cluster_url(cluster.nodes), colour) as perform:
            commands = [claim(f"key {number}") for number in range(30)]
            assert all(isinstance(each, Hold) for each in perform.all(commands))
            until("it may take over", lambda: _takes_over(replica.port))
            until("they have changed places", lambda: ask_facts(named.port, "INFO")["role"] == "slave")
            cluster.until_whole()
            assert all(isinstance(each, Found) for each in perform.all(commands))
        with Asking(cluster_url(cluster.nodes), colour) as perform:
            assert all(isinstance(each, Found) for each in perform.all(commands))


def _takes_over(port: int) -> bool:
    with suppress(RedisRefused):
        ask(port, "CLUSTER", "FAILOVER")
    return ask_facts(port, "INFO")["role"] == "master"


def _error(store: RedisStore, command: Command[Any]) -> Exception | None:
    try:
        store.perform(command)
    except StoreUnavailable as error:
        return error
    return None


def _name(key: str) -> bytes:
    return b"semel:" + digest_of("alice", key)


def _has(node: servers.RedisServer, slot: int) -> bool:
    return int(str(ask(node.port, "CLUSTER", "COUNTKEYSINSLOT", str(slot)))) > 0


def _lists(node: servers.RedisServer) -> list[str]:
    found = ask(node.port, "KEYS", "semel:due:*")
    assert isinstance(found, list)
    return [str(each) for each in found]

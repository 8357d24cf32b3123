"""A Redis Cluster for tests: three masters, each its own process. It has no replicas, so nothing is promoted in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from semel.testing.servers.base import LOOPBACK, NO_SETTINGS, free_port, until
from semel.testing.servers.lone_redis import RedisServer, redis_process
from semel.testing.servers.resp import ask, ask_facts

MASTERS = 3
SLOTS = 16_384

#: How far above its port a node speaks to other nodes. It can't be chosen before Redis 7.
BUS = 10_000

#: A node that is silent for so many milliseconds is held for dead, and then the whole cluster is down. Long enough for
#: a busy machine; who tests outages sets it lower.
NODE_TIMEOUT = "5000"


class RedisCluster:
    """A Redis Cluster. Any of its `urls` leads to all of it; `nodes` can be killed and started one by one."""

    def __init__(self, nodes: Sequence[RedisServer]) -> None:
        self.nodes = tuple(nodes)
        self.urls = tuple(node.url for node in nodes)
        self.url = self.urls[0]

    def until_whole(self) -> None:
        """Wait until every node serves every slot. A node that was started again takes two seconds to do so."""
        until("every node finds the cluster whole", lambda: all(_is_whole(node) for node in self.nodes))


@contextmanager
def redis_cluster(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[RedisCluster]:
    """Lend a Redis Cluster of three masters, all with the same `settings`."""
    ours = {"cluster-enabled": "yes", "cluster-announce-ip": LOOPBACK, "cluster-node-timeout": NODE_TIMEOUT, **settings}
    with ExitStack() as ends:
        nodes = [ends.enter_context(redis_process(free_port(also=BUS), ours)) for _ in range(MASTERS)]
        _introduce(nodes)
        cluster = RedisCluster(nodes)
        cluster.until_whole()
        yield cluster


def _introduce(nodes: Sequence[RedisServer]) -> None:
    bounds = [SLOTS * number // len(nodes) for number in range(len(nodes) + 1)]
    for number, node in enumerate(nodes):
        slots = range(bounds[number], bounds[number + 1])
        ask(node.port, "CLUSTER", "ADDSLOTS", *map(str, slots))
        # Given while they don't know each other: else they settle it among themselves, which takes longer.
        ask(node.port, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
    first, *others = nodes
    for node in others:
        ask(first.port, "CLUSTER", "MEET", LOOPBACK, str(node.port))


def _is_whole(node: RedisServer) -> bool:
    facts = ask_facts(node.port, "CLUSTER", "INFO")
    wanted = {"cluster_state": "ok", "cluster_known_nodes": str(MASTERS), "cluster_slots_ok": str(SLOTS)}
    return wanted.items() <= facts.items()

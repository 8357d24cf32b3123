"""A Redis Cluster for tests: three masters, each its own process, and replicas for those who ask for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, free_port, until
from tests.kit.servers.lone_redis import RedisServer, redis_process
from tests.kit.servers.resp import ask, ask_facts

MASTERS = 3
SLOTS = 16_384

#: How far above its port a node speaks to other nodes. It can't be chosen before Redis 7.
BUS = 10_000

#: A node that is silent for so many milliseconds is held for dead, and then the whole cluster is down. Longer than a
#: busy machine may stand still.
NODE_TIMEOUT = "10000"
#: While one is known to be dead, and the others shall find out.
SHORT_TIMEOUT = "500"


class RedisCluster:
    """A Redis Cluster. Any of its `urls` leads to all of it; `nodes` can be killed and started one by one."""

    def __init__(self, nodes: Sequence[RedisServer], launch: Callable[[], RedisServer]) -> None:
        self.nodes = tuple(nodes)
        self.urls = tuple(node.url for node in nodes)
        self.url = self.urls[0]
        self._launch = launch
        self._replicas: list[RedisServer] = []
        #: Those that give each other up sooner than a busy machine allows for.
        self._hasty: list[RedisServer] = []

    def until_whole(self) -> None:
        """Wait until all know each other and serve every slot. A node that was started again takes two seconds."""
        nodes = [*self.nodes, *self._replicas]
        until("every node finds the cluster whole", lambda: all(_is_whole(node, len(nodes)) for node in nodes))
        while self._hasty:
            _give_up_after(NODE_TIMEOUT, self._hasty.pop())

    def until_missed(self, dead: RedisServer) -> None:
        """Wait until the others hold *dead*, which was killed, for dead: there is no cluster then."""
        self._hasty = [node for node in self.nodes if node is not dead]
        # Until it is whole again: how long they take to trust it depends on this, too.
        for node in self._hasty:
            _give_up_after(SHORT_TIMEOUT, node)
        until("the others miss it", lambda: all(_state(node)["cluster_state"] == "fail" for node in self._hasty))

    def add_replica(self, master: RedisServer) -> RedisServer:
        """Start a replica of *master*, and wait until it is fit to take its place."""
        replica = self._launch()
        self._replicas.append(replica)
        ask(replica.port, "CLUSTER", "MEET", LOOPBACK, str(master.port))
        name = str(ask(master.port, "CLUSTER", "MYID"))
        until("the two have met", lambda: name in str(ask(replica.port, "CLUSTER", "NODES")))
        ask(replica.port, "CLUSTER", "REPLICATE", name)
        until("it is in step", lambda: ask_facts(replica.port, "INFO").get("master_link_status") == "up")
        # One that has not heard of the other masters lacks their votes, and as a master itself serves nothing.
        self.until_whole()
        return replica


@contextmanager
def redis_cluster(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[RedisCluster]:
    """Lend a Redis Cluster of three masters, all with the same `settings`."""
    ours = {"cluster-enabled": "yes", "cluster-announce-ip": LOOPBACK, "cluster-node-timeout": NODE_TIMEOUT, **settings}
    with ExitStack() as ends:

        def launch() -> RedisServer:
            return ends.enter_context(redis_process(free_port(also=BUS), ours))

        nodes = [launch() for _ in range(MASTERS)]
        _introduce(nodes)
        cluster = RedisCluster(nodes, launch)
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


def _is_whole(node: RedisServer, known: int) -> bool:
    wanted = {"cluster_state": "ok", "cluster_known_nodes": str(known), "cluster_slots_ok": str(SLOTS)}
    return wanted.items() <= _state(node).items()


def _give_up_after(timeout: str, node: RedisServer) -> None:
    ask(node.port, "CONFIG", "SET", "cluster-node-timeout", timeout)


def _state(node: RedisServer) -> dict[str, str]:
    return ask_facts(node.port, "CLUSTER", "INFO")

"""A Redis with two replicas, watched by three sentinels, for tests. Who is the master, the sentinels decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, free_port, until
from tests.kit.servers.lone_redis import RedisServer, redis_process
from tests.kit.servers.resp import Reply, ask, ask_facts

SERVICE = "semel"
REPLICAS = 2
SENTINELS = 3
QUORUM = 2

#: After how many milliseconds of silence a server is held for dead, and how long a fail-over may take until the next.
#: Who kills a master wants the first to be short; who does not, longer than a busy machine may stand still.
DOWN_AFTER = 1000
FAILOVER = 3000

#: A replica gets its first copy at once, not after the five seconds in which more replicas might come: who is
#: promoted before has nothing.
AT_ONCE = {"repl-diskless-sync-delay": "0"}


class RedisSentinel:
    """A watched Redis. `nodes` are the servers with data, the first master first; `watchers` are the sentinels."""

    def __init__(self, nodes: Sequence[RedisServer], watchers: Sequence[RedisServer]) -> None:
        self.service = SERVICE
        self.nodes = tuple(nodes)
        self.watchers = tuple(watchers)
        self.sentinels = tuple((LOOPBACK, watcher.port) for watcher in watchers)
        self.url = f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in self.sentinels)}/{SERVICE}/0"

    def master(self) -> RedisServer:
        """The master in the eyes of most sentinels."""
        ports: Counter[int] = Counter()
        for watcher in self.watchers:
            with suppress(OSError):
                ports[_master_port(watcher)] += 1
        (port, _), *_ = ports.most_common(1)
        return next(node for node in self.nodes if node.port == port)

    def until_whole(self) -> None:
        """Wait until every sentinel knows of all the others, and of two replicas that follow one master. An old master
        that was started again is made a replica after some twenty seconds: to start anew is quicker.
        """
        until("every sentinel sees a master with its replicas", lambda: all(map(_is_whole, self.watchers)))
        until("every replica has a copy", lambda: _has_copies(self.master()))


@contextmanager
def redis_sentinel(
    *, settings: Mapping[str, str] = NO_SETTINGS, down_after: int = DOWN_AFTER
) -> Iterator[RedisSentinel]:
    """Lend one master, two replicas and three sentinels. `settings` are for those with data; a master that is silent
    for `down_after` milliseconds is replaced.
    """
    with ExitStack() as ends:
        master = ends.enter_context(redis_process(free_port(), {**AT_ONCE, **settings}))
        following = {**AT_ONCE, **settings, "replicaof": f"{LOOPBACK} {master.port}"}
        replicas = [ends.enter_context(redis_process(free_port(), following)) for _ in range(REPLICAS)]
        # Before anybody watches: what a sentinel has seen of a replica once, it holds for true for ten seconds.
        until("every replica has its first copy", lambda: _has_copies(master))
        watching = _watching(master, down_after)
        watchers = [ends.enter_context(redis_process(free_port(), watching, "--sentinel")) for _ in range(SENTINELS)]
        watched = RedisSentinel([master, *replicas], watchers)
        watched.until_whole()
        yield watched


def _watching(master: RedisServer, down_after: int) -> dict[str, str]:
    return {
        "sentinel monitor": f"{SERVICE} {LOOPBACK} {master.port} {QUORUM}",
        "sentinel down-after-milliseconds": f"{SERVICE} {down_after}",
        "sentinel failover-timeout": f"{SERVICE} {FAILOVER}",
    }


def _master_port(watcher: RedisServer) -> int:
    found = ask(watcher.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
    return int(str(found[1])) if isinstance(found, list) else 0


def _has_copies(master: RedisServer) -> bool:
    facts = ask_facts(master.port, "INFO", "replication")
    return sum("state=online" in value for value in facts.values()) == REPLICAS


def _is_whole(watcher: RedisServer) -> bool:
    master = _pairs(ask(watcher.port, "SENTINEL", "MASTER", SERVICE))
    wanted = {"flags": "master", "num-slaves": str(REPLICAS), "num-other-sentinels": str(SENTINELS - 1)}
    return wanted.items() <= master.items() and all(
        replica.get("flags") == "slave" and replica.get("master-link-status") == "ok"
        for replica in map(_pairs, _several(ask(watcher.port, "SENTINEL", "SLAVES", SERVICE)))
    )


def _several(reply: Reply) -> list[Reply]:
    return reply if isinstance(reply, list) else []


def _pairs(reply: Reply) -> dict[str, str]:
    """Names and values in turn, as a sentinel writes them."""
    words = [str(word) for word in _several(reply)]
    return dict(zip(words[::2], words[1::2], strict=True))

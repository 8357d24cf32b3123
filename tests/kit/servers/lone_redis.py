"""One Redis server for tests, alone or as a part of something. What several of them agree upon is in `cluster.py` and
`sentinel.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from semel.testing.process import Command, Process
from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, Server, free_port, give, own_folder
from tests.kit.servers.programs import REDIS, find, named
from tests.kit.servers.resp import is_answering


class RedisServer(Server):
    """A Redis server. It keeps nothing on disk unless its settings say so."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return urlsplit(self.url).port or 6379

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._ours.end(signal.SIGTERM)


@contextmanager
def redis(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[RedisServer]:
    """Lend a Redis server. One with `settings`, such as `appendonly` or `maxmemory-policy`, is always started here,
    since another's can't be changed. What it keeps on disk is there again after `kill` and `start`.
    """
    if (url := named("SEMEL_TEST_REDIS")) and not settings:
        yield RedisServer(url, None)
        return
    with redis_process(free_port(), settings) as server:
        yield server


@contextmanager
def redis_process(port: int, settings: Mapping[str, str], *how: str) -> Iterator[RedisServer]:
    """Lend a process of redis-server on `port`; `how` are more of its arguments."""
    with own_folder() as folder:
        program = find(REDIS, folder) / "redis-server"
        # A file, not arguments: a server that is told by others whom to follow writes it there, and knows it again
        # when it is started again.
        configuration = folder / "redis.conf"
        where = {"bind": LOOPBACK, "port": str(port), "dir": str(folder)}
        lines = [f"{name} {value or _EMPTY}\n" for name, value in {"save": "", **settings, **where}.items()]
        configuration.write_text("".join(lines))
        give(configuration)
        command: Command = [program, configuration, *how]
        with Process(command, folder, lambda _: is_answering(port), signal.SIGTERM) as process:
            yield RedisServer(f"redis://{LOOPBACK}:{port}/0", process)


_EMPTY = '""'

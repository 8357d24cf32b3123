"""What the tests of the Redis store share: making every record older, as the conformance suite asks."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import redis

from semel import stores
from semel.core.commands import Command
from semel.testing import servers
from semel.testing.conformance import handle

#: Moves what records say of their times, the lines of their trails, and the lists of those to look at. A TTL stays
#: where it is: what is past retention would be gone, and nothing could be said of it.
AGE = """
local times = {'created_at', 'lease_expires_at', 'completed_at', 'expires_at'}
for _, key in ipairs(redis.call('KEYS', 'semel:*')) do
    local kind = redis.call('TYPE', key).ok
    if kind == 'hash' then
        for place, value in ipairs(redis.call('HMGET', key, unpack(times))) do
            if value then
                redis.call('HINCRBY', key, times[place], -ARGV[1])
            end
        end
    elseif kind == 'zset' then
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
            redis.call('ZINCRBY', key, -ARGV[1], member)
        end
    elseif kind == 'list' then
        for place, line in ipairs(redis.call('LRANGE', key, 0, -1)) do
            local at, rest = string.match(line, '^(%-?%d+)(.*)$')
            redis.call('LSET', key, place - 1, string.format('%.0f', at - ARGV[1]) .. rest)
        end
    end
end
"""


def ageing(*urls: str) -> Callable[[timedelta], None]:
    """Return what makes all that is stored on these servers older."""

    def age(duration: timedelta) -> None:
        for url in urls:
            with redis.Redis.from_url(url) as client:
                client.eval(AGE, 0, str(duration // timedelta(microseconds=1)))

    return age


def cluster_url(nodes: Sequence[servers.RedisServer]) -> str:
    """Return the address of a Cluster, by one of its nodes: the others are found."""
    return f"redis+cluster://127.0.0.1:{nodes[0].port}"


class Asking:
    """One store of either colour, asked in one way."""

    def __init__(self, url: str, colour: str) -> None:
        self._store = handle(stores.store(url) if colour == "threads" else stores.async_store(url))

    def __call__(self, command: Command[Any]) -> Any:
        return self._store.perform(command)

    def all(self, commands: Sequence[Command[Any]]) -> list[Any]:
        return self._store.perform_all(commands)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

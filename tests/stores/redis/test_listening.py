"""Hints: whoever listens hears of what ends elsewhere, and hears again after the server was gone."""

import asyncio
import os
import threading
from datetime import timedelta
from typing import Any, Self

import pytest
import redis

from semel import stores
from semel.core.commands import Claim, Complete, Release
from semel.core.hint import hint_of
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores.redis import listening
from tests.kit import servers
from tests.kit.servers.base import until
from tests.stores.redis.world import cluster_url

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")
HANG_SECONDS = 60


class Heard:
    """What was heard, and whether all of it was heard in one thread."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.threads: set[int] = set()

    def __call__(self, name: str) -> None:
        self.names.add(name)
        self.threads.add(threading.get_ident())

    def __contains__(self, name: str) -> bool:
        return name in self.names


class Listening:
    """A store of either colour that listens."""

    def __init__(self, url: str, colour: str, *heard: Heard) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._sync = stores.store(url) if colour == "threads" else None
        self._async = stores.async_store(url) if colour == "loop" else None
        for each in heard:
            if self._sync is not None:
                self._sync.listen(each)
            else:
                self._on_loop(self._listen(each))

    async def _listen(self, heard: Heard) -> None:
        assert self._async is not None
        self._async.listen(heard)

    def _on_loop(self, running: Any) -> None:
        asyncio.run_coroutine_threadsafe(running, self.loop).result(HANG_SECONDS)

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            self._on_loop(self._async.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(params=["threads", "loop"])
def colour(request: pytest.FixtureRequest) -> str:
    """Whether threads listen, or a loop."""
    return str(request.param)


def _end(url: str, key: str, *, wakes: bool = True, frees: bool = False) -> None:
    with stores.store(url) as store:
        hold = store.perform(Claim("alice", key, os.urandom(16), b"", LEASE, RETENTION))
        assert isinstance(hold, Hold)
        store.perform(Release(hold, wakes=wakes) if frees else Complete(hold, Event.COMPLETE, ANSWER, wakes=wakes))


def _until_heard(url: str, heard: Heard) -> None:
    """End one operation after the other until one is heard of: a subscription takes its time."""
    keys: list[str] = []

    def is_heard() -> bool:
        keys.append(f"warm {os.urandom(4).hex()}")
        _end(url, keys[-1])
        return any(hint_of("alice", key) in heard for key in keys)

    until("something is heard", is_heard)


def test_what_ends_elsewhere_is_heard(redis_url: str, colour: str) -> None:
    """Whoever listens is told of an answer and of a key that was freed, but not of what nobody waits for."""
    heard = Heard()
    with Listening(redis_url, colour, heard):
        _until_heard(redis_url, heard)
        _end(redis_url, "silent", wakes=False)
        _end(redis_url, "freed", frees=True)
        _end(redis_url, "ended")
        until("both are heard of", lambda: {hint_of("alice", "freed"), hint_of("alice", "ended")} <= heard.names)
    assert hint_of("alice", "silent") not in heard
    assert len(heard.threads) == 1


def test_what_is_accepted_is_heard(redis_url: str, colour: str) -> None:
    """Workers hear that there is something to do."""
    heard = Heard()
    with Listening(redis_url, colour, heard), stores.store(redis_url) as store:
        _until_heard(redis_url, heard)
        store.perform(Claim("alice", "later", os.urandom(16), b"", LEASE, RETENTION, is_accepted=True))
        until("it is heard of", lambda: "accepted" in heard)


def test_one_subscription(redis_url: str, colour: str) -> None:
    """However many listen in a process, the server knows of one."""
    one, other = Heard(), Heard()
    with Listening(redis_url, colour, one, other):
        _until_heard(redis_url, one)
        _until_heard(redis_url, other)
        assert _subscribers(redis_url) == 1
    until("it is gone", lambda: _subscribers(redis_url) == 0)


def test_hints_come_again(colour: str) -> None:
    """When the server was killed and is back, so are the hints."""
    heard = Heard()
    with servers.redis(settings={"appendonly": "no"}) as server, Listening(server.url, colour, heard):
        _until_heard(server.url, heard)
        server.kill()
        server.start()
        heard.names.clear()
        _until_heard(server.url, heard)


def test_a_server_that_is_silent_is_left(redis_url: str, colour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is heard for long the server is asked, and one that answers is kept."""
    monkeypatch.setattr(listening, "SILENCE_SECONDS", 0.05)
    heard = Heard()
    with Listening(redis_url, colour, heard):
        _until_heard(redis_url, heard)
        pings = _pings(redis_url)
        until("it is asked", lambda: _pings(redis_url) >= pings + 3)
        heard.names.clear()
        _until_heard(redis_url, heard)


def test_any_node_of_a_cluster_hears_all(redis_cluster: servers.RedisCluster, colour: str) -> None:
    """In a Cluster hints reach every server, whichever one was subscribed to."""
    url, heard = cluster_url(redis_cluster.nodes), Heard()
    with Listening(url, colour, heard):
        _until_heard(url, heard)
        keys = [os.urandom(4).hex() for _ in range(20)]
        for key in keys:
            _end(url, key)
        until("all are heard of", lambda: {hint_of("alice", key) for key in keys} <= heard.names)


def test_closing_is_enough(redis_url: str, colour: str) -> None:
    """A store that is closed listens no more, and leaves no thread and no task."""
    before = threading.active_count()
    heard = Heard()
    with Listening(redis_url, colour, heard) as listener:
        _until_heard(redis_url, heard)
        loop = listener.loop
    assert threading.active_count() <= before  # A thread of an earlier test may have ended meanwhile.
    assert not asyncio.all_tasks(loop)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_listens_for_itself(redis_url: str) -> None:
    """A child hears nothing through its parent's connection, and may listen on one of its own."""
    heard = Heard()
    store = stores.store(redis_url)
    store.listen(heard)
    _until_heard(redis_url, heard)
    child = os.fork()
    if not child:
        try:
            mine = Heard()
            store.listen(mine)
            _until_heard(redis_url, mine)
            store.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    heard.names.clear()
    _until_heard(redis_url, heard)
    store.close()


def _subscribers(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        [(_, count)] = client.pubsub_numsub("semel:ended")
        return int(count)


def _pings(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.info("commandstats").get("cmdstat_ping", {}).get("calls", 0))

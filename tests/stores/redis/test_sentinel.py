"""What is special to a Redis behind sentinels: the store comes back on the new master, and what may be lost by then."""

import os
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import redis

from semel import stores
from semel.core.commands import Claim, Command, Complete, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.errors import StoreError, StoreNotReady
from tests.kit import servers
from tests.kit.servers.base import until
from tests.stores.redis.world import Asking

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"", LEASE, RETENTION)


def test_the_master_is_found(redis_sentinel: servers.RedisSentinel) -> None:
    """The store writes to whoever the sentinels say is the master."""
    for colour in ("threads", "loop"):
        with Asking(redis_sentinel.url, colour) as perform:
            assert isinstance(perform(claim(colour)), Hold)
    with redis.Redis.from_url(redis_sentinel.master().url) as client:
        assert len(list(client.scan_iter("semel:*", _type="hash"))) == 2


def test_an_unknown_service(redis_sentinel: servers.RedisSentinel) -> None:
    """A name that no sentinel knows is an error that says how to write it."""
    url = redis_sentinel.url.replace("/semel/", "/another/")
    with closing(stores.store(url)) as store, pytest.raises(StoreNotReady, match="another"):
        store.open()


@pytest.mark.parametrize("colour", ["threads", "loop"])
def test_fail_over(colour: str) -> None:
    """After a fail-over the store is back by itself, on the new master, which has what had reached it."""
    with servers.redis_sentinel() as watched, Asking(watched.url, colour) as perform:
        hold = perform(claim("before"))
        assert perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        old = watched.master()
        _until_copied(old)
        old.kill()
        until("the store is back", lambda: isinstance(_outcome(perform, claim("after")), Hold | Found))
        until("the other sentinels know of it", lambda: watched.master() is not old)
        found = perform(claim("before"))
        assert isinstance(found, Found)
        assert found.answer == ANSWER


def test_a_fail_over_may_lose_a_claim() -> None:
    """A claim that no replica had yet is gone after a fail-over: a retry runs again. The first is fenced off."""
    with servers.redis_sentinel() as watched, Asking(watched.url, "threads") as perform:
        old = watched.master()
        perform(claim("warm"))
        _until_copied(old)
        replicas = [node for node in watched.nodes if node is not old]
        # Both stop following, and ask to be promoted as they are.
        for node in replicas:
            with redis.Redis.from_url(node.url) as client:
                client.config_set("masterauth", "nobody's")
                client.config_set("masteruser", "nobody")
        with redis.Redis.from_url(old.url) as client:
            client.client_kill_filter(_type="replica")
            until("nobody follows", lambda: client.info("replication")["connected_slaves"] == 0)
        lost = perform(claim("lost"))
        assert isinstance(lost, Hold)
        old.kill()
        until("the store is back", lambda: isinstance(_outcome(perform, claim("after")), Hold | Found))
        again = perform(claim("lost"))
        assert isinstance(again, Hold)
        assert (again.attempt, again.token != lost.token) == (lost.attempt, True)
        assert perform(Complete(lost, Event.COMPLETE, ANSWER)) is Verdict.FENCED
        assert perform(Complete(again, Event.COMPLETE, ANSWER)) is Verdict.DONE


def _until_copied(master: servers.RedisServer) -> None:
    with redis.Redis.from_url(master.url) as client:
        until("both replicas have it all", lambda: client.wait(2, 1000) == 2)


def _outcome(perform: Any, command: Command[Any]) -> object:
    try:
        return perform(command)
    except StoreError as error:
        return error

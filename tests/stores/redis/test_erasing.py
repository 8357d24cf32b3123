"""Erasing one owner on Redis, where a walk through all keys takes several steps."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import redis

from semel.core.commands import Claim, Complete, Erase, EraseTrail, Look, Note
from semel.core.message import Answer
from semel.core.place import written_place
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores.redis import due
from tests.kit import servers
from tests.stores.redis.world import Asking, cluster_url

DAY = timedelta(days=1)
MANY = 40
CANARY = b"canary-of-acme"


def fill(ask: Asking, scope: str) -> None:
    for number in range(MANY):
        hold = ask(Claim(scope, f"key-{number}", os.urandom(16), b"", DAY, DAY))
        assert isinstance(hold, Hold)
        ask(Note(hold, "said"))
        ask(Complete(hold, Event.COMPLETE, Answer(201, ((b"location", CANARY),), CANARY)))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due, "STEP", 5)


@pytest.fixture(params=["lone", pytest.param("cluster", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "lone":
        yield f"{request.getfixturevalue('redis_url')}?audit=on"
        return
    with servers.redis_cluster() as cluster:
        yield f"{cluster_url(cluster.nodes)}?audit=on"


@pytest.mark.parametrize("colour", ["threads", "loop"])
@pytest.mark.usefixtures("small_steps")
def test_in_steps(where: str, colour: str) -> None:
    """A walk goes on at its server and its cursor, and comes past every record and every trail of the owner."""
    with Asking(where, colour) as ask:
        fill(ask, f"acme-{colour}")
        fill(ask, f"globex-{colour}")
        for kind in (Erase, EraseTrail):
            count, parts, place = 0, 0, None
            while True:
                done = ask(kind(f"acme-{colour}", 7, place))
                count, parts, place = count + done.count, parts + 1, done.further
                if place is None:
                    break
            assert count == MANY
            assert parts > 3
        assert ask(Look(f"acme-{colour}", "key-7")).answer == Answer(201, (), None)
        assert ask(Look(f"globex-{colour}", "key-7")).answer.body == CANARY


@pytest.mark.usefixtures("small_steps")
def test_a_server_that_has_left(redis_url: str) -> None:
    """A place at a server that has no data any more begins the walk again."""
    with Asking(redis_url, "threads") as ask:
        fill(ask, "acme")
        for place in (written_place(0, "127.0.0.1:1", "3"), written_place(0, "", "x")):
            assert ask(Erase("acme", 1000, place, is_preview=True)).count == MANY


def test_nothing_is_left_in_memory(redis_url: str) -> None:
    """After an erasure no value of the server has what was erased."""
    with Asking(f"{redis_url}?audit=on", "threads") as ask, redis.Redis.from_url(redis_url) as client:
        fill(ask, "acme")

        def is_there() -> bool:
            values = [client.hgetall(name) for name in client.scan_iter(_type="hash")]
            values += [client.lrange(name, 0, -1) for name in client.scan_iter(_type="list")]
            return CANARY in repr(values).encode() or b'"scope":"acme"' in repr(values).encode()

        assert is_there()
        ask(Erase("acme", 1000))
        ask(EraseTrail("acme", 1000))
        assert not is_there()

"""Replies that are lost: the command is sent again, and does nothing twice."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Self
from urllib.parse import urlsplit

import pytest

from semel.core.commands import Claim, Complete, Look, Park, Release, Renew, Save, TakeOver, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event, State
from semel.errors import StoreUnavailable
from tests.stores.redis.world import Asking, ageing

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")
STEPS = Progress((Done("effect", "charged", {"id": 1}),))


class Thief:
    """Stands before a Redis, passes everything on, and takes away the replies that it is told to."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = parts.hostname or "", parts.port or 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self._left = 0
        self.stolen = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []

    def steal(self, count: int = 1) -> None:
        """Take away the next replies, and cut the connection each time."""
        self._left = count

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    self._threads.append(threading.Thread(target=self._carry, args=pair))
                    self._threads[-1].start()

    def _carry(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(64 * 1024):
                # The greeting's replies are long, and are not what is to be lost.
                if is_reply and self._left and len(data) < 1000:
                    self._left -= 1
                    self.stolen += 1
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


@pytest.fixture
def thief(redis_url: str) -> Iterator[Thief]:
    with Thief(redis_url) as opened:
        yield opened


@pytest.fixture(params=["threads", "loop"])
def ask(request: pytest.FixtureRequest, thief: Thief) -> Iterator[Asking]:
    with Asking(thief.url, request.param) as asking:
        yield asking


def claim(key: str = "key") -> Claim:
    return Claim("alice", key, os.urandom(16), b"", LEASE, RETENTION)


def held(ask: Asking, key: str = "key") -> Hold:
    hold = ask(claim(key))
    assert isinstance(hold, Hold)
    return hold


def test_a_claim(ask: Asking, thief: Thief) -> None:
    """A claim whose reply was lost is made once: it finds the record that bears its token."""
    held(ask, "warm")
    asked = claim()
    thief.steal()
    found = ask(asked)
    assert thief.stolen == 1
    assert isinstance(found, Found)
    assert (found.token, found.attempt, found.state) == (asked.token, 1, State.PROCESSING)


def test_endings(ask: Asking, thief: Thief) -> None:
    """An answer and a release whose replies were lost are DONE, and were done once."""
    answered, freed = held(ask, "answered"), held(ask, "freed")
    assert ask(Complete(held(ask, "warm"), Event.COMPLETE, ANSWER)) is Verdict.DONE
    thief.steal()
    assert ask(Complete(answered, Event.COMPLETE, ANSWER)) is Verdict.DONE
    assert ask(Look("alice", "answered")).answer == ANSWER
    thief.steal()
    assert ask(Release(freed)) is Verdict.DONE
    assert ask(Look("alice", "freed")) is None
    assert thief.stolen == 2


def test_steps(ask: Asking, thief: Thief) -> None:
    """A step, a renewal and a park whose replies were lost are as if they had been said once."""
    hold = held(ask)
    assert ask(Save(hold, STEPS)) is Verdict.DONE
    thief.steal()
    assert ask(Save(hold, STEPS)) is Verdict.DONE
    ask(Renew(((hold, LEASE),)))
    thief.steal()
    assert ask(Renew(((hold, LEASE),))) == frozenset()
    thief.steal()
    assert ask(Park(hold)) is Verdict.DONE
    assert thief.stolen == 3


def test_a_take_over(ask: Asking, thief: Thief, redis_url: str) -> None:
    """A take-over whose reply was lost has happened once: the claim that follows finds its own token."""
    hold = held(ask)
    ask(Look("alice", "key"))
    ageing(redis_url)(LEASE)
    asked = claim()
    thief.steal()
    ask(TakeOver(asked, hold))
    found = ask(asked)
    assert isinstance(found, Found)
    assert (found.token, found.attempt, thief.stolen) == (asked.token, 2, 1)


def test_every_reply(ask: Asking, thief: Thief) -> None:
    """Where no reply ever comes back it is an error that says: it may have been done."""
    held(ask, "warm")
    thief.steal(1000)
    with pytest.raises(StoreUnavailable) as raised:
        ask(claim())
    assert raised.value.was_sent
    thief.steal(0)
    found = ask(claim())
    assert isinstance(found, Found)

"""What the statements make of an owner's lock: a process that holds it lives, and one that does not is dead.

Here the lock is held by a plain connection. Who holds it in earnest is tested in ``test_liveness.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import psycopg
import pytest

from semel.core.commands import (
    Again,
    Begin,
    Claim,
    Complete,
    FindStuck,
    Finish,
    Park,
    Release,
    Sweep,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.message import Answer, Head, Request
from semel.core.record import NO_TOKEN, Found, Hold
from semel.core.recovery import Progress
from semel.core.state import Event
from semel.stores import store
from semel.stores.postgres.joined import JoinedStatements
from semel.stores.postgres.signals import owner_lock
from semel.stores.postgres.statements import Statements
from semel.stores.statement import Joined, Names, Statement

T = TypeVar("T")

#: Far longer than a test takes: nothing here is over because its lease is.
LEASE, RETENTION = timedelta(hours=1), timedelta(hours=2)
ANSWER = Answer(201, (), b"{}")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")


def claim(key: str = "k", **more: Any) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", LEASE, RETENTION, **more)


class Process:
    """A process with a lock of its own, as far as the server can see one."""

    def __init__(self, url: str, *, has_lock: bool = True) -> None:
        self._lock = psycopg.connect(url, autocommit=True)
        self.connection = psycopg.connect(url, autocommit=True)
        self.owner = owner_lock() if has_lock else None
        self.statements = Statements(Names(), owner=lambda: self.owner)
        self.joined = JoinedStatements(self.statements, "the server")
        if has_lock:
            self._lock.execute("SELECT pg_advisory_lock(%s)", [self.owner])

    def die(self) -> None:
        """End, and return when the server has noticed."""
        pid = self._lock.info.backend_pid
        self._lock.close()
        lives = "SELECT FROM pg_stat_activity WHERE pid = %s"
        while self.connection.execute(lives, [pid]).fetchall():
            pass

    def run(self, statement: Statement[T]) -> T:
        cursor = psycopg.RawCursor(self.connection)
        cursor.execute(statement.sql.encode(), statement.parameters)
        return statement.read(cursor.fetchall())

    def join(self, joined: Joined[T]) -> T:
        return self.run(Statement(joined.query.numbered, joined.in_order, joined.read))

    def claim(self, asked: Claim) -> Any:
        return self.run(self.statements.claim([asked]))[0]

    def close(self) -> None:
        self._lock.close()
        self.connection.close()


@pytest.fixture
def url(postgres_url: str) -> str:
    made = store(postgres_url)
    made.migrate()
    made.close()
    return postgres_url


@pytest.fixture
def first(url: str) -> Iterator[Process]:
    made = Process(url)
    yield made
    made.close()


@pytest.fixture
def other(url: str) -> Iterator[Process]:
    made = Process(url)
    yield made
    made.close()


@pytest.fixture
def plain(url: str) -> Iterator[Process]:
    """One that has no lock, and so tests nobody's."""
    made = Process(url, has_lock=False)
    yield made
    made.close()


def owners(process: Process) -> list[int | None]:
    return [owner for (owner,) in process.connection.execute("SELECT owner FROM semel_keys ORDER BY key")]


def test_numbers_are_apart_from_others() -> None:
    """A number fits into PostgreSQL's bigint, is never drawn twice, and shows whose it is in ``pg_locks``."""
    numbers = [owner_lock() for _ in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert {number >> 32 for number in numbers} == {int.from_bytes(b"seml", "big")}


def test_the_living_are_left_alone(first: Process, other: Process) -> None:
    """While its lock is held a process lives: its key is in progress for all, itself included."""
    hold = first.claim(claim())
    for each in (first, other):
        found = each.claim(claim())
        assert isinstance(found, Found)
        assert not found.lease_is_over
        assert each.run(each.statements.take_over(TakeOver(claim(), hold))) is Again.AGAIN
        assert each.run(each.statements.of(FindStuck(9))) == ()
        assert each.run(each.statements.of(Sweep(hold))) is Verdict.FENCED
        assert each.run(each.statements.of(Park(hold, if_silent=True))) is Verdict.FENCED


def test_the_dead_are_taken_over_at_once(first: Process, other: Process) -> None:
    """When its lock is free a process is dead: whoever holds one of its own takes its keys over, within the lease."""
    hold = first.claim(claim())
    first.die()
    found = other.claim(claim())
    assert isinstance(found, Found)
    assert (found.lease_is_over, found.is_expired) == (True, False)
    heir = other.run(other.statements.take_over(TakeOver(claim(), hold)))
    assert isinstance(heir, Hold)
    assert heir.attempt == 2
    assert owners(other) == [other.owner]
    assert other.run(other.statements.complete([Complete(heir, Event.COMPLETE, ANSWER)])) == [Verdict.DONE]
    assert owners(other) == [None]


def test_who_has_no_lock_waits_for_the_lease(first: Process, plain: Process) -> None:
    """A process without a lock asks for nobody's, and what it claims bears none."""
    hold = first.claim(claim())
    first.die()
    found = plain.claim(claim())
    assert isinstance(found, Found)
    assert not found.lease_is_over
    assert plain.run(plain.statements.take_over(TakeOver(claim(), hold))) is Again.AGAIN
    assert plain.run(plain.statements.of(FindStuck(9))) == ()
    assert isinstance(plain.claim(claim("l")), Hold)
    assert owners(plain) == [first.owner, None]


def test_several_find_out_at_once(first: Process, other: Process, url: str) -> None:
    """Two that ask in the same moment both find the dead dead: neither is in the other's way."""
    first.claim(claim())
    first.die()
    third = Process(url)
    with other.connection.transaction(), third.connection.transaction():
        for each in (other, third):
            found = each.claim(claim())
            assert isinstance(found, Found)
            assert found.lease_is_over
    third.close()


def test_nothing_is_tested_that_needs_no_test(first: Process, other: Process) -> None:
    """A replay, a pending record and an expired lease take no lock."""
    ended = first.claim(claim("ended"))
    first.run(first.statements.complete([Complete(ended, Event.COMPLETE, ANSWER)]))
    first.claim(claim("pending", request=REQUEST, is_accepted=True))
    first.claim(claim("silent"))
    first.connection.execute("UPDATE semel_keys SET lease_expires_at = now() WHERE key = 'silent'")
    first.die()
    with other.connection.transaction():
        for key in ("ended", "pending", "silent"):
            assert isinstance(other.claim(claim(key)), Found)
        held = other.connection.execute("SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'")
        assert held.fetchall() == []


def test_accepted_record_has_no_owner(first: Process) -> None:
    """What is only accepted is nobody's, so no death can free it; who begins it is its owner."""
    hold = first.claim(claim(request=REQUEST, is_accepted=True))
    assert owners(first) == [None]
    begun = first.run(first.statements.take_over(TakeOver(claim(), hold, is_abandoned=True)))
    assert isinstance(begun, Hold)
    assert owners(first) == [first.owner]


def test_upkeep_sees_the_dead(first: Process, other: Process) -> None:
    """A dead process's keys are found stuck at once, silent from now on; swept, they are free at once, for all."""
    hold = first.claim(claim(request=REQUEST))
    assert other.run(other.statements.of(FindStuck(9))) == ()
    first.die()
    (stuck,) = other.run(other.statements.of(FindStuck(9)))
    assert stuck.hold == hold
    assert stuck.silent_for == timedelta(0)
    assert other.run(other.statements.of(Sweep(hold))) is Verdict.DONE
    assert owners(other) == [None]
    found = other.claim(claim())
    assert isinstance(found, Found)
    assert (found.lease_is_over, found.token) == (True, NO_TOKEN)


def test_the_dead_are_parked(first: Process, other: Process) -> None:
    """What a dead process did not say can be parked at once; resolved, it is nobody's."""
    hold = first.claim(claim())
    first.die()
    assert other.run(other.statements.of(Park(hold, if_silent=True))) is Verdict.DONE
    assert owners(other) == [None]
    assert other.run(other.statements.of(Unpark(hold, Progress()))) is Verdict.DONE
    assert owners(other) == [None]


def test_what_is_given_up_has_no_owner(first: Process) -> None:
    """A key that its worker has given up is nobody's."""
    hold = first.claim(claim(request=REQUEST, is_accepted=True))
    begun = first.run(first.statements.take_over(TakeOver(claim(), hold, is_abandoned=True)))
    assert isinstance(begun, Hold)
    assert first.run(first.statements.of(Release(begun))) is Verdict.DONE
    assert owners(first) == [None]


@pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "alive"])
def test_transaction_takes_over_from_the_dead(first: Process, other: Process, is_dead: bool) -> None:
    """In atomic mode, too, a dead process's key is taken over at once, and a live one's is not."""
    hold = first.claim(claim())
    if is_dead:
        first.die()
    asked = claim()
    with other.connection.transaction():
        seen = other.join(other.joined.begin(Begin(asked))).seen
        assert isinstance(seen, Found)
        assert seen.lease_is_over == is_dead
        heir = Hold("alice", "k", 2, asked.token)
        finish = other.joined.finish(Finish(asked, heir, hold, Event.COMPLETE, ANSWER))
        if is_dead:
            assert other.join(finish) is Verdict.DONE
            return
        with pytest.raises(psycopg.Error, match="semel: fenced"), other.connection.transaction():
            other.join(finish)

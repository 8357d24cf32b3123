"""What PostgreSQL itself counts of what it reads: index entries, and rows of Semel's tables. It runs no test.

Dead rows are made in large numbers and cannot be removed: vacuum is off, and an open transaction still sees them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg

from semel.core.commands import (
    Begin,
    Claim,
    Commit,
    Complete,
    Discard,
    Finish,
    Look,
    Mark,
    Note,
    Open,
    Park,
    ReadRequest,
    ReadTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Undo,
    Unpark,
    Verdict,
)
from semel.core.message import Answer, Head, Request
from semel.core.record import Found, Hold, Milestone
from semel.core.recovery import Begun, Done, Progress
from semel.core.state import Event
from semel.testing.conformance.handles import Handle

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")
REQUEST = Request(Head("POST", "/jobs", b"", ()), b"{}", "alice")
RIDE = Done("phase", "ride_created", {"id": 7})
STEPS, IN_DOUBT = Progress((RIDE,)), Progress((RIDE, Begun("charge_created")))

_COUNTED = """
SELECT indexrelname, idx_tup_read FROM pg_stat_user_indexes WHERE relname IN ('semel_keys', 'semel_audit')
 UNION ALL
SELECT relname || ' (rows)', seq_tup_read + idx_tup_fetch
  FROM pg_stat_user_tables WHERE relname IN ('semel_keys', 'semel_audit')
"""

_STARTED = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at)
SELECT 'alice', gen_random_uuid(), 'processing', 1, decode(md5(n::text), 'hex'), '', now(), now() + interval '1 day',
       now() + interval '1 day'
  FROM generate_series(1, %s) AS n
"""
_ENDED = """
UPDATE semel_keys
   SET state = 'complete', status = 200, headers = '[]', body = '', completed_at = now(), lease_expires_at = NULL
 WHERE state = 'processing'
"""
_NOTED = """
INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
SELECT now(), scope, key, attempt, 'claimed', 'filler' FROM semel_keys
"""


class Server:
    """One database, looked at from outside of the store."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def unvacuumed(self) -> Iterator[None]:
        """Keep every dead row in place, inside the block."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            for table in ("semel_keys", "semel_audit"):
                connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        with psycopg.connect(self._url) as old:
            old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            old.execute("SELECT count(*) FROM pg_class")
            yield

    def fill(self, count: int, *, analyse: bool) -> None:
        """Let *count* operations begin and end, without a trace in the counters."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute("SET track_counts = off")
            connection.execute(_STARTED, [count])
            connection.execute(_ENDED)
            connection.execute(_NOTED)
            if analyse:
                connection.execute("ANALYZE semel_keys, semel_audit")

    def counted(self) -> dict[str, int]:
        """What was read so far, by all who have disconnected."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            return dict(connection.execute(_COUNTED).fetchall())

    def until_all_have_left(self) -> None:
        """A backend has handed its counts in when it is gone. A pooler's stay, so they are ended."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            others = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle in transaction'"
            )
            while connection.execute(others).fetchall():
                time.sleep(0.005)


def _claim(key: str, **more: Any) -> Claim:
    return Claim("alice", key, os.urandom(16), b"fingerprint", more.pop("lease", LEASE), RETENTION, **more)


def _held(store: Handle, claim: Claim) -> Hold:
    hold = store.perform(claim)
    assert isinstance(hold, Hold), hold
    return hold


def _done(verdict: object) -> None:
    assert verdict is Verdict.DONE, verdict


def _first_execution(store: Handle, key: str) -> None:
    claim = _claim(key)
    hold = _held(store, claim)
    _done(store.perform(Complete(hold, Event.COMPLETE, ANSWER)))
    _done(store.perform(Complete(hold, Event.COMPLETE, ANSWER)))  # its reply was lost
    assert isinstance(store.perform(_claim(key)), Found)
    assert store.perform(Look("alice", key)) is not None
    store.perform(Settle(hold))
    store.perform(Note(hold, "replayed"))
    assert store.perform(ReadTrail("alice", key))


def _crowd(store: Handle, key: str) -> None:
    claims = [_claim(f"{key}-{number}") for number in range(8)]
    holds: Sequence[Any] = store.perform_all(claims)
    assert store.perform(Renew(tuple((hold, LEASE) for hold in holds))) == frozenset()
    for verdict in store.perform_all([Complete(hold, Event.COMPLETE, ANSWER) for hold in holds]):
        _done(verdict)


def _steps(store: Handle, key: str) -> None:
    hold = _held(store, _claim(key))
    _done(store.perform(Save(hold, STEPS)))
    _done(store.perform(Mark(hold, Milestone(0.5, "half"))))
    _done(store.perform(Complete(hold, Event.FAIL, ANSWER)))


def _freed(store: Handle, key: str) -> None:
    _done(store.perform(Release(_held(store, _claim(key)))))
    again = _held(store, _claim(key))
    _done(store.perform(Save(again, STEPS)))
    _done(store.perform(Release(again)))  # given up


def _taken_over(store: Handle, key: str) -> None:
    dead = _held(store, _claim(key, lease=timedelta(0)))
    _done(store.perform(Sweep(dead)))
    found = store.perform(_claim(key))
    assert isinstance(found, Found)
    heir = store.perform(TakeOver(_claim(key), Hold("alice", key, found.attempt, found.token)))
    assert isinstance(heir, Hold)
    _done(store.perform(Discard(heir)))


def _accepted(store: Handle, key: str) -> None:
    pending = _held(store, _claim(key, request=REQUEST, is_accepted=True))
    hold = store.perform(TakeOver(_claim(key), pending, is_abandoned=True))
    assert isinstance(hold, Hold)
    assert store.perform(ReadRequest(hold)) is not None
    _done(store.perform(Complete(hold, Event.COMPLETE, ANSWER)))


def _parked(store: Handle, key: str) -> None:
    hold = _held(store, _claim(key))
    _done(store.perform(Save(hold, IN_DOUBT)))
    _done(store.perform(Park(hold)))
    _done(store.perform(Resolution(hold, ANSWER)))
    other = _held(store, _claim(key + "-other"))
    _done(store.perform(Save(other, IN_DOUBT)))
    _done(store.perform(Park(other)))
    _done(store.perform(Unpark(other, STEPS)))


def _atomic(store: Handle, key: str) -> None:
    claim, lent = _claim(key), store.transaction()
    hold = lent.perform(Begin(claim))
    assert isinstance(hold, Hold)
    _done(lent.perform(Finish(claim, hold, None, Event.COMPLETE, ANSWER)))
    replay = store.transaction()
    assert isinstance(replay.perform(Begin(_claim(key))), Found)
    replay.perform(Undo())


def _phase(store: Handle, key: str) -> None:
    hold, lent = _held(store, _claim(key)), store.transaction()
    lent.perform(Open())
    _done(lent.perform(Commit(hold, STEPS)))
    _done(store.perform(Complete(hold, Event.COMPLETE, ANSWER)))


#: What becomes of one operation, in every way: in statements that the store makes, in sessions of its own.
OWN = (_first_execution, _steps, _freed, _taken_over, _accepted, _parked)
#: Many at once, of which a store may make one statement.
CROWD = (_crowd,)
#: The same in transactions of the application's.
LENT = (_atomic, _phase)

#: A statement that is prepared is planned five times for its values, and from then on perhaps once for all.
_ROUNDS_BEFORE, _ROUNDS_AFTER = 11, 4
_GROWTH = 4000
#: Of one index or table, by one journey, which are some ten statements on up to eight keys.
MAX_READS = 60


def excessive_reads(
    url: str,
    open_store: Callable[[], Handle],
    journeys: Sequence[Callable[[Handle, str], None]],
    *,
    start: int,
    analyse: bool,
) -> dict[str, float]:
    """What a journey reads too much of, on tables that grow from *start* rows to thousands while it is made again and
    again. With thousands there, a single statement that reads them all would be enough.
    """
    server = Server(url)
    with server.unvacuumed():
        before = server.counted()
        store = open_store()
        for size, rounds in ((start, _ROUNDS_BEFORE), (_GROWTH, _ROUNDS_AFTER)):
            server.fill(size, analyse=analyse and size == start)
            for number in range(rounds):
                for journey in journeys:
                    journey(store, f"{journey.__name__}-{size}-{number}")
        store.close()
        server.until_all_have_left()
        after = server.counted()
    journeys_made = (_ROUNDS_BEFORE + _ROUNDS_AFTER) * len(journeys)
    read = {name: (count - before[name]) / journeys_made for name, count in after.items()}
    assert read["semel_keys_pkey"] > 0.5, "The counters have not been handed in."
    return {name: count for name, count in read.items() if count > MAX_READS}

"""How many connections a store has, and how many workers one server bears through a pooler."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from semel.core.commands import Begin, Claim, Complete, FindStuck, Look, Renew, Save, Settle, Undo, Verdict
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.recovery import Done, Progress
from semel.core.state import Event
from semel.stores import AsyncStore, async_store, store
from semel.testing.conformance.handles import Handle, handle
from tests.kit.servers.base import until

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=24)
ANSWER = Answer(201, (), b"{}")
STEPS = Progress((Done("phase", "ride_created", {"id": 7}),))
WORKERS = 200

OURS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

WAITING = "SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"

both_colours = pytest.mark.parametrize("open_store", [store, async_store], ids=["sync", "async"])


def claim(key: str, scope: str = "alice") -> Claim:
    return Claim(scope, key, os.urandom(16), b"fingerprint", LEASE, RETENTION)


def answered(hold: Hold) -> Complete:
    return Complete(hold, Event.COMPLETE, ANSWER)


def work(opened: Handle) -> None:
    """Have statements of every kind carried out, many at once."""
    holds: list[Any] = opened.perform_all([claim(f"key-{number}") for number in range(8)])
    assert opened.perform(Save(holds[0], STEPS)) is Verdict.DONE
    assert opened.perform(Renew(((holds[0], LEASE),))) == frozenset()
    commands = [*(answered(hold) for hold in holds), *(Look("alice", "key-1") for _ in holds)]
    outcomes: list[Any] = opened.perform_all(commands)  # type: ignore[arg-type]
    assert outcomes[:8] == [Verdict.DONE] * 8
    assert opened.perform(Settle(holds[0])) is not None
    assert opened.perform(FindStuck(10)) == ()


@both_colours
@pytest.mark.parametrize("most", [1, 2, 4, 5])
def test_connections_are_bounded(migrated_postgres_url: str, open_store: Any, most: int) -> None:
    """With ``?connections=N``, a store does all that it does over N connections; beside them one renews leases."""
    opened = handle(open_store(f"{migrated_postgres_url}?connections={most}"))
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        work(opened)
        [(count,)] = connection.execute(OURS).fetchall()
    opened.close()
    assert count <= most + 1


@both_colours
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("waits", [Settle, answered], ids=["settle", "answer"])
def test_renewals_wait_for_none(migrated_postgres_url: str, open_store: Any, most: int, waits: Any) -> None:
    """However few connections there are, a lease is renewed while another command waits for a row that is locked."""
    with closing(handle(open_store(f"{migrated_postgres_url}?connections={most}"))) as opened:
        locked, free = opened.perform_all([claim("locked"), claim("free")])
        assert isinstance(locked, Hold)
        assert isinstance(free, Hold)
        with psycopg.connect(migrated_postgres_url) as operator, ThreadPoolExecutor() as threads:
            operator.execute("SELECT FROM semel_keys WHERE key = 'locked' FOR UPDATE")
            waiting = threads.submit(opened.perform, waits(locked))
            until("it waits for the row", lambda: bool(operator.execute(WAITING).fetchall()))
            assert opened.perform(Renew(((free, LEASE),))) == frozenset()
            assert not waiting.done()
            operator.rollback()
            waiting.result()


def patience(url: str) -> dict[Any, tuple[int, ...]]:
    """What the kernel was told about this process's connections to a server, by their own addresses: whether to ask a
    peer that is silent, when, how often, and how long to wait for it to confirm what was sent.
    """
    told: dict[Any, tuple[int, ...]] = {}
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    for file in [each for each in Path("/proc/self/fd").iterdir() if each.is_socket()]:
        with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as own:
            if own.getpeername()[1:] == (urlsplit(url).port,):
                asks = own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                told[own.getsockname()] = (asks, *(own.getsockopt(socket.IPPROTO_TCP, each) for each in options))
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="It looks at this process's sockets as Linux shows them.")
@pytest.mark.parametrize(
    "open_store, command",
    [(store, claim("k")), (store, Begin(claim("k"))), (async_store, Begin(claim("k")))],
    ids=["statement", "transaction", "transaction on a loop"],
)
def test_a_silent_server_is_asked(migrated_postgres_url: str, open_store: Any, command: Any) -> None:
    """A server's machine that dies without a word, while the reply to a statement is waited for, is noticed within
    seconds, and not after the hours that a kernel waits by itself. Statements on a loop have a time limit.
    """
    before = patience(migrated_postgres_url)
    with closing(handle(open_store(migrated_postgres_url))) as opened:
        asked: Any = opened.transaction() if isinstance(command, Begin) else opened
        asked.perform(command)
        made = [told for own, told in patience(migrated_postgres_url).items() if own not in before]
        assert made == [(1, 5, 5, 2, 10_000)]
        if isinstance(command, Begin):
            asked.perform(Undo())


@pytest.mark.slow
async def test_many_workers_share_few_connections(migrated_postgres_url: str, pgbouncer_server: Any) -> None:
    """Through PgBouncer, 200 workers with a store each fit a server that allows a hundred connections: they have two.
    Each does its own work, and of all that claim the same key, one wins.
    """
    url = pgbouncer_server.through(migrated_postgres_url) + "?connections=1"

    async def one(opened: AsyncStore, number: int) -> bool:
        hold = await opened.perform(claim("own", f"worker-{number}"))
        assert isinstance(hold, Hold)
        assert await opened.perform(Complete(hold, Event.COMPLETE, ANSWER)) is Verdict.DONE
        outcome = await opened.perform(claim("common"))
        assert isinstance(outcome, Hold | Found)
        return isinstance(outcome, Hold)

    workers = [async_store(url) for _ in range(WORKERS)]
    won = await asyncio.gather(*(one(opened, number) for number, opened in enumerate(workers)))
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        [(count,)] = connection.execute(OURS).fetchall()
        [(allowed,)] = connection.execute("SELECT current_setting('max_connections')::int").fetchall()
    for opened in workers:
        await opened.close()
    assert sum(won) == 1
    assert count <= 2 < allowed < WORKERS
    with closing(store(migrated_postgres_url)) as direct:
        assert isinstance(direct.perform(claim("own", "worker-199")), Found)

"""A process with an event loop that forks: its child has connections of its own, and takes none from its parent.

The kernel watches connections for both of them together. A child that closed what it has inherited would have the
parent's loop hear nothing more of it.
"""

import asyncio
import os
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable
from datetime import timedelta

import psycopg
import pytest
import redis

from semel.core.commands import Begin, Claim, Complete, Renew, Undo
from semel.core.hint import hint_of
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.stores import AsyncStore, async_store, store
from semel.stores.tiered import Tiered

LEASE, RETENTION = timedelta(seconds=30), timedelta(hours=1)

Use = Callable[[AsyncStore, str], Awaitable[object]]


def claim(key: str) -> Claim:
    return Claim("alice", key, os.urandom(16), b"", LEASE, RETENTION)


async def finish(used: AsyncStore, key: str) -> None:
    """Run an operation, or find that it has ended."""
    hold = await used.perform(claim(key))
    if isinstance(hold, Hold):
        await used.perform(Complete(hold, Event.COMPLETE, Answer(201), wakes=True))


async def hear(used: AsyncStore, key: str) -> None:
    """Run operations until it is heard that one has ended: what is said before one listens is lost."""
    heard: set[str] = set()
    used.listen(heard.add)
    said: set[str] = set()
    while not heard & said:
        name = f"{key} {len(said)}"
        said.add(hint_of("alice", name))
        await finish(used, name)


async def write(used: AsyncStore, key: str) -> None:
    """Begin a transaction as a handler's is begun, and undo it."""
    transaction = used.transaction()
    await transaction.perform(Begin(claim(key)))
    await transaction.perform(Undo())


async def renew(used: AsyncStore, key: str) -> None:
    """Renew a lease from a thread."""
    hold = await used.perform(claim(f"{key} {os.urandom(4).hex()}"))
    assert isinstance(hold, Hold)
    assert await asyncio.to_thread(used.renew, Renew(((hold, LEASE),))) == frozenset()


@pytest.mark.parametrize("use", [finish, hear, write, renew])
@pytest.mark.parametrize("kind", ["postgres", "redis", "tiered"])
def test_what_a_child_does_is_its_own(kind: str, use: Use, postgres_url: str, redis_url: str) -> None:
    """What the child does with the store, the parent goes on doing, over the connections that it had."""
    if kind == "redis" and use is write:
        pytest.skip("Redis has no transactions for handlers.")
    store(postgres_url).migrate()
    # A cache that is slow is left alone, which is not what is asked here.
    tiered = Tiered(durable=postgres_url, cache=redis_url, memory=0, cache_timeout=timedelta(seconds=30))
    used = async_store({"postgres": postgres_url, "redis": redis_url, "tiered": tiered}[kind])

    async def parent() -> None:
        await use(used, "before")
        connected = _connections(postgres_url, redis_url)
        child = _fork(use, used)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
        await use(used, "after")
        assert connected <= _connections(postgres_url, redis_url)
        if use is finish:
            found = await used.perform(claim("in the child"))
            assert isinstance(found, Found)
        await used.close()

    asyncio.run(parent())


def _connections(postgres_url: str, redis_url: str) -> set[object]:
    """Ask both servers who is connected, besides us."""
    others = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(postgres_url) as connection, redis.Redis.from_url(redis_url) as client:
        ours = client.client_id()
        listed = {each["id"] for each in client.client_list() if each["id"] != str(ours)}
        return listed | {pid for (pid,) in connection.execute(others)}


def _fork(use: Use, used: AsyncStore) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside threads from 3.12 on
        child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(_use_and_close(use, used))
            code = 0
        finally:
            os._exit(code)
    return child


async def _use_and_close(use: Use, used: AsyncStore) -> None:
    await use(used, "in the child")
    await used.close()


#: A thread makes the first call of its process, and is in the middle of importing the store when another one forks.
FIRST_CALL = """
import importlib.abc, os, signal, sys, threading

STORE = "semel.stores.sqlite.store"
begun, go_on, called = threading.Event(), threading.Event(), threading.Event()
# The last thing before the fork itself: the other thread may go on as far as it can.
os.register_at_fork(before=lambda: called.wait(0.5))
from semel.functions import once

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == STORE:
            begun.set()
            go_on.wait()

sys.meta_path.insert(0, Slow())

def call(key):
    return once(key, len, "four", store=sys.argv[1], name="length", compare=None)

first = threading.Thread(target=lambda: call("first") and called.set())
first.start()
begun.wait()
os.register_at_fork(before=go_on.set)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if call("second") == 4 else 1)
first.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fork_in_the_middle_of_the_first_call(sqlite_url: str) -> None:
    """A child that is forked while another thread makes the first call of its process makes its own calls."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FIRST_CALL, sqlite_url]
    subprocess.run(command, check=True)

"""What one tenant asks of a store does not hold up, or fail, what another asks: not by its size, number or trouble."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from semel.core.commands import Claim, Complete, Look, Settle, Verdict
from semel.core.message import Answer, Head, Request
from semel.core.record import Hold
from semel.core.state import Event
from semel.errors import StoreUnavailable
from semel.stores import async_store, store
from semel.stores.base import AsyncStore
from semel.stores.fair_queue import MAX_BATCH_BYTES
from semel.stores.postgres import store as sync_store
from semel.stores.postgres.address import SESSION
from tests.stores.colours import process, wait_until

LEASE, RETENTION = timedelta(minutes=5), timedelta(hours=24)
LARGE = 2 * MAX_BATCH_BYTES


def claim(scope: str, key: str, size: int = 0) -> Claim:
    request = Request(Head("POST", "/jobs", b"", ()), os.urandom(size), scope)
    return Claim(scope, key, os.urandom(16), b"fingerprint", LEASE, RETENTION, request=request, is_accepted=True)


@asynccontextmanager
async def opened(request: pytest.FixtureRequest, name: str) -> AsyncIterator[AsyncStore]:
    url = request.getfixturevalue(f"{name}_url")
    _migrate(url)
    async with async_store(url) as made_async:
        yield made_async


def in_order(steps: Mapping[str, asyncio.Future[Any]]) -> list[str]:
    """A list that will have the names in the order in which their steps end."""
    ended: list[str] = []
    for name, step in steps.items():
        step.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]  # bound at once
    return ended


on_every_store = pytest.mark.parametrize("name", ["postgres", "sqlite", "redis"])


@on_every_store
async def test_large_requests_do_not_hold_up_another_tenant(request: pytest.FixtureRequest, name: str) -> None:
    """With twelve large requests of one tenant on their way, a small one of another is claimed after one or two of
    them, and not after all.
    """
    async with opened(request, name) as keys:
        steps = {f"large-{number}": keys.perform(claim("many", f"{number}", LARGE)) for number in range(12)}
        steps["small"] = keys.perform(claim("other", "small"))
        ended = in_order(steps)
        got = await asyncio.gather(*steps.values())

        assert all(isinstance(each, Hold) for each in got)
        assert ended.index("small") <= 2


@on_every_store
async def test_large_answers_do_not_hold_up_another_tenant(request: pytest.FixtureRequest, name: str) -> None:
    """The same of answers that are stored."""
    async with opened(request, name) as keys:
        holds = {f"large-{number}": await keys.perform(_plain("many", f"{number}")) for number in range(12)}
        holds["small"] = await keys.perform(_plain("other", "small"))
        sizes = dict.fromkeys(holds, LARGE) | {"small": 10}
        steps = {key: keys.perform(_ended(hold, sizes[key])) for key, hold in holds.items()}
        ended = in_order(steps)

        assert set(await asyncio.gather(*steps.values())) == {Verdict.DONE}
        assert ended.index("small") <= 2


@on_every_store
async def test_many_requests_do_not_hold_up_another_tenant(request: pytest.FixtureRequest, name: str) -> None:
    """A thousand small requests of one tenant are several batches, and another tenant's is in the first that is made
    after it came.
    """
    async with opened(request, name) as keys:
        steps = {f"many-{number}": keys.perform(claim("many", f"{number}")) for number in range(1000)}
        steps["small"] = keys.perform(claim("other", "small"))
        ended = in_order(steps)
        await asyncio.gather(*steps.values())

        assert ended.index("small") < 300


async def test_statements_are_bounded_in_bytes(postgres_url: str) -> None:
    """No statement carries more than a megabyte of bodies, but for what is larger by itself, which goes alone."""
    _migrate(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(_RECORDING)
        async with async_store(postgres_url) as keys:
            sizes = [LARGE if number % 10 == 5 else MAX_BATCH_BYTES // 4 for number in range(30)]
            claims = [claim("alice", f"{number}", size) for number, size in enumerate(sizes)]
            await asyncio.gather(*map(keys.perform, claims))
            holds = await asyncio.gather(*[keys.perform(_plain("bob", f"{number}")) for number in range(30)])
            connection.execute("DELETE FROM sizes WHERE bytes = 0")
            await asyncio.gather(*[keys.perform(_ended(hold, size)) for hold, size in zip(holds, sizes, strict=True)])
        sent = connection.execute("SELECT rows, bytes FROM sizes").fetchall()

    assert sum(rows for rows, _ in sent) == 60
    assert all(size <= MAX_BATCH_BYTES or rows == 1 for rows, size in sent)
    assert any(rows > 1 for rows, _ in sent)


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_commit_that_hangs_holds_up_its_own_key_alone(postgres_url: str, colour: str) -> None:
    """While one worker waits to learn what became of its COMMIT, other keys are looked up."""
    _migrate(postgres_url)
    with process(colour, postgres_url) as ours, psycopg.connect(postgres_url) as hanging:
        slow, other = ours.perform(_plain("alice", "slow")), ours.perform(_plain("bob", "other"))
        assert isinstance(slow, Hold)
        assert isinstance(other, Hold)
        hanging.execute("SELECT FROM semel_keys WHERE key = 'slow' FOR UPDATE")
        settled = _begun(lambda: ours.perform(Settle(slow)))
        _until_one_waits_for_a_lock(postgres_url)

        assert ours.perform(Look("bob", "other")) is not None
        assert not settled.done()

        hanging.rollback()
        assert settled.result() is not None


async def test_locked_key_fails_alone(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that an open transaction has locked fails its own claim, and none of those that went out with it."""
    monkeypatch.setitem(SESSION, "lock_timeout", "50ms")
    _migrate(postgres_url)
    names = ["free-0", "locked", "free-1", "free-2"]
    async with await psycopg.AsyncConnection.connect(postgres_url) as operator, async_store(postgres_url) as keys:
        await operator.execute(_UNCOMMITTED, [bytes(16)])
        steps = [keys.perform(_plain(name, name)) for name in names]
        outcomes = dict(zip(names, await asyncio.gather(*steps, return_exceptions=True), strict=True))
        await operator.rollback()

    assert isinstance(outcomes.pop("locked"), StoreUnavailable)
    assert all(isinstance(each, Hold) for each in outcomes.values())


def test_locked_key_fails_alone_in_threads(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where threads share a statement."""
    monkeypatch.setattr(sync_store, "_OPTIONS", "-c lock_timeout=50ms")
    _migrate(postgres_url)
    with psycopg.connect(postgres_url) as operator, sync_store.PostgresStore(postgres_url) as keys:
        operator.execute(_UNCOMMITTED, [bytes(16)])
        outcomes = keys._claims._outcomes([_plain(name, name) for name in ("free-0", "locked", "free-1")])
        operator.rollback()

    assert [type(each) for each in outcomes] == [Hold, StoreUnavailable, Hold]


def _migrate(url: str) -> None:
    with closing(store(url)) as made:
        made.migrate()


def _plain(scope: str, key: str) -> Claim:
    return Claim(scope, key, os.urandom(16), b"fingerprint", LEASE, RETENTION)


def _ended(hold: Any, size: int) -> Complete:
    return Complete(hold, Event.COMPLETE, Answer(200, (), os.urandom(size)))


def _begun(call: Callable[[], Any]) -> Future[Any]:
    """Call it in a thread that the test does not wait for."""
    pool = ThreadPoolExecutor(1)
    begun = pool.submit(call)
    pool.shutdown(wait=False)
    return begun


def _until_one_waits_for_a_lock(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as watcher:
        wait_until(lambda: watcher.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())


_UNCOMMITTED = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at)
VALUES ('locked', 'locked', 'processing', 1, %s, '', now(), now(), now())
"""

#: How many rows each statement adds or ends, and how many bytes of bodies they have.
_RECORDING = b"""
CREATE TABLE sizes (rows bigint, bytes bigint);
CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sizes
    SELECT count(*), coalesce(sum(octet_length(coalesce(request_body, '')) + octet_length(coalesce(body, ''))), 0)
      FROM changed;
    RETURN NULL;
END $$;
CREATE TRIGGER added AFTER INSERT ON semel_keys
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION record();
CREATE TRIGGER ended AFTER UPDATE ON semel_keys
    REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION record();
"""

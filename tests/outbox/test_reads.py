"""What a claim reads, counted by PostgreSQL itself: it does not grow with the table, nor with dead rows."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest

from semel import stores
from semel.core.outbox import Ending
from semel.publishers.discard import Discard
from semel.stores import AsyncStore
from semel.stores.dialect import messages_of
from semel.stores.outbox import OutboxStatements, carry_out
from semel.work.relay import AsyncRelay

FILL = """
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, payload)
SELECT gen_random_uuid(), 'events', 'order-' || number % {keys}, 't', 'application/json', '\\x31'
  FROM generate_series(1, {count}) AS number
"""
ASIDE = """
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, payload, state, due_at)
SELECT gen_random_uuid(), 'events', 'late-' || number % {keys}, 't', 'application/json', '\\x31',
       CASE WHEN number <= {heads} THEN 'waiting' ELSE 'behind' END, now() + interval '{due} s'
  FROM generate_series(1, {count}) AS number
"""
READ = """
SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'semel_outbox')
     + (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'semel_outbox')
"""
OTHERS = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle in transaction'
"""
CLAIMS = 20
TOKEN = b"0123456789abcdef"
SIZE = 10
#: Ten messages are found, looked up, checked for others of their key, updated and deleted: about ten entries for each.
MAX_READ = 25 * SIZE


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[AsyncStore]:
    opened = stores.async_store(postgres_url)
    yield opened
    await opened.close()


@contextmanager
def unvacuumed(url: str) -> Iterator[None]:
    """Keep every dead row in place, inside the block."""
    run(url, "ALTER TABLE semel_outbox SET (autovacuum_enabled = off)")
    with psycopg.connect(url) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT count(*) FROM pg_class")
        yield


def fill(url: str, count: int, keys: int = 50) -> None:
    """Add *count* messages, which have *keys* keys."""
    run(url, FILL.format(count=count, keys=keys))


def run(url: str, sql: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.encode())


def counted(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        return int(connection.execute(READ).fetchall()[0][0])


async def read_by_claims(url: str, store: AsyncStore, relay: AsyncRelay) -> float:
    """How many index entries one claim of ten messages reads, with its settlement."""
    for _ in range(6):  # Until the cursor has followed.
        await claim(relay)
    before = await counted_when_all_have_left(url, store)
    for _ in range(CLAIMS):
        await claim(relay)
    return (await counted_when_all_have_left(url, store) - before) / CLAIMS


async def claim(relay: AsyncRelay) -> None:
    claimed = await relay.claim(SIZE, aside=False)
    assert len(claimed.messages) == SIZE
    await relay.settle([Ending(message.id, "delivered") for message in claimed.messages])


async def counted_when_all_have_left(url: str, store: AsyncStore) -> int:
    """What was read so far: a session tells its counters when it ends."""
    await store.close()
    with psycopg.connect(url, autocommit=True) as connection:
        while connection.execute(OTHERS).fetchall() != [(0,)]:  # noqa: ASYNC110 - nothing tells when they have left
            await asyncio.sleep(0.01)
    return counted(url)


@pytest.mark.parametrize("keys", [50, 60_000])
async def test_with_many_pending(postgres_url: str, store: AsyncStore, keys: int) -> None:
    """With 60,000 messages waiting, of few keys or each of its own, a claim reads what it takes, and no more: also
    where the planner knows nothing of the table.
    """
    fill(postgres_url, 60_000, keys)
    relay = AsyncRelay(store, "events", Discard("events", ""))
    assert await read_by_claims(postgres_url, store, relay) < MAX_READ
    await relay.close()


async def test_with_many_dead_rows(postgres_url: str, store: AsyncStore) -> None:
    """After 20,000 messages were sent, while an open transaction keeps every dead row, it reads no more than before."""
    with unvacuumed(postgres_url):
        fill(postgres_url, 20_000)
        relay = AsyncRelay(store, "events", Discard("events", ""))
        assert (await relay.run_once()).sent == 20_000
        fill(postgres_url, 2000)
        assert await read_by_claims(postgres_url, store, relay) < MAX_READ
        await relay.close()


async def test_after_many_second_tries(postgres_url: str, store: AsyncStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 20,000 messages were sent that were due again, while dead rows are kept, it reads no more than before."""
    # On a busy machine two seconds are over in the middle of it, and one claim of the twenty looks back.
    monkeypatch.setattr("semel.core.cursor.LOOK_BACK_EVERY", 3600.0)
    with unvacuumed(postgres_url):
        run(postgres_url, ASIDE.format(heads=20_000, due=-60, keys=20_000, count=20_000))
        relay = AsyncRelay(store, "events", Discard("events", ""))
        while (await relay.run_once()).sent:
            pass
        fill(postgres_url, 2000)
        assert await read_by_claims(postgres_url, store, relay) < MAX_READ
        await relay.close()


async def test_behind_a_poison_key(postgres_url: str, store: AsyncStore) -> None:
    """With 5,000 messages set aside behind a dead letter, a claim of others reads no more."""
    fill(postgres_url, 3000)
    run(
        postgres_url,
        "INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, content_type, payload, state, ended_at) "
        "SELECT gen_random_uuid(), 'events', 'poison', 't', 'application/json', '\\x31', "
        "CASE number WHEN 1 THEN 'dead' ELSE 'behind' END, now() FROM generate_series(1, 5000) AS number",
    )
    relay = AsyncRelay(store, "events", Discard("events", ""))
    assert await read_by_claims(postgres_url, store, relay) < MAX_READ
    await relay.close()


@pytest.mark.parametrize("is_known", [False, True], ids=["", "analysed"])
@pytest.mark.parametrize("heads", [0, 10])
async def test_beside_what_is_set_aside(postgres_url: str, store: AsyncStore, heads: int, *, is_known: bool) -> None:
    """Beside 60,000 that are ready, to free ten keys, and to settle ten that lead others, reads these keys alone: also
    where the planner knows that no message has a token yet.
    """
    fill(postgres_url, 60_000, 60_000)
    run(postgres_url, ASIDE.format(heads=heads, due=0, keys=10, count=2000))
    if is_known:
        run(postgres_url, "ANALYZE semel_outbox")
    relay = AsyncRelay(store, "events", Discard("events", ""))
    before = await counted_when_all_have_left(postgres_url, store)
    await relay.free()
    claimed = await relay.claim(20, aside=False)
    assert await relay.settle([Ending(message.id, "delivered") for message in claimed.messages]) > 10 * heads
    assert await counted_when_all_have_left(postgres_url, store) - before < MAX_READ / SIZE * len(claimed.messages)
    await relay.close()


@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("ending", ["delivered", "failed", "dead", "released"])
async def test_a_batch_of_many(postgres_url: str, store: AsyncStore, ending: str, *, keep: bool) -> None:
    """To renew and to settle 500 of 60,000 reads these alone, however they end: also where the planner knows that no
    message has a token yet.
    """
    fill(postgres_url, 60_000, 60_000)
    run(postgres_url, "ANALYZE semel_outbox")
    statements, minute = OutboxStatements(messages_of(store)), timedelta(minutes=1)
    how = {"after": 0, "due_from": 0.0, "floor": 0, "bytes": 10_000_000, "aside": False}
    claimed = await carry_out(store, statements.claim("events", TOKEN, minute, 500, **how))
    ids = [message.id for message in claimed.messages]
    before = await counted_when_all_have_left(postgres_url, store)
    assert await carry_out(store, statements.renew(ids, TOKEN, minute)) == 500
    endings = [Ending(each, ending, minute) for each in ids]
    assert await carry_out(store, statements.settle("events", TOKEN, endings, keep=keep)) == 500
    assert await counted_when_all_have_left(postgres_url, store) - before < MAX_READ / SIZE * 500


async def test_which_have_something_to_send(postgres_url: str, store: AsyncStore) -> None:
    """Whether a destination has something to send is found without reading the 2,000 that wait for a later try."""
    run(postgres_url, ASIDE.format(heads=2000, due=3600, keys=10, count=2000))
    before = await counted_when_all_have_left(postgres_url, store)
    assert await carry_out(store, OutboxStatements(messages_of(store)).pending(["events"], [0])) == []
    assert await counted_when_all_have_left(postgres_url, store) - before < SIZE

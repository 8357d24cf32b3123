"""The inbox's reaper: what it deletes, when, what it never touches, and what it reads."""

from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

import psycopg
import pytest

from semel.errors import StoreUnavailable
from semel.flows.receive import InboxReport
from semel.inbox import Inbox, Ran
from semel.stores import Store, async_store, store
from semel.work import AsyncInboxReaper, InboxReaper, Plan
from tests.inbox.consumers import execute, receipts

DAY = timedelta(days=1)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as opened:
        opened.migrate()
    return found


@pytest.fixture
def opened(url: str) -> Iterator[Store]:
    with closing(store(url)) as made:
        yield made


def fill(url: str, opened: Store) -> None:
    """Messages that were handled, one that fails, and one that is parked; all but the new one a month old."""

    def fail(_connection: object) -> None:
        raise ValueError

    inbox = Inbox(opened, consumer="billing", max_attempts=2)
    for number in range(5):
        inbox.receive(f"old-{number}", lambda _: None)
    for message in ("failing", "parked", "parked"):
        with suppress(ValueError):
            inbox.receive(message, fail)
    by = "30 * 86400000" if url.startswith("sqlite") else "interval '30 days'"
    execute(url, f"UPDATE semel_inbox SET changed_at = changed_at - {by}")
    inbox.receive("new", lambda _: None)


def test_old_receipts_are_deleted(url: str, opened: Store) -> None:
    """Receipts of handled messages go when they are past retention; the rest stays, however old it is."""
    fill(url, opened)
    assert InboxReaper(opened, retention=31 * DAY).run_once() == InboxReport()
    assert InboxReaper(opened, batch=2).run_once() == InboxReport(5)
    assert receipts(url) == {"failing": ("failing", 1), "parked": ("parked", 2), "new": ("done", 0)}
    assert InboxReaper(opened).run_once().is_idle
    # Past its retention a message is new again: that is why it is longer than any broker redelivers.
    assert Inbox(opened, consumer="billing").receive("old-0", lambda _: 7) == Ran(7)


async def test_on_a_loop(url: str, opened: Store) -> None:
    """The same, of a store for an event loop."""
    fill(url, opened)
    async with async_store(url) as other:
        assert await AsyncInboxReaper(other).run_once() == InboxReport(5)


def test_an_unreachable_store() -> None:
    """A store that is away ends the run, and the report says so."""
    with closing(store("postgresql://u@127.0.0.1:1/none")) as away:
        report = InboxReaper(away).run_once()
    assert isinstance(report.error, StoreUnavailable)
    assert not report.is_idle


def test_the_plan_has_it() -> None:
    """It runs beside every application of which the store keeps messages, and beside no other."""
    for where, is_there in (("sqlite:///x.db", True), ("postgresql://h/d", True), ("memory://", False)):
        names = [each.name for each in Plan().services(store(where))]
        assert ("inbox reaper" in names) is is_there, where


def test_it_reads_only_what_it_deletes(postgres_url: str) -> None:
    """On PostgreSQL the old ones are found along their index, whatever the size of the table."""
    with closing(store(postgres_url)) as opened:
        opened.migrate()
        rows = "SELECT 'c', 'm-' || n, 'done', 0, now() - interval '{}' FROM generate_series({}, {}) AS n"
        insert = "INSERT INTO semel_inbox (consumer, message_id, state, attempts, changed_at) "
        execute(postgres_url, insert + rows.format("1 day", 1, 5000))
        execute(postgres_url, insert + rows.format("20 days", 5001, 5010))
        execute(postgres_url, "ANALYZE semel_inbox")
        with psycopg.connect(postgres_url, autocommit=True) as other:
            read = "SELECT seq_scan, idx_tup_read FROM pg_stat_all_tables AS t, pg_stat_all_indexes AS i WHERE "
            read += "t.relname = 'semel_inbox' AND i.indexrelname = 'semel_inbox_age'"
            before = other.execute(read).fetchall()[0]
            assert InboxReaper(opened).run_once() == InboxReport(10)
            opened.close()
            other.execute("SELECT pg_stat_force_next_flush()")
            after = other.execute(read).fetchall()[0]
    assert after[0] == before[0]
    assert after[1] - before[1] <= 20

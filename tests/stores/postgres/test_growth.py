"""What services and people read on PostgreSQL, by its own counters: it grows neither with the table, nor with dead rows
that an open transaction keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from semel.core.commands import (
    Browse,
    Command,
    Filter,
    FindStuck,
    Reap,
    ReapInbox,
    Search,
    Survey,
    Unpark,
    Verdict,
)
from semel.core.recovery import Progress
from semel.core.state import State
from semel.flows.upkeep import ABANDONED, hold_of
from semel.stores import Store, store
from semel.stores.outbox import OutboxStatements, carry_out
from semel.stores.postgres import bounds
from semel.stores.transaction import at_once
from tests.reading import Server

DAY = timedelta(days=1)
SMALL, LARGE = 1000, 50_000
#: What one of them may read more of a large table than of a small one: levels of an index, a page or two.
SLACK = 50

FILL = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at, completed_at,
                        expires_at, upkeep, lease_expires_at)
SELECT 'acct-' || n %% 20, %(kind)s || n, state, 1, decode(md5(n::text), 'hex'), '',
       CASE state WHEN 'complete' THEN 200 END, CASE state WHEN 'complete' THEN '[]' END,
       CASE state WHEN 'complete' THEN ''::bytea END, at, CASE state WHEN 'complete' THEN at END,
       at + interval '1 day', %(upkeep)s::text,
       CASE state WHEN 'processing' THEN now() + interval '1 hour' END
  FROM (SELECT n, %(state)s::text AS state, now() - %(age)s::interval - n * interval '1 millisecond' AS at
          FROM generate_series(1, %(rows)s::bigint) AS n) AS made
"""
ENDED = """
UPDATE semel_keys
   SET state = 'complete', status = 200, headers = '[]', body = '', completed_at = now(),
       lease_expires_at = NULL, upkeep = NULL
 WHERE upkeep = 'open'
"""
RECEIPTS = """
INSERT INTO semel_inbox (consumer, message_id, state, attempts, changed_at)
SELECT 'billing', %(kind)s || n, 'done', 0, now() - %(age)s::interval
  FROM generate_series(1, %(rows)s::bigint) AS n
"""
SENT = """
INSERT INTO semel_outbox (id, aggregatetype, type, state, ended_at, content_type, payload)
SELECT gen_random_uuid(), 'events', 'paid', 'sent', now(), 'text/plain', '' FROM generate_series(1, %(rows)s::bigint)
"""

#: Pages of at most so many records, as people ask for.
ASKED: dict[str, Command[Any]] = {
    "sweep": FindStuck(100),
    "reap": Reap(100, ABANDONED),
    "reap inbox": ReapInbox(100, DAY),
    "survey": Survey(100),
    "keys list": Browse(50),
    "keys list --state": Browse(50, state=State.PROCESSING),
    "survey of the newest": Survey(100, 100),
    "newest": Search(Filter(), 50, 100),
    "failed": Search(Filter(state=State.FAILED), 50, 100),
    "unfinished": Search(Filter(state=State.PROCESSING), 50, 100),
}


def read_by(url: str, act: Callable[[], object], close: Callable[[], None]) -> int:
    """How many index entries and rows were read, by those who have left."""
    server = Server(url)
    close()
    server.until_all_have_left()
    before = _counted(url)
    act()
    close()
    server.until_all_have_left()
    return _counted(url) - before


def _counted(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes) + (SELECT sum(seq_tup_read) "
            "FROM pg_stat_user_tables WHERE relname IN ('semel_keys', 'semel_inbox', 'semel_outbox'))"
        ).fetchall()
    return int(rows[0][0])


def run(url: str, sql: str, **parameters: object) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET track_counts = off")
        connection.execute(sql.encode(), parameters)


def all_read(url: str, opened: Store) -> dict[str, int]:
    found = {}
    for name, command in ASKED.items():
        opened.perform(command)  # Once, so that it knows where the live entries begin.
        found[name] = read_by(url, partial(opened.perform, command), opened.close)
    return found


def grow(url: str, opened: Store, rows: int) -> None:
    """Add live records, and as many dead entries to each index that is walked along."""
    run(url, FILL, kind=f"over-{rows}-", state="complete", age="30 hours", upkeep=None, rows=rows)
    run(url, RECEIPTS, kind=f"over-{rows}-", age="3 days", rows=rows)
    while opened.perform(Reap(10_000, ABANDONED)).total or opened.perform(ReapInbox(10_000, DAY)):
        pass
    run(url, FILL, kind=f"open-{rows}-", state="processing", age="2 hours", upkeep="open", rows=rows)
    run(url, ENDED)
    run(url, FILL, kind=f"live-{rows}-", state="complete", age="1 hour", upkeep=None, rows=rows)
    run(url, RECEIPTS, kind=f"live-{rows}-", age="1 hour", rows=rows)
    opened.perform(FindStuck(1))


@contextmanager
def patient(monkeypatch: pytest.MonkeyPatch, url: str) -> Iterator[Store]:
    """A store that does not look back while it is watched, however busy the machine is."""
    monkeypatch.setattr(bounds, "LOOK_BACK_SECONDS", 1e9)
    with Server(url).unvacuumed(), closing(store(url)) as opened:
        yield opened


@pytest.mark.slow
def test_services_read_no_more(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50,000 records, and as many dead entries in each index, every service and every page reads what it does
    with a thousand.
    """
    with patient(monkeypatch, migrated_postgres_url) as opened:
        grow(migrated_postgres_url, opened, SMALL)
        small = all_read(migrated_postgres_url, opened)
        grow(migrated_postgres_url, opened, LARGE)
        large = all_read(migrated_postgres_url, opened)
    assert {name: (small[name], read) for name, read in large.items() if read > small[name] + SLACK} == {}


def test_reaping_reads_what_it_deletes(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch after the other, while an open transaction keeps all that is deleted: the last reads as the first."""
    with patient(monkeypatch, migrated_postgres_url) as opened:
        run(migrated_postgres_url, FILL, kind="k", state="complete", age="30 hours", upkeep=None, rows=6000)
        assert opened.perform(Reap(4000, ABANDONED)).deleted == 4000
        opened.perform(Reap(500, ABANDONED))
        read = read_by(migrated_postgres_url, lambda: opened.perform(Reap(500, ABANDONED)), opened.close)
        assert opened.perform(Reap(2000, ABANDONED)).deleted == 1000
    assert read < 4 * 500


def test_what_gets_in_below_is_found(migrated_postgres_url: str) -> None:
    """A record that an operator lets go on is older than all that are followed, and is found at once: with few dead
    entries, every walk begins at the beginning.
    """
    url = migrated_postgres_url
    with closing(store(url)) as opened:
        run(url, FILL, kind="new-", state="processing", age="1 minute", upkeep="open", rows=3)
        run(url, FILL, kind="old-", state="unknown", age="2 hours", upkeep="parked", rows=1)
        assert opened.perform(FindStuck(10)) == ()
        [parked] = opened.perform(Browse(1, state=State.UNKNOWN))
        assert opened.perform(Unpark(hold_of(parked), Progress())) is Verdict.DONE
        assert [each.hold.key for each in opened.perform(FindStuck(10, with_no_token=True))] == ["old-1"]


def test_what_was_sent_is_not_read(migrated_postgres_url: str) -> None:
    """With thousands of messages that were sent and are kept, a look for old ones reads none of them."""
    run(migrated_postgres_url, SENT, rows=5000)
    with closing(store(migrated_postgres_url)) as opened:
        assert opened.dialect
        outbox = OutboxStatements(opened.dialect)

        def reap() -> None:
            assert at_once(carry_out(opened, outbox.reap("events", DAY, 100)))[0] == 0

        read = read_by(migrated_postgres_url, reap, opened.close)
    assert read < SLACK


def test_what_was_sent_is_deleted_once(migrated_postgres_url: str) -> None:
    """Batches of old messages go on where the last one ended, and what an open transaction keeps is not read again."""
    url = migrated_postgres_url
    run(url, SENT, rows=3000)
    run(url, "UPDATE semel_outbox SET ended_at = ended_at - interval '2 days' + seq * interval '1 millisecond'")
    run(url, SENT, rows=10)
    with Server(url).unvacuumed(), closing(store(url)) as opened:
        assert opened.dialect
        outbox = OutboxStatements(opened.dialect)
        place = 0.0

        def reap(limit: int) -> int:
            nonlocal place
            count, place = at_once(carry_out(opened, outbox.reap("events", DAY, limit, place)))
            return int(count)

        assert reap(2500) == 2500
        assert read_by(url, partial(reap, 100), opened.close) < 5 * 100
        assert reap(1000) == 400
        assert reap(1000) == 0


def test_many_dead_entries_are_passed_now_and_then() -> None:
    """The look-up begins at the beginning where few entries are dead; where many are, once in some seconds."""
    bound, place = bounds.Bound(), datetime(2026, 1, 1, tzinfo=UTC)
    assert bound.start(0.0) == bounds.BEGINNING
    bound.note(bounds.BEGINNING, place, bounds.MAX_DEAD, 0.0)
    assert bound.start(0.1) == bounds.BEGINNING
    bound.note(bounds.BEGINNING, place, bounds.MAX_DEAD + 1, 0.1)
    assert bound.start(0.2) == place
    bound.note(place, place, 10, 0.2)
    assert bound.start(5.0) == place
    assert bound.start(5.2) == bounds.BEGINNING
    bound.note(bounds.BEGINNING, place, 10_000_000, 5.2)
    assert bound.start(100.0) == place
    assert bound.start(106.0) == bounds.BEGINNING

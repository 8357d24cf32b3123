"""Erasing one owner on PostgreSQL: what is read for it, and what happens beside it."""

import os
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import psycopg
import pytest

from semel.core.commands import Claim, Complete, Erase, Left, Look
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event, State
from semel.flows.erase import EraseReport, erase
from semel.guard.running import run as run_flow
from semel.stores import Store, store
from semel.work.service import ServicePorts
from tests.stores.postgres.test_growth import read_by, run

DAY = timedelta(days=1)
FILL = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at, completed_at,
                        expires_at)
SELECT %(scope)s, 'key-' || n, 'complete', 1, decode(repeat('01', 16), 'hex'), '', 201, '[]', 'body', now(), now(),
       now() + interval '1 day'
  FROM generate_series(1, %(rows)s::bigint) AS n
"""
LINES = """
INSERT INTO semel_audit (at, scope, key, attempt, event, actor)
SELECT now(), %(scope)s, 'key-' || n, 1, 'said', 'me' FROM generate_series(1, %(rows)s::bigint) AS n
"""


@pytest.fixture
def keys(migrated_postgres_url: str) -> Iterator[Store]:
    with closing(store(migrated_postgres_url)) as opened:
        yield opened


@pytest.mark.parametrize("analyse", [False, True], ids=["never analysed", "analysed"])
def test_what_is_read(migrated_postgres_url: str, keys: Store, analyse: bool) -> None:
    """An erasure reads the records and lines of one owner a few times over, and none of others', in small parts too."""
    url, own, others = migrated_postgres_url, 300, 5000
    for scope, rows in (("aaa", others), ("acme", own), ("acme2", others), ("zzz", others)):
        run(url, FILL, scope=scope, rows=rows)
        run(url, LINES, scope=scope, rows=rows)
    if analyse:
        run(url, "VACUUM ANALYZE")

    def in_parts() -> None:
        place, count = None, 0
        while True:
            done = keys.perform(Erase("acme", 10, place))
            place, count = done.further, count + done.count
            if place is None:
                break
        assert count == own

    assert read_by(url, in_parts, keys.close) <= 1.1 * own
    reads = read_by(url, lambda: run_flow(erase, ServicePorts(keys), "acme"), keys.close)
    assert reads <= 3.3 * own


def test_beside_a_transaction_that_holds_a_record(migrated_postgres_url: str, keys: Store) -> None:
    """A record that another transaction has locked is not waited for: it is left, and the next run erases it."""
    for key in ("locked", "other"):
        hold = keys.perform(Claim("acme", key, os.urandom(16), b"", DAY, DAY))
        assert isinstance(hold, Hold)
        keys.perform(Complete(hold, Event.COMPLETE, Answer(201, (), b"body")))
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("SELECT 1 FROM semel_keys WHERE key = 'locked' FOR UPDATE")
        report = run_flow(erase, ServicePorts(keys), "acme")
        assert report == EraseReport(1, 0, (Left("acme", "locked", State.COMPLETE),))
    assert run_flow(erase, ServicePorts(keys), "acme") == EraseReport(1)
    record = keys.perform(Look("acme", "locked"))
    assert record is not None
    assert record.answer == Answer(201, (), None)

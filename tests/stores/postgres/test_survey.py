"""What a survey reads on PostgreSQL does not depend on the size of the tables."""

import psycopg
import pytest

from semel.core.commands import Survey
from semel.stores import store

MANY = 30_000

#: Ended, sent and handled long ago: none of it is counted.
FILL = (
    """
    INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body,
                            created_at, completed_at, expires_at)
    SELECT 'a', n::text, 'complete', 1, decode(repeat('01', 16), 'hex'), '', 201, '[]', '',
           now() - interval '1 day', now() - interval '1 day', now() + interval '1 day'
      FROM generate_series(1, %(many)s) AS n
    """,
    """
    INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, state, ended_at, content_type, payload)
    SELECT gen_random_uuid(), 'events', n::text, 'paid', 'sent', now(), 'text/plain', ''
      FROM generate_series(1, %(many)s) AS n
    """,
    """
    INSERT INTO semel_inbox (consumer, message_id, state, attempts)
    SELECT 'billing', n::text, 'done', 0 FROM generate_series(1, %(many)s) AS n
    """,
    "INSERT INTO semel_keys_watermark (swept_to) VALUES (now() - interval '1 hour') ON CONFLICT DO NOTHING",
)


@pytest.mark.parametrize("is_analysed", [False, True], ids=["never analysed", "analysed"])
def test_a_survey_walks_along_no_table(migrated_postgres_url: str, is_analysed: bool) -> None:
    """However many records have ended, messages were sent and receipts are kept, a survey reads none of them."""
    with (
        psycopg.connect(migrated_postgres_url, autocommit=True) as connection,
        store(migrated_postgres_url) as keys,
    ):
        for statement in FILL:
            connection.execute(statement, {"many": MANY})
        if is_analysed:
            connection.execute("ANALYZE")
        seen = keys.perform(Survey(1000, with_messages=True)).gauges
        assert (seen.in_flight, seen.outbox_pending, seen.outbox_dead, seen.inbox_parked) == (0, 0, 0, 0)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        rows = connection.execute(
            "SELECT relname, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables"
        ).fetchall()
    assert {name: read for name, read in rows if read > MANY // 2} == {}

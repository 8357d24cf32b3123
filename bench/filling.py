"""Tables with many finished keys, made fast by the database itself. It measures nothing.

Every key is a random one that can be computed again from its number, so that any of them can be asked for. They were
made in the last day and are kept for a day, by some thousand owners; :data:`EXPIRED` of them are past their retention.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from contextlib import closing
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import redis

from semel.core.message import Answer
from semel.stores.headers import written
from semel.stores.redis.records import digest_of

SCOPES = 5000
#: What a reaper finds: the same number in a table of any size.
EXPIRED = 12_000
DAY = timedelta(days=1)
HEADERS = ((b"content-type", b"application/json"), (b"location", b"/payments/pay_8f14e45fceea167a5a36ded4"))
BODY = b'{"id":"pay_8f14e45fceea167a5a36ded4","amount":4200,"currency":"EUR","description":"' + b"x" * 179 + b'"}'
ANSWER = Answer(201, HEADERS, BODY)
REQUEST_LINE = "POST /payments"
#: As long as a fingerprint is: a version, a recipe, two digests.
FINGERPRINT = bytes([3]) + bytes(range(36))
#: Of one statement, or one pipeline.
CHUNK = 250_000
_PIPELINE = 2000

_POSTGRES = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,
                        completed_at, expires_at, request_line)
SELECT 'acct-' || (n * 7919 %% %(scopes)s), md5('k' || n)::uuid::text, 'complete', 1, decode(md5(n::text), 'hex'),
       %(fingerprint)s, 201, %(headers)s, %(body)s, at, at + interval '40 milliseconds', at + interval '1 day',
       %(request_line)s
  FROM (SELECT n, CASE WHEN n <= %(expired)s THEN now() - interval '25 hours' + n * interval '100 milliseconds'
                       ELSE now() - interval '23 hours 30 minutes' * (1 - n::float8 / %(rows)s::float8)
                            - interval '1 minute' END AS at
          FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n) AS made
"""
_OVER = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,
                        completed_at, expires_at)
SELECT 'acct-' || n %% 100, 'over-' || n, 'complete', 1, decode(md5(n::text), 'hex'), %(fingerprint)s, 200, '[]', '',
       at, at, at + interval '1 day'
  FROM (SELECT n, now() - interval '30 hours' - n * interval '1 millisecond' AS at
          FROM generate_series(1, %(count)s::bigint) AS n) AS made
"""
_FOLLOWED = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at,
                        upkeep)
SELECT 'acct-' || n %% 100, 'followed-' || n, 'processing', 1, decode(md5(n::text), 'hex'), %(fingerprint)s, at,
       now() + interval '1 day', at + interval '1 day', 'open'
  FROM (SELECT n, now() - interval '1 hour' - n * interval '1 millisecond' AS at
          FROM generate_series(1, %(count)s::bigint) AS n) AS made
"""
_NOT_FOLLOWED = """
UPDATE semel_keys
   SET state = 'complete', status = 200, headers = '[]', body = '', completed_at = now(), lease_expires_at = NULL,
       upkeep = NULL
 WHERE upkeep = 'open' AND %(count)s > 0 AND %(fingerprint)s::bytea IS NOT NULL
"""
_SQLITE = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,
                        completed_at, expires_at, request_line)
VALUES (?, ?, 'complete', 1, ?, ?, 201, ?, ?, ?, ?, ?, ?)
"""


def scope_of(number: int) -> str:
    """Return whose key it is."""
    return f"acct-{number * 7919 % SCOPES}"


def key_of(number: int) -> str:
    """Return the key with this number: a random UUID."""
    made = hashlib.md5(f"k{number}".encode(), usedforsecurity=False).hexdigest()
    return f"{made[:8]}-{made[8:12]}-{made[12:16]}-{made[16:20]}-{made[20:]}"


def expired_of(rows: int) -> int:
    """Return how many of so many are past their retention."""
    return min(EXPIRED, rows // 2)


def fill_postgres(url: str, rows: int) -> None:
    """Add *rows* finished keys, on pages as full as two writes of each leave them."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute("ALTER TABLE semel_keys SET (fillfactor = 90)")
        for first in range(1, rows + 1, CHUNK):
            connection.execute(
                _POSTGRES,
                {
                    "scopes": SCOPES,
                    "rows": rows,
                    "expired": expired_of(rows),
                    "first": first,
                    "last": min(first + CHUNK - 1, rows),
                    "fingerprint": FINGERPRINT,
                    "headers": written(HEADERS),
                    "body": BODY,
                    "request_line": REQUEST_LINE,
                },
            )
        connection.execute("ALTER TABLE semel_keys SET (fillfactor = 40)")
        connection.execute("VACUUM ANALYZE semel_keys")
        connection.execute("CHECKPOINT")


def leave_dead_rows(url: str, count: int) -> None:
    """Add *count* keys past their retention, for a reaper to delete; and *count* that were followed and have ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in (_OVER, _FOLLOWED, _NOT_FOLLOWED):
            connection.execute(statement, {"count": count, "fingerprint": FINGERPRINT})


def fill_sqlite(url: str, rows: int) -> None:
    """Add *rows* finished keys to a file."""
    with closing(sqlite3.connect(urlsplit(url).path[1:])) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -200000")
        connection.executemany(_SQLITE, (_sqlite_row(number, *_times(number, rows)) for number in range(1, rows + 1)))
        connection.commit()


def _sqlite_row(number: int, made: int, expires: int) -> tuple[Any, ...]:
    token = hashlib.md5(str(number).encode(), usedforsecurity=False).digest()
    headers = written(HEADERS)
    return (
        *(scope_of(number), key_of(number), token, FINGERPRINT, headers, BODY),
        *(made, made + 40, expires, REQUEST_LINE),
    )


def _times(number: int, rows: int) -> tuple[int, int]:
    """Return when it was made and when it expires, in milliseconds."""
    now = int(time.time() * 1000)
    day = DAY // timedelta(milliseconds=1)
    if number <= expired_of(rows):
        made = now - 25 * day // 24 + number * 100
    else:
        made = now - int(0.979 * day * (1 - number / rows)) - 60_000
    return made, made + day


def fill_redis(url: str, rows: int) -> None:
    """Add *rows* finished keys, with the time to live that each has. None is past it: Redis removes those by itself."""
    with redis.Redis.from_url(url) as client:
        for first in range(1, rows + 1, _PIPELINE):
            pipeline = client.pipeline(transaction=False)
            for number in range(first, min(first + _PIPELINE, rows + 1)):
                made, _ = _times(number, rows)
                made = max(made, int(time.time() * 1000) - 23 * 3_600_000)
                _add_to_redis(pipeline, number, made)
            pipeline.execute()


def _add_to_redis(pipeline: Any, number: int, made: int) -> None:
    scope, key = scope_of(number), key_of(number)
    name = b"semel:" + digest_of(scope, key)
    expires = made + DAY // timedelta(milliseconds=1)
    pipeline.hset(
        name,
        mapping={
            "scope": scope,
            "key": key,
            "state": "complete",
            "attempt": "1",
            "fingerprint": FINGERPRINT.hex(),
            "token": hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest(),
            "created_at": made * 1000,
            "completed_at": (made + 40) * 1000,
            "expires_at": expires * 1000,
            "status": "201",
            "headers": written(HEADERS),
            "body": BODY,
            "request_line": REQUEST_LINE,
        },
    )
    pipeline.pexpireat(name, expires)

"""How long each page of the console takes on a large table: ``python -m bench console --rows 1000000``. It measures the
page as a browser gets it, from the request to the last byte, without a network.

The rows are written by SQL, in the order of time, with one in a thousand unfinished; on PostgreSQL there are as many
messages as a tenth of them, a tenth of which are dead.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

from semel.console.access import User
from semel.console.http import Request
from semel.console.rendering import operation_name, short_digest
from semel.console.site import Site
from semel.core.commands import FindStuck
from semel.stores import store
from tests.kit import servers

#: Milliseconds that a page may take, of whatever size the table is.
GOAL = 50.0
ROUNDS = 9

_FILL_POSTGRES = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,
                        lease_expires_at, completed_at, expires_at, request_line, upkeep)
SELECT 'acct-' || (n %% %(scopes)s), 'key-' || n, state, 1, decode(md5(n::text), 'hex'), '\\x00',
       CASE WHEN ended THEN 201 END, CASE WHEN ended THEN '[]' END, CASE WHEN ended THEN '\\x7b7d'::bytea END,
       at, CASE WHEN state = 'processing' THEN at + interval '30 seconds' END, CASE WHEN ended THEN at END,
       at + interval '90 days', 'POST /payments', CASE state WHEN 'unknown' THEN 'parked' END
  FROM (SELECT n, state, state = 'complete' AS ended,
               clock_timestamp() - (%(rows)s - n) * interval '10 milliseconds' AS at
          FROM (SELECT n, CASE WHEN n %% 1000 = 7 THEN 'processing' WHEN n %% 10000 = 13 THEN 'unknown'
                               ELSE 'complete' END AS state
                  FROM generate_series(1, %(rows)s) AS n) AS numbered) AS made
"""
_MESSAGES = """
INSERT INTO semel_outbox (id, aggregatetype, aggregateid, type, state, ended_at, due_at, content_type, payload, error)
SELECT gen_random_uuid(), 'to-' || n %% 20, 'order-' || n, 'paid',
       CASE n %% 10 WHEN 0 THEN 'dead' WHEN 1 THEN 'waiting' WHEN 2 THEN 'behind' ELSE 'ready' END,
       CASE n %% 10 WHEN 0 THEN now() END, CASE n %% 10 WHEN 1 THEN now() END, 'text/plain', 'x', 'time-out'
  FROM generate_series(1, %(messages)s) AS n;
INSERT INTO semel_inbox (consumer, message_id, state, attempts)
SELECT 'consumer-' || n %% 10, n, CASE n %% 20 WHEN 0 THEN 'parked' WHEN 1 THEN 'failing' ELSE 'done' END, 3
  FROM generate_series(1, %(messages)s) AS n;
"""
_FILL_SQLITE = """
INSERT INTO semel_keys (scope, key, state, attempt, token, fingerprint, status, headers, body, created_at,
                        lease_expires_at, completed_at, expires_at, request_line)
WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :rows),
made AS (
    SELECT n, now - (:rows - n) * 10 AS at,
           CASE WHEN n % 1000 = 7 THEN 'processing' WHEN n % 10000 = 13 THEN 'unknown' ELSE 'complete' END AS state
    FROM numbers, semel_keys_clock
)
SELECT 'acct-' || (n % :scopes), 'key-' || n, state, 1, randomblob(16), x'00',
       CASE WHEN state = 'complete' THEN 201 END, CASE WHEN state = 'complete' THEN '[]' END,
       CASE WHEN state = 'complete' THEN x'7b7d' END, at, CASE WHEN state = 'processing' THEN at + 30000 END,
       CASE WHEN state = 'complete' THEN at END, at + 7776000000, 'POST /payments'
FROM made
"""


@dataclass(frozen=True)
class Took:
    """One page: the middle of some rounds, and the slowest, in milliseconds."""

    store: str
    page: str
    middle: float
    slowest: float


def measure_console(rows: int, stores: list[str]) -> list[Took]:
    """Fill a table of each store, and look at each page."""
    found: list[Took] = []
    for name in stores:
        with _FILLED[name](rows) as url:
            found += _pages(name, url, rows)
    return found


def listed(found: list[Took], rows: int) -> str:
    """Say it in lines."""
    said = [f"{rows:,} rows; milliseconds for a page, the middle of {ROUNDS} and the slowest (goal {GOAL:.0f})"]
    said += [
        f"{each.store:<11} {each.page:<34} {each.middle:7.1f} {each.slowest:8.1f}{'' if each.middle <= GOAL else '  !'}"
        for each in found
    ]
    return "\n".join(said)


def as_json(found: list[Took], rows: int) -> str:
    """Say it for programs."""
    return json.dumps({"rows": rows, "goal": GOAL, "pages": [asdict(each) for each in found]}, indent=2)


def _pages(name: str, url: str, rows: int) -> list[Took]:
    old, new = f"key-{rows // 3}", f"key-{rows}"
    scope = f"acct-{(rows // 3) % _scopes(rows)}"
    places = {
        "overview": "/",
        "operations, newest": "/operations",
        "operations, state=complete": "/operations?state=complete",
        "operations, state=failed (none)": "/operations?state=failed",
        "operations, state=stuck": "/operations?state=stuck",
        "operations, state=unknown": "/operations?state=unknown",
        "operations, a scope": f"/operations?scope={scope}",
        "operations, scope and key": f"/operations?scope={scope}&key={old}",
        "operations, a new key": f"/operations?key={new}",
        "operations, an old key (a look)": f"/operations?key={old}",
        "operations, a digest": f"/operations?key={short_digest(new)}",
        "operations, endpoint, age, status": "/operations?endpoint=refunds&age=%3E5m&status=4xx",
        "operations, reason": "/operations?reason=timeout",
        "one operation": f"/operation/{operation_name(scope, old)}",
        "outbox": "/outbox",
        "outbox, a destination": "/outbox?to=to-3",
        "outbox, dead letters of one": "/outbox?state=dead&to=to-10",
        "inbox": "/inbox",
    }
    site = Site(url, lambda _: None)
    try:
        return [Took(name, page, *_timed(site, place)) for page, place in places.items()]
    finally:
        site.close()


def _timed(site: Site, place: str) -> tuple[float, float]:
    path, _, query = place.partition("?")
    request = Request("GET", path, "", query, user=User("bench", ["read", "act", "bodies"]))
    times = []
    for _ in range(ROUNDS + 1):
        site.samples._last = None  # noqa: SLF001 - each round counts, as the first to look does
        began = time.perf_counter()
        response = site.respond(request)
        times.append((time.perf_counter() - began) * 1000)
        if response.status != 200:
            raise RuntimeError(f"{place}: {response.status}")
    return statistics.median(times[1:]), max(times[1:])


def _scopes(rows: int) -> int:
    return max(rows // 1000, 1)


@contextmanager
def _postgres(rows: int) -> Iterator[str]:
    with ExitStack() as stack:
        server = stack.enter_context(servers.postgres(fsync=False))
        _migrate(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            connection.execute(_FILL_POSTGRES, {"rows": rows, "scopes": _scopes(rows)})
            psycopg.ClientCursor(connection).execute(_MESSAGES, {"messages": rows // 10})
            connection.execute("VACUUM ANALYZE")
        keys = store(server.url)
        keys.perform(FindStuck(1))  # The services have walked along the table, as they do in an hour of its life.
        keys.close()
        yield server.url


@contextmanager
def _sqlite(rows: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        path = Path(folder) / "semel.db"
        url = f"sqlite:///{path}"
        _migrate(url)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(_FILL_SQLITE, {"rows": rows, "scopes": _scopes(rows)})
            connection.commit()
        yield url


def _migrate(url: str) -> None:
    keys = store(url)
    keys.migrate()
    keys.close()


_FILLED: dict[str, Callable[[int], Any]] = {"PostgreSQL": _postgres, "SQLite": _sqlite}
STORES = tuple(_FILLED)

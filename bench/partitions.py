"""What partitions cost and save on PostgreSQL: ``python -m bench partitions``. Pages, bytes of WAL and index entries
are the server's own counts; only the times depend on the machine.

The first rows set the two layouts side by side: answers in their rows, and large ones in partitions by day. The others
show what was not taken, keys in hash partitions, by the real statements of a claim, a batch and a replay.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import psycopg

from bench import filling
from bench.counters import SETTINGS, PostgresCounters, Work
from bench.growth import BATCH, LEASE, RETENTION
from bench.table import aligned
from semel.core.commands import Claim, Complete, Reap, RotateAnswers
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.flows.upkeep import ABANDONED
from semel.stores import Store, store
from semel.stores.migration import Layout
from semel.stores.postgres.address import SESSION
from semel.stores.postgres.statements import MAX_BATCH, Statements
from semel.stores.statement import Names, Statement
from tests.kit import servers

BODIES = (264, 1500, 10_000)
KEYS = 2000
#: Of keys in hash partitions; 0: an ordinary table.
PARTITIONS = (0, 1, 4, 16)
LAYOUTS: tuple[Layout, ...] = ("plain", "partitioned")

#: Compresses to somewhat more than a half.
_ALPHABET = '{"id": 0123456789abcdef, "name": "'

_PAST = "UPDATE semel_keys SET expires_at = expires_at - interval '4 days'"
_PAST_ANSWERS = """
DO $$
DECLARE day date := (SELECT min(day) FROM semel_answers) - 4;
BEGIN
    EXECUTE format('ALTER TABLE semel_answers DETACH PARTITION semel_answers_%s', to_char(day + 4, 'YYMMDD'));
    EXECUTE format('UPDATE semel_answers_%s SET day = day - 4', to_char(day + 4, 'YYMMDD'));
    EXECUTE format('ALTER TABLE semel_answers_%s RENAME TO semel_answers_%s',
                   to_char(day + 4, 'YYMMDD'), to_char(day, 'YYMMDD'));
    EXECUTE format('ALTER TABLE semel_answers ATTACH PARTITION semel_answers_%s FOR VALUES IN (%L)',
                   to_char(day, 'YYMMDD'), day);
END $$
"""
_HASHED = """
ALTER TABLE semel_keys RENAME TO plain_keys;
ALTER INDEX semel_keys_pkey RENAME TO plain_pkey;
ALTER INDEX semel_keys_expiry RENAME TO plain_expiry;
ALTER INDEX semel_keys_age RENAME TO plain_age;
ALTER INDEX semel_keys_upkeep RENAME TO plain_upkeep;
CREATE TABLE semel_keys (LIKE plain_keys INCLUDING DEFAULTS INCLUDING CONSTRAINTS, PRIMARY KEY (scope, key))
    PARTITION BY HASH (scope, key);
CREATE INDEX semel_keys_expiry ON semel_keys (expires_at)
 WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked';
CREATE INDEX semel_keys_age ON semel_keys (created_at);
CREATE INDEX semel_keys_upkeep ON semel_keys (upkeep, created_at) WHERE upkeep IS NOT NULL;
"""


@dataclass(frozen=True)
class Row:
    """What one operation took, on the average."""

    table: str
    #: Bytes of a body, or how many hash partitions.
    size: int
    operation: str
    work: Work


def measure_partitions(keys: int = KEYS) -> list[Row]:
    """Do everything in both layouts, and with keys in hash partitions."""
    with servers.postgres(settings=SETTINGS | {"full_page_writes": "off"}) as server:
        rows = [each for body in BODIES for layout in LAYOUTS for each in _laid_out(server.url, layout, body, keys)]
        return rows + [each for count in PARTITIONS for each in _hashed(server.url, count, keys)]


def _laid_out(server: str, layout: Layout, body: int, keys: int) -> Iterator[Row]:
    with _database(server, f"{layout}_{body}") as url, closing(PostgresCounters(url)) as counters:
        with closing(store(url)) as opened:
            opened.lay_out(layout)
        claims = [_claim(number) for number in range(keys)]
        holds: list[Hold] = []
        steps: dict[str, tuple[int, Callable[[Store], Any]]] = {
            "claim": (keys, lambda opened: holds.extend(_held(opened, each) for each in claims)),
            "completion": (keys, lambda opened: _each(lambda hold: _completed(opened, hold, body), holds)),
            "replay": (keys, lambda opened: _each(lambda claim: _replayed(opened, claim), claims)),
        }
        for name, (times, run) in steps.items():
            yield Row(layout, body, name, _counted(url, counters, times, run))
        _execute(url, "VACUUM ANALYZE semel_keys", _PAST, "VACUUM semel_keys")
        if layout == "partitioned" and _any(url):
            _execute(url, _PAST_ANSWERS)
        batches = keys // BATCH
        reaped = _counted(url, counters, batches, lambda opened: _each(lambda _: _reaped(opened), range(batches)))
        yield Row(layout, body, f"reap of {BATCH}", reaped)
        yield Row(layout, body, f"vacuum after {BATCH}", _counted(url, counters, batches, lambda _: _vacuum(url)))
        if layout == "partitioned":
            # What was read is counted by the index, and goes with it.
            dropped = replace(_counted(url, counters, batches, _rotated), entries=None)
            yield Row(layout, body, f"drop after {BATCH}", dropped)


def _hashed(server: str, count: int, keys: int) -> Iterator[Row]:
    """The statements as they are; no service, since those find rows by their place in one table."""
    table = f"{count} hash partitions" if count else "no hash partitions"
    with _database(server, f"hashed_{count}") as url, closing(PostgresCounters(url)) as counters:
        if count:
            made = (
                f"CREATE TABLE semel_keys_{n} PARTITION OF semel_keys FOR VALUES WITH (MODULUS {count}, REMAINDER {n})"
                " WITH (fillfactor = 40)"
                for n in range(count)
            )
            _execute(url, _HASHED, *made)
        statements = Statements(Names())
        singles = [[_claim(number)] for number in range(keys)]
        batches = [[_claim(keys + start + n) for n in range(MAX_BATCH)] for start in range(0, keys, MAX_BATCH)]
        for name, asked in (("claim", singles), (f"batch of {MAX_BATCH}", batches), ("found", singles)):
            work = _sent(url, counters, [statements.claim(each) for each in asked])
            yield Row(table, count, name, work)


@contextmanager
def _database(server: str, name: str) -> Iterator[str]:
    url = urlsplit(server)._replace(path=f"/{name}").geturl()
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        with closing(store(url)) as opened:
            opened.migrate()
        yield url
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def _counted(url: str, counters: PostgresCounters, times: int, run: Callable[[Store], Any]) -> Work:
    with closing(store(url)) as opened:
        counters.opening()
        counters.begin()
        run(opened)
    return counters.end(times, times)


def _sent(url: str, counters: PostgresCounters, statements: Sequence[Statement[Any]]) -> Work:
    options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in SESSION.items())
    with psycopg.connect(url, autocommit=True, options=options, prepare_threshold=0) as connection:
        connection.cursor_factory = psycopg.RawCursor
        counters.begin()
        for each in statements:
            connection.execute(each.sql.encode(), each.parameters, binary=True).fetchall()
    return counters.end(len(statements), len(statements))


def _each(do: Callable[[Any], None], several: Iterable[Any]) -> None:
    for each in several:
        do(each)


def _claim(number: int) -> Claim:
    return Claim(
        filling.scope_of(number),
        filling.key_of(number),
        os.urandom(16),
        filling.FINGERPRINT,
        LEASE,
        RETENTION,
        request_line=filling.REQUEST_LINE,
    )


def _held(opened: Store, claim: Claim) -> Hold:
    hold = opened.perform(claim)
    if not isinstance(hold, Hold):
        raise TypeError
    return hold


def _completed(opened: Store, hold: Hold, size: int) -> None:
    body = "".join(random.choices(_ALPHABET, k=size)).encode()  # noqa: S311 - no secret
    opened.perform(Complete(hold, Event.COMPLETE, Answer(201, filling.HEADERS, body)))


def _replayed(opened: Store, claim: Claim) -> None:
    found = opened.perform(claim)
    if not isinstance(found, Found) or found.answer is None or found.answer.body is None:
        raise TypeError


def _reaped(opened: Store) -> None:
    if opened.perform(Reap(BATCH, ABANDONED)).total != BATCH:
        raise RuntimeError("There was not enough to reap.")


def _rotated(opened: Store) -> None:
    while opened.perform(RotateAnswers(BATCH)).total:
        pass


def _vacuum(url: str) -> None:
    _execute(url, "VACUUM semel_keys")


def _any(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return bool(connection.execute("SELECT FROM semel_answers LIMIT 1").fetchall())


def _execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for each in statements:
            connection.execute(each.encode())


def listed(found: list[Row]) -> str:
    """Say it in a table."""
    rows: list[tuple[str, ...]] = [("", "body", "", "pages", "WAL", "entries read", "server ms, this machine")]
    for each in found:
        work = each.work
        is_hashed = "hash" in each.table
        figures = (work.pages, work.written, work.entries, work.server_ms)
        rows.append((each.table, "" if is_hashed else str(each.size), each.operation, *map(_figure, figures)))
    return "\n".join([*aligned(rows), "", "each figure is of one operation; WAL in bytes, without full pages."])


def _figure(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2g}" if figure < 1 else f"{figure:,.0f}"


def as_json(found: list[Row]) -> str:
    """Say it for programs."""
    return json.dumps([asdict(each) for each in found], indent=2)

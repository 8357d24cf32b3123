"""The programs of docs/how-to/outbox.md run, and do what the page says."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import asyncpg
import httpx
import psycopg
import pytest

from semel import stores
from semel.outbox import Outbox
from tests.docs.served import ROOT, asgi, load

MESSAGES = "SELECT aggregatetype, aggregateid, type, payload FROM semel_outbox ORDER BY seq"
PAID = ("events", "order-17", "order.paid", b'{"order":17}')

DJANGO = """
from django.core.management import call_command
from tests.docs.served import load
example = load("outbox/django_shop")
call_command("migrate", verbosity=0)
print(example.pay(17))
"""


@pytest.fixture
def postgres(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection]:
    """A database with Semel's tables and the shop's own, named by ``DATABASE_URL``."""
    monkeypatch.setenv("DATABASE_URL", migrated_postgres_url)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (number integer NOT NULL)")
        yield connection


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """The same in the file that the programs name."""
    monkeypatch.chdir(tmp_path)
    with closing(stores.store("sqlite:///shop.db")) as store:
        store.migrate()
    with closing(sqlite3.connect("shop.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, number INTEGER NOT NULL)")
        yield connection


def ran(name: str) -> list[str]:
    """Run a program as its reader would; return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "examples" / f"{name}.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("name, scheme", [("outbox/psycopg_shop", ""), ("outbox/sqlalchemy_shop", "+psycopg")])
def test_drivers(name: str, scheme: str, postgres: psycopg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order and its message are committed, and the program prints the message's id."""
    monkeypatch.setenv("DATABASE_URL", os.environ["DATABASE_URL"].replace("postgresql", f"postgresql{scheme}", 1))
    printed = ran(name)
    assert postgres.execute(MESSAGES).fetchall() == [PAID]
    assert postgres.execute("SELECT CAST(id AS text), number FROM semel_outbox, orders").fetchall() == [
        (*printed, 17),
    ]


async def test_asyncpg(postgres: psycopg.Connection) -> None:
    """With asyncpg, what is rolled back after `add` leaves neither the order nor its message."""
    example = load("outbox/asyncpg_shop")
    await example.main()
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    transaction = connection.transaction()
    await transaction.start()
    await example.pay(connection, 18)
    await transaction.rollback()
    await connection.close()
    assert postgres.execute(MESSAGES).fetchall() == [PAID]
    assert postgres.execute("SELECT number FROM orders").fetchall() == [(17,)]


def test_sqlite3(shop: sqlite3.Connection) -> None:
    """With sqlite3 both are committed by the block."""
    ran("outbox/sqlite3_shop")
    assert shop.execute(MESSAGES).fetchall() == [PAID]
    assert shop.execute("SELECT number FROM orders").fetchall() == [(17,)]


def test_django(tmp_path: Path) -> None:
    """With Django both are what `transaction.atomic` commits. Django can be set up once in a process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-W", "error", "-c", DJANGO]
    with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, number INTEGER NOT NULL)")
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert shop.execute(MESSAGES).fetchall() == [PAID]
        found = shop.execute("SELECT semel_outbox.id, number FROM semel_outbox, orders").fetchall()
        assert found == [(done.stdout.strip(), 17)]


async def post(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/orders", json={"number": 17}, headers={"Idempotency-Key": key})


async def test_atomic(postgres: psycopg.Connection) -> None:
    """A retry gets the answer with the message's id, and adds no second message."""
    example = load("outbox/atomic_app")
    async with asgi(example.app) as client:
        answers = [await post(client, "one") for _ in range(2)]
    assert [each.status_code for each in answers] == [201, 201]
    assert postgres.execute(MESSAGES).fetchall() == [PAID]
    found = postgres.execute("SELECT CAST(id AS text) FROM semel_outbox").fetchall()
    assert [(each.json()["message"],) for each in answers] == found * 2


async def test_phase(shop: sqlite3.Connection) -> None:
    """The messages of a phase go to two destinations, once; the card is charged once."""
    example = load("outbox/phase_app")
    async with asgi(example.app) as client:
        assert [(await post(client, "one")).status_code for _ in range(2)] == [201, 201]
    found = [row[:3] for row in shop.execute(MESSAGES).fetchall()]
    assert found == [("events", "order-17", "order.paid"), ("mail", None, "receipt")]
    assert len(example.charges) == 1


def test_own_publisher(shop: sqlite3.Connection) -> None:
    """What was added is in the file of the publisher, and gone from the outbox; what it refuses is a dead letter."""
    outbox = Outbox("sqlite:///shop.db")
    shop.execute("BEGIN IMMEDIATE")
    added = outbox.add(shop, "order.paid", {"order": 17})
    outbox.add(shop, "label.printed", b"%PDF", content_type="application/pdf")
    shop.execute("COMMIT")
    assert ran("outbox/own_publisher") == ["relayed to events: 1 sent, 0 to be tried again, 1 dead"]
    assert Path("events.txt").read_text() == f'{added} order.paid {{"order":17}}\n'
    assert shop.execute("SELECT state, error FROM semel_outbox").fetchall() == [
        ("dead", "application/pdf is not JSON.")
    ]

"""`semel migrate`."""

import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.stores import store

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["sqlite_url", "empty_postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def test_repeated(semel: Semel, url: str) -> None:
    """The first migration makes the tables and says so; the second has nothing to do and says so."""
    first, second = semel("migrate", url), semel("migrate", url)
    assert first.stdout.splitlines()[0] == "0001_pre_keys applied"
    assert all(line.endswith(" applied") for line in first.stdout.splitlines())
    assert second.stdout == "nothing to do\n"
    assert (first.returncode, second.returncode) == (0, 0)


def test_environment(semel: Semel, url: str) -> None:
    """The store may be named by SEMEL_STORE."""
    assert "0001_pre_keys applied\n" in semel("migrate", SEMEL_STORE=url).stdout


def test_argument_wins(semel: Semel, url: str, tmp_path: Path) -> None:
    """What is typed goes before what is set."""
    semel("migrate", url, SEMEL_STORE=f"sqlite:///{tmp_path}/other.db")
    assert semel("migrate", url).stdout == "nothing to do\n"
    assert not (tmp_path / "other.db").exists()


def test_two_stores(semel: Semel) -> None:
    """Two different stores are refused rather than one of them forgotten."""
    ended = semel("migrate", "sqlite:///a.db", "--store", "sqlite:///b.db")
    assert ended.returncode == 2
    assert "one at a time" in ended.stderr


def test_beside_other_tables(semel: Semel, url: str) -> None:
    """Where tables are made among others, what keeps Alembic from dropping them is said, once."""
    with closing(store(url)) as keys:
        kind = "SERIAL" if url.startswith("postgresql") else "INTEGER"
        with closing(connect(url)) as connection:
            connection.execute(f"CREATE TABLE orders (id {kind} PRIMARY KEY)")
            connection.commit()
        assert "include_name=semel.stores.alembic.include_name" in semel("migrate", url).stdout
        assert keys.has_neighbours()
    assert semel("migrate", url).stdout == "nothing to do\n"


def connect(url: str) -> Any:
    return psycopg.connect(url) if url.startswith("postgresql") else sqlite3.connect(url.removeprefix("sqlite:///"))

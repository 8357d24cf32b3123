"""Rocket Rides on each database, and a provider whose books tell what really happened."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from examples.rides.servers import provider
from semel.stores import store
from tests.examples.dying import Job, Outcome
from tests.warm import Warm

_AGE = {
    "sqlite": "UPDATE semel_keys SET lease_expires_at = 0 WHERE state = 'processing'",
    "postgresql": "UPDATE semel_keys SET lease_expires_at = now() - interval '1 s' WHERE state = 'processing'",
}


@dataclass
class World:
    """A database, a provider, and requests that run in processes of their own."""

    url: str
    provider: httpx.Client
    children: Warm

    def send(self, rider: str, line: int = 0, function: str | None = None, provider: str | None = None) -> Outcome:
        """Book a ride, or retry it: the request is the same. It is killed at *line*, if that is not 0."""
        job = Job(self.url, provider or str(self.provider.base_url), rider, line, function)
        return Outcome(**json.loads(self.children.ask(json.dumps(asdict(job)))))

    def retry(self, rider: str, line: int = 0) -> Outcome:
        """Send it again once the lease of whoever died over it has run out."""
        self.query(_AGE[self.url.partition(":")[0]])
        return self.send(rider, line)

    def trouble(self, to: str, kind: str) -> None:
        self.provider.post("/trouble", json={"to": to, "kind": kind}).raise_for_status()

    def books(self, name: str) -> list[dict[str, Any]]:
        """What the provider has written down: charges, receipts, orders."""
        return list(self.provider.get(f"/{name}").raise_for_status().json())

    def rides(self) -> list[dict[str, Any]]:
        return self.query("SELECT * FROM rides ORDER BY id")

    def record(self, rider: str) -> dict[str, Any] | None:
        """The record of a rider's key, where there is one."""
        found = self.query(f"SELECT state, attempt, recovery_point FROM semel_keys WHERE scope = '{rider}'")
        return found[0] if found else None

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Look into the database without any help of Semel's."""
        if self.url.startswith("sqlite:"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None)) as file:
                file.row_factory = sqlite3.Row
                return [dict(row) for row in file.execute(sql)]
        with psycopg.connect(self.url, autocommit=True, row_factory=dict_row) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def children() -> Iterator[Warm]:
    with Warm("tests.examples.dying") as warm:
        yield warm


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest, children: Warm) -> Iterator[World]:
    """A new one on each database."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    keys = store(url)
    keys.migrate()
    keys.close()
    with provider() as books:
        yield World(url, books, children)


@pytest.fixture
def postgres_url(migrated_postgres_url: str) -> str:
    """The URL of a database with Semel's tables in it."""
    return migrated_postgres_url

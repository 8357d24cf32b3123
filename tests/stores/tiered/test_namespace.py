"""Which durable stores have their answers in common in one Redis: one by whatever address, and no two others."""

import os
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from semel import stores
from semel.core.commands import Claim, Complete
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import Event
from semel.stores.tiered import Tiered
from semel.stores.tiered.namespace import namespace_of

HERE = socket.gethostname()


def of(url: str) -> str:
    return namespace_of(stores.store(url))


@pytest.mark.parametrize(
    "one, other",
    [
        ("postgresql://app@db.example/shop", "postgresql://app:secret@db.example/shop"),
        ("postgresql://db.example/shop?schema=public", "postgresql://app:secret@db.example/shop?schema=public"),
        ("postgresql://db.example/shop", "postgresql://DB.example/shop?audit=off&pool=9"),
        ("postgresql://db.example/shop", "postgres://db.example/shop?sslmode=require"),
        ("sqlite:///semel.db", "sqlite:///semel.db?audit=off"),
        ("redis://r.example/1", "redis://user:secret@r.example/1?timeout=2"),
    ],
)
def test_the_same(one: str, other: str) -> None:
    """The same place is the same, whoever connects to it and however."""
    assert of(one) == of(other)
    assert "secret" not in of(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("postgresql://db.example/shop", "postgresql://db.example/other"),
        ("postgresql://db.example/shop", "postgresql://db2.example/shop"),
        ("postgresql://db.example/shop", "postgresql://db.example:6432/shop"),
        ("postgresql://db.example/shop", "postgresql://db.example/shop?table=other"),
        ("postgresql://db.example/shop", "postgresql://db.example/shop?schema=other"),
        ("postgresql:///shop?host=db.example", "postgresql:///shop?host=db2.example"),
        ("postgresql:///shop?hostaddr=10.0.0.7", "postgresql:///shop?hostaddr=10.0.0.8"),
        ("postgresql://one@db.example", "postgresql://other@db.example"),
        ("postgresql://one@db.example/shop", "postgresql://other@db.example/shop"),
        ("postgresql://db.example/shop?options=-csearch_path%3Da", "postgresql://db.example/shop"),
        ("sqlite:///semel.db", "sqlite:///other.db"),
        ("sqlite:///semel.db", "sqlite:///semel.db?table=other"),
        ("redis://r.example/1", "redis://r.example/2"),
        ("redis://r.example/1", "redis://r.example/1?prefix=other"),
        ("memory://", "memory://"),
    ],
)
def test_not_the_same(one: str, other: str) -> None:
    """Another host, port, database, schema, table, file or number is another place; and memory is each its own."""
    assert of(one) != of(other)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/shop",
        "postgresql://127.0.0.1:5432/shop",
        "postgresql://[::1]/shop",
        "postgresql:///shop",
        "postgresql://%2Fvar%2Frun/shop",
        "postgresql://db.example/shop?host=/var/run",
        "postgresql://db.example/shop?hostaddr=127.0.0.1",
        "postgresql://db/shop",
        "postgresql://db.example,standby/shop",
        "sqlite:////var/lib/semel.db",
        "redis://localhost/1",
        "redis://127.0.0.1:6379/1",
        "redis://redis/1",
    ],
)
def test_what_is_on_this_machine(url: str) -> None:
    """What is meant by an address on this machine is another's on another machine; and so is a name without a dot,
    which every network, and every namespace of a Kubernetes, has for itself.
    """
    assert HERE in of(url)


@pytest.mark.parametrize("url", ["postgresql://db.example/shop", "postgresql://10.0.0.7/shop", "redis://r.example/1"])
def test_what_is_elsewhere(url: str) -> None:
    """What is reached over the network is shared by all who reach it."""
    assert HERE not in of(url)


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a URL leaves out what drivers then read from the environment, it is that which tells places apart."""
    url = "postgresql:///"
    before = of(url)
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGOPTIONS", "PGSERVICE"):
        monkeypatch.setenv(name, "1")
        assert of(url) != before
        monkeypatch.delenv(name)


@pytest.mark.skipif(not Path("/proc/self/ns/net").is_symlink(), reason="there are no namespaces here")
def test_machines_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers may be called the same, and have a localhost each."""
    here = of("postgresql://localhost/shop")
    monkeypatch.setattr(os, "readlink", lambda path: f"another {path}")
    assert of("postgresql://localhost/shop") != here


def test_schemas_of_one_database(postgres_url: str, redis_url: str) -> None:
    """Two users of one database, each with a schema of the same name, have tables of their own there (``"$user"`` is
    first in the search path), and are never given each other's answers.
    """
    answers = {}
    for tenant in (f"one_{uuid4().hex}", f"two_{uuid4().hex}"):
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {tenant} LOGIN".encode())
            connection.execute(f"CREATE SCHEMA {tenant} AUTHORIZATION {tenant}".encode())
        url = postgres_url.replace("semel@", f"{tenant}@")
        with closing(stores.store(url)) as plain:
            plain.migrate()
        with stores.store(Tiered(url, cache=redis_url)) as store:
            claim = Claim("alice", "key", os.urandom(16), b"", timedelta(seconds=30), timedelta(days=1))
            hold = store.perform(claim)
            assert isinstance(hold, Hold)
            answers[tenant] = Answer(201, (), tenant.encode())
            store.perform(Complete(hold, Event.COMPLETE, answers[tenant]))
        with stores.store(Tiered(url, cache=redis_url)) as store:
            found = store.perform(claim)
            assert isinstance(found, Found)
            assert found.answer == answers[tenant]

"""``semel.stores.migrate``: the tables, made from Python."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import semel.testing
from semel.core.commands import Claim
from semel.core.record import Hold
from semel.errors import ConfigurationError
from semel.stores import migrate, store


@pytest.mark.parametrize("is_engine", [False, True])
def test_tables_are_made_once(empty_postgres_url: str, *, is_engine: bool) -> None:
    """It makes what is missing, says what, and does nothing the second time; it takes a URL, an engine or a store."""
    url = empty_postgres_url
    given = create_engine(url.replace("postgresql:", "postgresql+psycopg:")) if is_engine else url
    assert migrate(given)
    assert migrate(given) == []
    with closing(store(url)) as keys:
        assert migrate(keys) == []
        lease = timedelta(minutes=1)
        assert isinstance(keys.perform(Claim("alice", "key", bytes(16), b"f", lease, lease)), Hold)


def test_engine_of_an_event_loop() -> None:
    """An async engine is refused, and told what to give."""
    with pytest.raises(ConfigurationError, match="Give the URL"):
        semel.testing.migrate(create_async_engine("postgresql+asyncpg://localhost/shop"))

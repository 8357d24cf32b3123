"""Where records are kept: one home per database, opened by URL. All of them pass one conformance suite."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store

__all__ = ["AsyncStore", "Store", "async_store", "store"]

_SCHEMES = "sqlite:///file.db, postgresql://user@host/database, memory://"

#: Each store is imported when it is asked for: its driver is an extra.
_STORES = {
    "memory": ("semel.stores.memory", "MemoryStore"),
    "postgres": ("semel.stores.postgres.store", "PostgresStore"),
    "postgresql": ("semel.stores.postgres.store", "PostgresStore"),
    "sqlite": ("semel.stores.sqlite.store", "SQLiteStore"),
}
_ASYNC_STORES = {
    "memory": ("semel.stores.memory", "AsyncMemoryStore"),
    "postgres": ("semel.stores.postgres.async_store", "AsyncPostgresStore"),
    "postgresql": ("semel.stores.postgres.async_store", "AsyncPostgresStore"),
    "sqlite": ("semel.stores.sqlite.async_store", "AsyncSQLiteStore"),
}


def store(url: str) -> Store:
    """Return the store at *url*, for threads. It connects on first use."""
    made: Store = _find(_STORES, url)(url)
    return made


def async_store(url: str) -> AsyncStore:
    """Return the store at *url*, for an event loop. It connects on first use."""
    made: AsyncStore = _find(_ASYNC_STORES, url)(url)
    return made


def _find(stores: dict[str, tuple[str, str]], url: str) -> Any:
    if not isinstance(url, str):
        raise ConfigurationError(f"store must be a URL or a Store, not {type(url).__name__}.")
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        # Python's own words may quote the password, so they go no further.
        message = "The store's URL can't be read. Write odd characters in it as %XX, as in p%40ss for p@ss."
        raise ConfigurationError(message) from None
    if scheme not in stores:
        what = f"{scheme}://" if scheme else "a name without a scheme"
        raise ConfigurationError(f"No store is known for {what}. Stores are given as {_SCHEMES}.")
    module, name = stores[scheme]
    return getattr(import_module(module), name)

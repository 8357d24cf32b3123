"""Transactions on the store's own SQLite file. They live with the store, and have their name here."""

from semel.stores.sqlite.async_units import AsyncSQLiteConnections, AsyncSQLiteUnit
from semel.stores.sqlite.units import SQLiteConnections, SQLiteUnit

__all__ = ["AsyncSQLiteConnections", "AsyncSQLiteUnit", "SQLiteConnections", "SQLiteUnit"]

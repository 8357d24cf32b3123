"""Transactions on the store's own SQLite file. They live with the store, and have their name here."""

from semel.stores.sqlite.transactions import (
    AsyncSQLiteConnections,
    AsyncSQLiteUnit,
    SQLiteConnections,
    SQLiteUnit,
)

__all__ = ["AsyncSQLiteConnections", "AsyncSQLiteUnit", "SQLiteConnections", "SQLiteUnit"]

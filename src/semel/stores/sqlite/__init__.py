"""Records in a SQLite file: the store to begin with. For the processes of one machine, not for a network folder."""

from semel.stores.sqlite.store import AsyncSQLiteStore, SQLiteStore

__all__ = ["AsyncSQLiteStore", "SQLiteStore"]

"""SQLite as a store: how the file is looked at, and what can be wrong with it."""

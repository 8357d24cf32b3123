"""The PostgreSQL store: one table that people can read with psql. Needs ``semel[postgres]``.

``store.py`` is for threads (psycopg), ``async_store.py`` for an event loop (asyncpg); all that they say to the server
is in ``queries.sql``.
"""

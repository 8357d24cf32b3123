"""The Redis store: one hash for each key, that people can read with redis-cli. Needs ``semel[redis]``.

``store.py`` is for threads, ``async_store.py`` for an event loop; all that changes a record is in ``scripts/``. It
speaks to the server by itself, over hiredis: a pool and a client around each command would cost more than the command.
"""

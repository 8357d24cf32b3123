"""A store's clock, moved by tests. Only the store's own clock decides when a lease or a retention is over, and no test
can move that of a database; so everything that is stored is made older instead, which has the same effect.

    clock = Clock("postgresql://localhost/shop_test")
    clock.advance(timedelta(hours=25))            # in async tests: await clock.aadvance(timedelta(hours=25))

Other processes may go on meanwhile. The application's own data is not changed.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from semel import stores
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.sqlite.file import Place
from semel.stores.statement import Names
from semel.stores.tiered import Tiered
from semel.stores.tiered.store import AsyncTieredStore, TieredStore
from semel.stores.transaction import at_once

Age = Callable[[timedelta], None]

#: The time columns of a record, and of a line of the audit trail.
_TIMES = ("created_at", "lease_expires_at", "completed_at", "expires_at")
#: The same as the stores' own lock time-out.
_LOCK_SECONDS = 5

#: Removes the entries of the times before from indexes. Where there are thousands of them, the services would not look
#: for some seconds at what gets in between (``stores/postgres/bounds.py``), and no time but a test's goes back.
_TIDY = "VACUUM semel_keys"

#: Moves the times of records, of the lines of their trails, and of the lists of records to check. A TTL stays as it is:
#: otherwise an expired record would be deleted at once, and a test could not see it. The negative number comes as text:
#: of Lua's own -0, or of ten years, Redis gets something that is no integer.
_AGE_REDIS = """
local times = {'created_at', 'lease_expires_at', 'completed_at', 'expires_at'}
for _, key in ipairs(redis.call('KEYS', ARGV[2])) do
    local kind = redis.call('TYPE', key).ok
    if kind == 'hash' then
        for place, value in ipairs(redis.call('HMGET', key, unpack(times))) do
            if value then
                redis.call('HINCRBY', key, times[place], ARGV[1])
            end
        end
    elseif kind == 'zset' then
        for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
            redis.call('ZINCRBY', key, ARGV[1], member)
        end
    elseif kind == 'list' then
        for place, line in ipairs(redis.call('LRANGE', key, 0, -1)) do
            local at, rest = string.match(line, '^(%-?%d+)(.*)$')
            redis.call('LSET', key, place - 1, string.format('%.0f', at + ARGV[1]) .. rest)
        end
    end
end
"""
_FORGET_REDIS = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
    redis.call('DEL', key)
end
"""


class Clock:
    """The clock of one store."""

    def __init__(self, store: Any) -> None:
        """Move the time of *store*: a URL, a store, an engine, a pool, or one of
        Django's connections.

        A store in memory, and a tiered one, must be given as the object that the application uses, and not as a URL or
        a ``Tiered``: their data is in that object.
        """
        self._age = _ageing(store)
        self._is_djangos = _is_djangos(store)

    def advance(self, duration: timedelta) -> None:
        """Let *duration* pass for everything that is stored."""
        given: Any = duration
        if not isinstance(given, timedelta) or given < timedelta(0):
            raise ConfigurationError(f"Time is moved forward, by a timedelta, not by {duration!r}.")
        self._age(duration)

    async def aadvance(self, duration: timedelta) -> None:
        """Do the same from a coroutine; the event loop is not blocked."""
        if self._is_djangos:
            # In the thread that has the connection, as Django's own async functions do.
            move: Any = import_module("asgiref.sync").sync_to_async(self.advance)
            await move(duration)
        else:
            await asyncio.to_thread(self.advance, duration)


def _ageing(given: Any) -> Age:
    if _is_djangos(given):
        return partial(_age_djangos, given)
    if isinstance(given, str) and urlsplit(given).scheme == "memory":
        raise ConfigurationError(
            "Every store at memory:// has its own records. Give the store itself: store = MemoryStore(), "
            "IdempotencyMiddleware(app, store=store, …), Clock(store)."
        )
    if isinstance(given, Tiered):
        raise ConfigurationError(
            "A process keeps answers in its own memory. Give the store itself: store = semel.stores.store(Tiered(…)), "
            "IdempotencyMiddleware(app, store=store, …), Clock(store)."
        )
    store = given if isinstance(given, Store | AsyncStore) else _opened(given)
    if isinstance(store, TieredStore | AsyncTieredStore):
        return partial(_age_tiered, store, _ageing(store.durable))
    if isinstance(store, MemoryStore | AsyncMemoryStore):
        return store.age
    if (alias := getattr(store, "alias", None)) is not None:
        return partial(_age_djangos, import_module("django.db").connections[alias])
    where = getattr(store, "place", None) or getattr(store, "address", None)
    if isinstance(where, Place):
        return partial(_age_sqlite, where)
    if where is not None:
        return partial(_age_redis if hasattr(where, "prefix") else _age_postgres, where)
    raise ConfigurationError(f"{type(store).__name__} does not say where it is, so its time can't be moved.")


def _opened(given: Any) -> Store | AsyncStore:
    """Return a store that connects to nothing: it only says where the records are."""
    if not isinstance(given, str):
        with suppress(ConfigurationError):
            return stores.async_store(given)
    return stores.store(given)


def _is_djangos(given: Any) -> bool:
    return hasattr(given, "vendor") and hasattr(given, "cursor")


def _statements(names: Names, placeholder: str) -> list[str]:
    back = ", ".join(f"{time} = {time} - {placeholder}" for time in _TIMES)
    return [
        names.put_into(f"UPDATE semel_keys SET {back}"),  # noqa: S608 - constants
        names.put_into(f"UPDATE semel_audit SET at = at - {placeholder}"),  # noqa: S608 - constants
    ]


def _postgres_statements(names: Names, placeholder: str) -> list[str]:
    """Return the same, and a statement that moves the services' watermark back, too."""
    back = f"UPDATE semel_keys_watermark SET swept_to = swept_to - {placeholder}"  # noqa: S608 - constants
    return [*_statements(names, placeholder), names.put_into(back)]


def _age_sqlite(place: Place, duration: timedelta) -> None:
    if not place.path.exists():
        return  # Nothing is stored yet.
    milliseconds = duration // timedelta(milliseconds=1)
    with closing(sqlite3.connect(place.path, timeout=_LOCK_SECONDS)) as connection, connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [place.names.table]).fetchone():
            return
        for statement in _statements(place.names, ":by"):
            connection.execute(statement, {"by": milliseconds})


def _age_postgres(address: Any, duration: timedelta) -> None:
    psycopg: Any = import_module("psycopg")
    with psycopg.connect(address.url, application_name="semel test clock") as connection:
        connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
        for statement in _postgres_statements(address.names, "%(by)s"):
            connection.execute(statement, {"by": duration})
        connection.commit()
        connection.autocommit = True
        connection.execute(address.names.put_into(_TIDY))


def _age_djangos(connection: Any, duration: timedelta) -> None:
    is_sqlite = connection.vendor == "sqlite"
    by: Any = duration // timedelta(milliseconds=1) if is_sqlite else duration
    with connection.cursor() as cursor:
        for statement in (_statements if is_sqlite else _postgres_statements)(Names(), "%s"):
            cursor.execute(statement, [by] * statement.count("%s"))
        if not is_sqlite and not connection.in_atomic_block:
            cursor.execute(_TIDY)


def _age_redis(address: Any, duration: timedelta) -> None:
    _on_every_redis(address, _AGE_REDIS, str(-(duration // timedelta(microseconds=1))), f"{address.prefix}:*")


def forget_redis(url: str, pattern: str) -> None:
    """Delete every key of a Redis that is like *pattern*."""
    address: Any = import_module("semel.stores.redis.address").Address.of(url)
    _on_every_redis(address, _FORGET_REDIS, pattern)


def _on_every_redis(address: Any, script: str, *arguments: str) -> None:
    connection: Any = import_module("semel.stores.redis.connection")
    protocol: Any = import_module("semel.stores.redis.protocol")
    connections = connection.Connections(address)
    client = import_module("semel.stores.redis.cluster").Client(address, connections)
    command = protocol.packed("EVAL", script, "0", *arguments)
    try:
        nodes = at_once(client.masters())
        at_once(client.read([protocol.Call(b"", command, node=node) for node in nodes]))
    finally:
        connections.close()


def _age_tiered(store: TieredStore | AsyncTieredStore, age: Age, duration: timedelta) -> None:
    age(duration)
    # An empty cache asks the durable store, so it is enough to empty it.
    store.forget()
    if store.cache is not None:
        _on_every_redis(store.cache.address, _FORGET_REDIS, f"{store.cache.address.prefix}:answer:*")

"""Where records are kept: one package per database, opened by URL. All of them pass one conformance suite.

Instead of a URL, an application may give what it has: a SQLAlchemy engine or sessionmaker, a pool of psycopg or
asyncpg. Atomic mode and phases then use its transactions. Claims and leases go over a few connections of the store's
own, made in the same way as the engine or the pool makes them: a claim must be visible to other processes before the
handler's transaction ends.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.encrypted.value import Encrypted, split
from semel.stores.forks import importing
from semel.stores.tiered.value import Tiered

__all__ = ["AsyncStore", "Store", "async_store", "close_shared", "either_store", "migrate", "shared_store", "store"]

_Table = dict[str, tuple[str, str]]
_Kinds = dict[tuple[str, str], tuple[str, str]]

_SCHEMES = "sqlite:///file.db, postgresql://user@host/database, redis://host/0, memory://"

_WITH_DRIVERS = frozenset({"postgres", "postgresql", "sqlite"})
_REDIS = ("redis", "rediss", "redis+cluster", "redis+sentinel")
_SERVERS = frozenset({"postgres", "postgresql", *_REDIS})

#: Each store is imported on first use: its driver is an extra.
_STORES = {
    "memory": ("semel.stores.memory", "MemoryStore"),
    "postgres": ("semel.stores.postgres.store", "PostgresStore"),
    "postgresql": ("semel.stores.postgres.store", "PostgresStore"),
    **dict.fromkeys(_REDIS, ("semel.stores.redis.store", "RedisStore")),
    "sqlite": ("semel.stores.sqlite.store", "SQLiteStore"),
}
_ASYNC_STORES = {
    "memory": ("semel.stores.memory", "AsyncMemoryStore"),
    "postgres": ("semel.stores.postgres.async_store", "AsyncPostgresStore"),
    "postgresql": ("semel.stores.postgres.async_store", "AsyncPostgresStore"),
    **dict.fromkeys(_REDIS, ("semel.stores.redis.store", "AsyncRedisStore")),
    "sqlite": ("semel.stores.sqlite.store", "AsyncSQLiteStore"),
}


#: What an application may give, by the package and the name of its type, so that no driver is imported, and the class
#: that takes transactions from it.
_GIVEN = {
    ("flask_sqlalchemy", "SQLAlchemy"): ("semel.stores.connections.flask_sqlalchemy", "FlaskSQLAlchemyConnections"),
    ("psycopg_pool", "ConnectionPool"): ("semel.stores.connections.psycopg", "PsycopgConnections"),
    ("sqlalchemy", "Engine"): ("semel.stores.connections.sqlalchemy", "SQLAlchemyConnections"),
    ("sqlalchemy", "sessionmaker"): ("semel.stores.connections.sqlalchemy", "SQLAlchemyConnections"),
}
_ASYNC_GIVEN = {
    ("asyncpg", "Pool"): ("semel.stores.connections.asyncpg", "AsyncpgConnections"),
    ("psycopg_pool", "AsyncConnectionPool"): ("semel.stores.connections.psycopg", "AsyncPsycopgConnections"),
    ("sqlalchemy", "AsyncEngine"): ("semel.stores.connections.sqlalchemy", "AsyncSQLAlchemyConnections"),
    ("sqlalchemy", "async_sessionmaker"): ("semel.stores.connections.sqlalchemy", "AsyncSQLAlchemyConnections"),
}
_TIERED = "semel.stores.tiered.store"
_WHAT = "a URL or what the application has (an engine, a sessionmaker, a connection pool) or"


@importing
def store(given: Any, *, url: str | None = None) -> Store:
    """Return the store at a URL, or on that of an engine or a pool, for threads. It connects on first use.

    *url* adds settings such as ``?table=``. Claims and leases then connect by this URL, and not by the settings of the
    engine or the pool.
    """
    given, url, secrets = _parted(given, url)
    if secrets is not None:
        behind = given if isinstance(given, Store) else store(given, url=url)
        encrypted: Store = _encrypting().opened(behind, secrets)
        return encrypted
    if isinstance(given, Tiered):
        tiered: Store = import_module(_TIERED).opened(given, url)
        return tiered
    if not isinstance(given, str) and _kind(_ASYNC_GIVEN, given):
        name = type(given).__name__
        raise ConfigurationError(f"{name} belongs to an event loop. Use it in an ASGI app, or with async_store().")
    made: Store = _made(_STORES, _GIVEN, given, url)
    return made


@importing
def async_store(given: Any, *, url: str | None = None) -> AsyncStore:
    """Return the store at a URL, or on that of an engine or a pool, for an event loop. It connects on first use.

    *url* adds settings such as ``?table=``. Claims and leases then connect by this URL, and not by the settings of the
    engine or the pool.
    """
    given, url, secrets = _parted(given, url)
    if secrets is not None:
        behind = given if isinstance(given, AsyncStore) else async_store(given, url=url)
        encrypted: AsyncStore = _encrypting().async_opened(behind, secrets)
        return encrypted
    if isinstance(given, Tiered):
        tiered: AsyncStore = import_module(_TIERED).async_opened(given, url)
        return tiered
    if not isinstance(given, str) and _kind(_GIVEN, given):
        name = type(given).__name__
        raise ConfigurationError(
            f"{name} would block the event loop. Give the async one; or use it in a WSGI app, or with store()."
        )
    made: AsyncStore = _made(_ASYNC_STORES, _ASYNC_GIVEN, given, url)
    return made


#: Those that entry points have opened, by URL, and the apps that use each. Only the apps hold them.
_shared: WeakValueDictionary[str, Store] = WeakValueDictionary()
_apps: WeakKeyDictionary[Store, WeakSet[object]] = WeakKeyDictionary()


def shared_store(given: Any, app: object = None) -> Store:
    """Return the store that was given, or the one on what was given. At the URL of a server it is the same for all
    apps of this process: tests make many of them, and leave them open. An *app* ends its use by ``close_shared``.
    """
    if isinstance(given, Store):
        return given
    if not isinstance(given, str) or split(given)[1] is not None:
        return store(given)
    url = without_driver(given)
    if url.partition(":")[0] not in _SERVERS:
        return store(url)
    shared = _shared.get(url) or _shared.setdefault(url, store(url))
    if app is not None:
        _apps.setdefault(shared, WeakSet()).add(app)
    return shared


def close_shared(store: Store, app: object) -> None:
    """Close the *store* of an *app*, unless another app uses it: that one's requests may be under way."""
    apps = _apps.get(store, WeakSet())
    apps.discard(app)
    if not apps:
        store.close()


def either_store(given: Any) -> Store | AsyncStore:
    """Return the store that was given, or the one on what was given, sync or async. A URL is for threads."""
    if isinstance(given, Store | AsyncStore):
        return given
    return async_store(given) if _is_for_a_loop(given) else store(given)


def migrate(given: Any) -> list[str]:
    """Make the tables at a URL, or in the database of an engine or a pool, or bring them up to date, as ``semel
    migrate`` does. Return what was applied: nothing, where nothing is needed.
    """
    if isinstance(given, Store):
        return given.migrate()
    if _is_for_a_loop(given):
        raise ConfigurationError(f"{type(given).__name__} belongs to an event loop. Give the URL of its database.")
    with closing(store(given)) as made:
        return made.migrate()


def _is_for_a_loop(given: Any) -> bool:
    """Whether an event loop is needed for what was given, also behind a cache and behind encryption."""
    if isinstance(given, Encrypted):
        return _is_for_a_loop(given.store)
    if isinstance(given, Tiered):
        return _is_for_a_loop(given.durable)
    return isinstance(given, AsyncStore) or _kind(_ASYNC_GIVEN, given) is not None


def _parted(given: Any, url: str | None) -> tuple[Any, str | None, str | None]:
    """Return what is behind the encryption, and where its secrets are; None: nothing is encrypted.

    It goes around a cache, too, whichever of the two it was given with: nothing readable leaves the process.
    """
    if isinstance(given, Encrypted):
        return given.store, url, given.secrets
    if isinstance(given, Tiered):
        durable, _, secrets = _parted(given.durable, None)
        given = replace(given, durable=durable) if secrets else given
    else:
        given, secrets = split(given) if isinstance(given, str) else (given, None)
    if url is not None and secrets is None:
        url, secrets = split(url)
    return given, url, secrets


def _encrypting() -> Any:
    try:
        return import_module("semel.stores.encrypted.store")
    except ModuleNotFoundError as error:
        if error.name != "cryptography":
            raise
        raise ConfigurationError("?encrypt= needs the package cryptography: pip install 'semel[encryption]'.") from None


def without_driver(url: str) -> str:
    """Return *url* without the driver that SQLAlchemy's URLs name (``postgresql+asyncpg://``): Semel has its own."""
    scheme, _, rest = url.partition(":")
    kind, plus, _ = scheme.partition("+")
    return f"{kind}:{rest}" if plus and kind in _WITH_DRIVERS else url


def _made(stores: _Table, kinds: _Kinds, given: Any, url: str | None) -> Any:
    if isinstance(given, str):
        given = without_driver(given)
        return _find(stores, given)(given)
    url = url and without_driver(url)
    kind = _kind(kinds, given)
    if kind is None:
        ours = "an AsyncStore" if kinds is _ASYNC_GIVEN else "a Store"
        raise ConfigurationError(f"store must be {_WHAT} {ours}, not {type(given).__name__}.")
    connections = getattr(import_module(kind[0]), kind[1])
    where = url or connections.url_of(given)
    if (scheme := urlsplit(where).scheme) in {"memory", *_REDIS}:
        raise ConfigurationError(f"{scheme}:// shares no transaction with an engine or a pool.")
    return _find(stores, where)(where, connections=connections.of(given, url))


def _kind(kinds: _Kinds, given: Any) -> tuple[str, str] | None:
    names = ((each.__module__.partition(".")[0], each.__name__) for each in type(given).__mro__)
    return next((kinds[name] for name in names if name in kinds), None)


def _find(stores: _Table, url: str) -> Any:
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        # Python's own message may quote the password, so it is not passed on.
        message = "The store's URL can't be read. Write odd characters in it as %XX, as in p%40ss for p@ss."
        raise ConfigurationError(message) from None
    if scheme not in stores:
        what = f"{scheme}://" if scheme else "a name without a scheme"
        raise ConfigurationError(f"No store is known for {what}. Stores are given as {_SCHEMES}.")
    module, name = stores[scheme]
    return getattr(import_module(module), name)

"""From what an application says to a store of either colour. Redis is imported only where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel import stores
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.tiered.async_store import AsyncTieredStore
from semel.stores.tiered.store import TieredStore
from semel.stores.tiered.value import Tiered

if TYPE_CHECKING:
    from semel.stores.redis.address import Address
    from semel.stores.tiered.async_cache import AsyncCache
    from semel.stores.tiered.cache import Cache


def opened(tiered: Tiered, url: str | None = None) -> TieredStore:
    """Return the store for threads. It connects on first use."""
    durable = tiered.durable
    if isinstance(durable, AsyncStore):
        raise ConfigurationError(f"{type(durable).__name__} belongs to an event loop. Give the store for threads.")
    store = durable if isinstance(durable, Store) else stores.store(durable, url=url)
    return TieredStore(store, memory=tiered.memory, cache=_cache(tiered, store))


def async_opened(tiered: Tiered, url: str | None = None) -> AsyncTieredStore:
    """Return the store for an event loop. It connects on first use."""
    durable = tiered.durable
    if isinstance(durable, Store):
        raise ConfigurationError(f"{type(durable).__name__} would hold up the event loop. Give its async twin.")
    store = durable if isinstance(durable, AsyncStore) else stores.async_store(durable, url=url)
    return AsyncTieredStore(store, memory=tiered.memory, cache=_async_cache(tiered, store))


# Redis is imported in these, because it needs an extra.


def _cache(tiered: Tiered, durable: Store) -> Cache | None:
    if tiered.cache is None:
        return None
    address, namespace = _place(tiered, tiered.cache, durable)
    from semel.stores.tiered.cache import Cache  # noqa: PLC0415 - see above

    return Cache(address, namespace)


def _async_cache(tiered: Tiered, durable: AsyncStore) -> AsyncCache | None:
    if tiered.cache is None:
        return None
    address, namespace = _place(tiered, tiered.cache, durable)
    from semel.stores.tiered.async_cache import AsyncCache  # noqa: PLC0415 - see above

    return AsyncCache(address, namespace)


def _place(tiered: Tiered, cache: str, durable: Store | AsyncStore) -> tuple[Address, str]:
    from semel.stores.tiered.namespace import namespace_of  # noqa: PLC0415 - see above
    from semel.stores.tiered.talks import cache_address  # noqa: PLC0415 - see above

    return cache_address(cache, tiered.cache_timeout), tiered.namespace or namespace_of(durable)

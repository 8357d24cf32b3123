"""What an application says of its tiers: one frozen value, given wherever a store is. It opens nothing."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from semel.errors import ConfigurationError

#: Some ten thousand answers of a kilobyte.
MEMORY = 16 * 1024 * 1024
#: A Redis nearby answers within a millisecond. One that takes longer than this saves nobody anything.
CACHE_TIMEOUT = timedelta(milliseconds=50)

_CACHES = frozenset({"redis", "rediss", "redis+cluster", "redis+sentinel"})

_EXAMPLE = 'Tiered(durable="postgresql://user@host/database", cache="redis://host:6379/0")'


@dataclass(frozen=True, slots=True)
class Tiered:
    """A durable store, and where finished answers are kept in front of it."""

    #: What decides: a URL, a store, or what else a store is made of (an engine, a pool). Neither it nor the cache is
    #: shown: a URL may hold a password.
    durable: Any = field(repr=False)
    #: The URL of a Redis that the processes share; None: each process has its own memory, and no more.
    cache: str | None = field(default=None, repr=False)
    _: KW_ONLY
    #: Bytes of finished answers that each process keeps; 0: none.
    memory: int = MEMORY
    #: How long the cache may take over one command before the durable store is asked instead.
    cache_timeout: timedelta = CACHE_TIMEOUT
    #: Tells apart the durable stores whose answers are in one Redis. None: by the durable store's own address.
    namespace: str | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        _check_durable(self.durable)
        _check_cache(self.cache)
        memory: Any = self.memory
        limit: Any = self.cache_timeout
        namespace: Any = self.namespace
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 0:
            raise ConfigurationError(f"memory is a number of bytes, such as 16 * 1024 * 1024, not {memory!r}.")
        if not isinstance(limit, timedelta) or limit <= timedelta(0):
            raise ConfigurationError(f"cache_timeout is a timedelta such as timedelta(milliseconds=50), not {limit!r}.")
        if namespace is not None and (not isinstance(namespace, str) or not namespace):
            raise ConfigurationError(f'namespace is a text, such as "shop-production", not {namespace!r}.')
        if self.cache is None and memory == 0:
            raise ConfigurationError("With cache=None and memory=0 nothing is kept. Give the durable store alone.")


def _check_durable(durable: Any) -> None:
    if durable is None or durable == "":
        raise ConfigurationError(f"Which durable store? Write {_EXAMPLE}.")
    if isinstance(durable, Tiered):
        raise ConfigurationError("The durable store of a Tiered can't be a Tiered. Give one of them both settings.")


def _check_cache(cache: Any) -> None:
    if cache is None:
        return
    try:
        scheme = urlsplit(cache).scheme if isinstance(cache, str) else None
    except ValueError:
        # Python's own words may quote the password, so they go no further.
        scheme = None
    if scheme not in _CACHES:
        what = f"not {scheme}://" if scheme else "such as redis://host:6379/0"
        raise ConfigurationError(f"cache is the URL of a Redis, {what}; or None. Write {_EXAMPLE}.")

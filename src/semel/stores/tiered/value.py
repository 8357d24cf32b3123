"""The settings of a tiered store: one frozen value, given in place of a store. It opens nothing."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from semel.errors import ConfigurationError

#: Some ten thousand answers of a kilobyte.
MEMORY = 16 * 1024 * 1024
#: A Redis nearby answers within a millisecond. Beyond this, asking the durable store is as fast.
CACHE_TIMEOUT = timedelta(milliseconds=50)

_CACHES = frozenset({"redis", "rediss", "redis+cluster", "redis+sentinel"})

_EXAMPLE = 'Tiered(durable="postgresql://user@host/database", cache="redis://host:6379/0")'


@dataclass(frozen=True, slots=True)
class Tiered:
    """A durable store, and the caches of finished answers in front of it."""

    #: The store that decides: a URL, a store, an engine or a pool. Neither it nor the cache is
    #: shown: a URL may hold a password.
    durable: Any = field(repr=False)
    #: The URL of a Redis that the processes share; None: each process has its own memory, and no more.
    cache: str | None = field(default=None, repr=False)
    _: KW_ONLY
    #: Bytes of finished answers that each process keeps; 0: none.
    memory: int = MEMORY
    #: How long the cache may take for one command before the durable store is asked instead.
    cache_timeout: timedelta = CACHE_TIMEOUT
    #: Distinguishes durable stores with answers in the same Redis. None: by the durable store's own address.
    namespace: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        _check_durable(self.durable)
        _check_cache(self.cache)
        memory: Any = self.memory
        limit: Any = self.cache_timeout
        namespace: Any = self.namespace
        if not isinstance(memory, int) or isinstance(memory, bool) or memory < 0:
            raise ConfigurationError(f"memory must be a number of bytes, such as 16 * 1024 * 1024, not {memory!r}.")
        if not isinstance(limit, timedelta) or limit <= timedelta(0):
            raise ConfigurationError(f"cache_timeout must be a timedelta(milliseconds=50) or the like, not {limit!r}.")
        if namespace is not None and (not isinstance(namespace, str) or not namespace):
            raise ConfigurationError(f'namespace must be a text, such as "shop-production", not {namespace!r}.')
        if self.cache is None and memory == 0:
            raise ConfigurationError("With cache=None and memory=0 nothing is kept. Give the durable store alone.")


def _check_durable(durable: Any) -> None:
    if durable is None or durable == "":
        raise ConfigurationError(f"Which durable store? Write {_EXAMPLE}.")
    if isinstance(durable, Tiered):
        raise ConfigurationError("The durable store of a Tiered can't be a Tiered. Give all settings to one of them.")


def _check_cache(cache: Any) -> None:
    if cache is None:
        return
    try:
        scheme = urlsplit(cache).scheme if isinstance(cache, str) else None
    except ValueError:
        # Python's own message may quote the password, so it is not passed on.
        scheme = None
    if scheme not in _CACHES:
        what = f"not {scheme}://" if scheme else "such as redis://host:6379/0"
        raise ConfigurationError(f"cache must be the URL of a Redis, {what}; or None. Write {_EXAMPLE}.")

"""What an application says of its tiers, and what is refused of it."""

from datetime import timedelta
from typing import Any

import pytest

from semel import stores
from semel.errors import ConfigurationError
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.tiered import Tiered


class TestValue:
    """What an application says."""

    @pytest.mark.parametrize(
        "given, words",
        [
            ({"durable": None}, "Which durable store"),
            ({"durable": ""}, "Which durable store"),
            ({"durable": Tiered("memory://")}, "can't be a Tiered"),
            ({"cache": "memcached://host"}, "not memcached://"),
            ({"cache": "localhost:6379"}, "URL of a Redis"),
            ({"cache": 7}, "URL of a Redis"),
            ({"cache": "redis://[oops"}, "URL of a Redis"),
            ({"memory": -1}, "number of bytes"),
            ({"memory": "16 MiB"}, "number of bytes"),
            ({"memory": True}, "number of bytes"),
            ({"memory": 0}, "nothing is kept"),
            ({"cache_timeout": 0.05}, "timedelta"),
            ({"cache_timeout": timedelta(0)}, "timedelta"),
            ({"namespace": ""}, "namespace"),
        ],
        ids=str,
    )
    def test_refused(self, given: dict[str, Any], words: str) -> None:
        """What can't be meant is refused where it is said, with what to write instead."""
        with pytest.raises(ConfigurationError, match=words):
            Tiered(**{"durable": "memory://", **given})

    def test_unknown_durable_stores(self) -> None:
        """A durable store that is none is refused as by itself."""
        with pytest.raises(ConfigurationError, match="No store is known for mysql://"):
            stores.store(Tiered("mysql://host/db"))
        with pytest.raises(ConfigurationError, match="not int"):
            stores.async_store(Tiered(7))

    def test_wrong_colour(self) -> None:
        """A store for threads serves no event loop, and the other way round."""
        with pytest.raises(ConfigurationError, match="async store"):
            stores.async_store(Tiered(MemoryStore()))
        with pytest.raises(ConfigurationError, match="belongs to an event loop"):
            stores.store(Tiered(AsyncMemoryStore()))

    @pytest.mark.parametrize("url", ["redis://host/a/b", "redis://a,b/0", "redis+sentinel://host", "redis://h/0?odd=1"])
    def test_odd_caches(self, url: str) -> None:
        """An address of a cache that can't be meant is refused when the store is made."""
        with pytest.raises(ConfigurationError):
            stores.store(Tiered("memory://", url))

    def test_shows_no_password(self) -> None:
        """It may be logged."""
        shown = repr(Tiered("postgresql://u:secret@host/db", "redis://:secret@host/0"))
        assert "secret" not in shown

    def test_is_a_value(self) -> None:
        """Two that say the same are the same: functions that name the same tiers share them."""
        one, other = (Tiered("sqlite:///semel.db", "redis://host/0") for _ in range(2))
        assert (one, hash(one)) == (other, hash(other))

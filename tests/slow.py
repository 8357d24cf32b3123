"""Which combinations ``make test`` leaves to ``.ci/run``, beside the tests that are marked ``slow`` where they stand.

Every one of these stays in ``make test`` on at least one store. What is left out are its repetitions on others, where
the store has no part in what is tested, or each takes minutes.
"""

from typing import Any

import pytest

#: Where a row of a table is always run: on the quickest store, and where an entry point has no other world.
USUAL_WORLDS = ("sqlite", "async middleware-postgres", "decorator-postgres")
#: Worlds that repeat what another one shows: the entry point is there with another store, and the store with another
#: entry point.
REPETITIONS = frozenset(
    {
        *("asgi-memory", "asgi-tiered", "wsgi-memory", "wsgi-redis", "wsgi-tiered"),
        *("litestar-postgres", "decorator-sqlite", "async-postgres", "rest-postgres"),
    }
)
#: Parameters of tests that are about what a request says, not about where it is kept.
SYNTAX = {"test_malformed_names": "name", "test_strange_keys": "key"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _is_slow(item):
            item.add_marker(pytest.mark.slow)


def _is_slow(item: pytest.Function) -> bool:
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if given.get("times") == 2 and given.get("shop") == "postgres":
        return True  # A death at each step, and again at each step of the recovery: a minute each.
    scenario = given.get("scenario")
    is_syntax = getattr(scenario, "is_syntax", False) or SYNTAX.get(item.originalname, "-") in given
    worlds = [value for value in given.values() if isinstance(value, str)]
    if not REPETITIONS.isdisjoint(worlds):
        return True
    return is_syntax and not any(world.endswith(USUAL_WORLDS) for world in worlds)

"""How requests have ended is counted in each process, and added to the store beside them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from semel import SINGLE_TENANT
from semel.core.commands import AddCounts, Command, ReadCounts
from semel.errors import StoreUnavailable
from semel.stores import Store
from semel.stores.memory import MemoryStore
from semel.work import Plan
from semel.work.counter import EndingsCounter
from semel.wsgi import IdempotencyMiddleware


def app(_environ: Any, start_response: Any) -> list[bytes]:
    start_response("201 Created", [("Content-Type", "text/plain")])
    return [b"done"]


def ask(guarded: Any, key: str) -> bytes:
    environ: dict[str, Any] = {}

    setup_testing_defaults(environ)
    environ |= {"REQUEST_METHOD": "POST", "HTTP_IDEMPOTENCY_KEY": key}
    return b"".join(guarded(environ, lambda *_: None))


def counted(store: Store) -> dict[str, int]:
    found: Counter[str] = Counter()
    for _, outcome, number in store.perform(ReadCounts(60)).counts:
        found[outcome] += number
    return dict(found)


def test_counts() -> None:
    """Requests are counted without a sink, added by the service, and what is left is added at its end."""
    store = MemoryStore()
    guarded = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT, work=False)
    for key in ("first", "first", "second"):
        ask(guarded, key)
    assert dict(store.ended) == {"ran": 2, "replayed": 1}
    assert counted(store) == {}
    service = EndingsCounter[Store](store)
    assert str(service.run_once()) == "counted 3 requests"
    assert dict(store.ended) == {}
    assert counted(store) == {"ran": 2, "replayed": 1, "added": 1}
    ask(guarded, "third")
    service.close()
    assert counted(store) == {"ran": 3, "replayed": 1, "added": 2}


def test_where_it_runs() -> None:
    """It is among the services of an application that serves requests; a worker that serves none adds no zeros."""
    store = MemoryStore()
    guarded = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT, work=True)
    assert guarded.workers is not None
    guarded.workers.start()
    ask(guarded, "first")
    guarded.workers.stop()
    assert counted(store)["ran"] == 1
    assert "counter" not in [each.name for each in Plan().services(store)]


def test_a_store_that_can_not_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """What can't be written is dropped, and said once: no request notices."""

    class Failing(MemoryStore):
        def perform(self, command: Command[Any]) -> Any:
            if isinstance(command, AddCounts):
                raise StoreUnavailable("It is a replica.")
            return super().perform(command)

    store = Failing()
    store.ended["ran"] += 1
    service = EndingsCounter[Store](store)
    with caplog.at_level(logging.DEBUG):
        first, second = service.run_once(), service.run_once()
    assert str(first) == "could not add to the counts: It is a replica."
    assert (first.is_idle, second.is_idle) == (False, True)
    assert dict(store.ended) == {}

"""The reply to a claim that comes late, to a process that was busy or paused: its lease may be over by then."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import semel
from semel import Policy
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.core.commands import Claim, Renew, Save, TakeOver
from semel.core.record import Hold
from semel.errors import InProgress, StoreUnavailable
from semel.functions import idempotent
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.web.harness import Request, Response, Shop, call_asgi, call_wsgi, plain, starlette

LEASE = timedelta(milliseconds=30)
POLICY = Policy.ietf(lease=LEASE)
KEYED = Request(lines=(("Idempotency-Key", b"key-1"),))


class Slow(MemoryStore):
    """Its replies to claims come when the lease is over, and what *meanwhile* does has happened."""

    def __init__(self, meanwhile: Callable[["Slow", Claim, Hold], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self.rivals: Any = None
        self.is_down = self.passes_over = self.is_late_again = False

    def act(self, command: Any, actor: str | None) -> Any:
        if self.is_down and isinstance(command, Renew):
            raise StoreUnavailable("It is down.")
        if self.passes_over and isinstance(command, Renew):
            return frozenset()
        outcome = super().act(command, actor)
        if self.is_late_again and isinstance(command, Save):
            self.is_late_again = False
            time.sleep(2 * LEASE / timedelta(seconds=1))
            assert isinstance(super().act(self.rivals, actor), Hold)
        if isinstance(command, Claim) and isinstance(outcome, Hold):
            time.sleep(2 * LEASE / timedelta(seconds=1))
            self._meanwhile(self, command, outcome)
        return outcome


def nothing(_store: Slow, _claim: Claim, _hold: Hold) -> None:
    """No other worker has asked for the key."""


def taken_over(store: Slow, claim: Claim, hold: Hold) -> None:
    """Another worker runs the operation."""
    rival = replace(claim, token=b"r" * 16, lease=timedelta(hours=1))
    assert isinstance(store.perform(TakeOver(rival, hold)), Hold)


def being_taken_over(store: Slow, claim: Claim, hold: Hold) -> None:
    """Another worker is about to commit that it has taken the operation over: a renewal passes over the record."""
    taken_over(store, claim, hold)
    store.passes_over = True


def down(store: Slow, _claim: Claim, _hold: Hold) -> None:
    """The store can't say any more who has the key."""
    store.is_down = True


async def by_asgi(store: Slow, shop: Shop) -> int:
    slow = AsyncMemoryStore(memory=store)
    app = AsgiMiddleware(starlette(shop), store=slow, scope=semel.SINGLE_TENANT, policy=POLICY)
    return (await call_asgi(app, KEYED)).status


async def by_wsgi(store: Slow, shop: Shop) -> int:
    app = WsgiMiddleware(plain(shop), store=store, scope=semel.SINGLE_TENANT, policy=POLICY)
    response: Response = call_wsgi(app, KEYED)
    return response.status


async def by_function(store: Slow, shop: Shop) -> int:
    @idempotent(key="order", scope="shop", store=store, policy=POLICY, name="pay")
    def pay(order: str) -> str:
        shop("POST", "/pay", b"")
        return order

    try:
        pay("key-1")
    except InProgress:
        return 409
    return 201


async def by_async_function(store: Slow, shop: Shop) -> int:
    @idempotent(key="order", scope="shop", store=AsyncMemoryStore(memory=store), policy=POLICY, name="pay")
    async def pay(order: str) -> str:
        shop("POST", "/pay", b"")
        return order

    try:
        await pay("key-1")
    except InProgress:
        return 409
    return 201


def taken_over_meanwhile(store: Slow, claim: Claim, hold: Hold) -> None:
    """Another worker takes the operation over while this one reads the answer to its question whether it has it."""
    store.is_late_again = True
    store.rivals = TakeOver(replace(claim, token=b"r" * 16, lease=timedelta(hours=1)), hold)


CASES = [
    (taken_over_meanwhile, 409, 0),
    (taken_over, 409, 0),
    (being_taken_over, 409, 0),
    (down, 409, 0),
    (nothing, 201, 1),
]


@pytest.mark.parametrize("serve", [by_asgi, by_wsgi, by_function, by_async_function])
@pytest.mark.parametrize("meanwhile, status, runs", CASES)
async def test_a_late_claim_runs_only_if_it_still_holds(serve: Any, meanwhile: Any, status: int, runs: int) -> None:
    """A claim that is answered late runs its handler only where the store says that the key is still its own."""
    shop = Shop()
    assert (await serve(Slow(meanwhile), shop), len(shop.runs)) == (status, runs)

"""The reply to a step that comes late, to a process that was paused or waited: its lease may be over by then."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel import Policy, in_thread
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.calls import Effect0
from semel.core.commands import Claim, Renew, Save, TakeOver
from semel.core.record import Hold
from semel.errors import StoreUnavailable
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware
from tests.web.harness import Request, call_asgi, call_wsgi

LEASE = timedelta(milliseconds=30)
POLICY = Policy.ietf(lease=LEASE)
KEYED = Request(lines=(("Idempotency-Key", b"key-1"),))


class Slow(MemoryStore):
    """It is away after an effect is recorded as begun, until the lease is over and *meanwhile* has happened."""

    def __init__(self, meanwhile: Callable[["Slow"], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile
        self._is_away = self._has_been_away = False
        self.is_down = self.passes_over = False
        self.claimed: tuple[Claim, Hold] | None = None

    def act(self, command: Any, actor: str | None) -> Any:
        if isinstance(command, Renew) and (self._is_away or self.is_down):
            raise StoreUnavailable("It is away.")
        if isinstance(command, Renew) and self.passes_over:
            return frozenset()
        outcome = super().act(command, actor)
        if isinstance(command, Claim) and isinstance(outcome, Hold):
            self.claimed = (command, outcome)
        if isinstance(command, Save) and not self._has_been_away:
            self._is_away = self._has_been_away = True
            time.sleep(2 * LEASE / timedelta(seconds=1))
            self._meanwhile(self)
            self._is_away = False
        return outcome


def nothing(_store: Slow) -> None:
    """No other worker has asked for the key."""


def taken_over(store: Slow) -> None:
    """Another worker has the operation, and is about to call the effect."""
    assert store.claimed is not None
    claim, hold = store.claimed
    rival = replace(claim, token=b"r" * 16, lease=timedelta(hours=1))
    assert isinstance(store.perform(TakeOver(rival, hold)), Hold)


def being_taken_over(store: Slow) -> None:
    """Another worker is about to commit that it has taken the operation over: a renewal passes over the record."""
    taken_over(store)
    store.passes_over = True


def down(store: Slow) -> None:
    """Steps can be stored again, and leases can't be renewed."""
    store.is_down = True


async def by_asgi(store: Slow, charge: Effect0[str]) -> int:
    async def pay(_request: StarletteRequest) -> JSONResponse:
        return JSONResponse(await semel.current().effect("charged", in_thread(charge)), 201)

    app = Starlette(routes=[Route(KEYED.target, pay, methods=["POST"])])
    slow = AsyncMemoryStore(memory=store)
    return (await call_asgi(AsgiMiddleware(app, store=slow, scope=semel.SINGLE_TENANT, policy=POLICY), KEYED)).status


async def by_wsgi(store: Slow, charge: Effect0[str]) -> int:
    def pay(_environ: Any, start_response: Any) -> list[bytes]:
        charged = semel.current().effect("charged", charge)
        start_response("201 Created", [("Content-Type", "text/plain")])
        return [charged.encode()]

    return call_wsgi(WsgiMiddleware(pay, store=store, scope=semel.SINGLE_TENANT, policy=POLICY), KEYED).status


@pytest.mark.parametrize("serve", [by_asgi, by_wsgi])
@pytest.mark.parametrize(
    "meanwhile, status, calls",
    [(taken_over, 409, 0), (being_taken_over, 409, 0), (down, 503, 0), (nothing, 201, 1)],
)
async def test_a_late_step_calls_only_if_it_still_holds(serve: Any, meanwhile: Any, status: int, calls: int) -> None:
    """An effect that is recorded late is called only where the store says that the operation is still this worker's:
    another one may have taken it over, and be calling the provider at this moment.
    """
    charges: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        charges.append(idempotency_key)
        return "ch_1"

    assert (await serve(Slow(meanwhile), charge), len(charges)) == (status, calls)

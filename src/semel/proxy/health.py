"""What a load balancer asks: is this proxy alive, and is it ready for requests? No request of a client comes here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from semel.asgi.protocol import ASGIScope
from semel.core.commands import Now
from semel.core.message import Answer
from semel.errors import StoreError
from semel.guard.shutdown import Gate
from semel.stores import AsyncStore

#: Seconds for which an answer holds. However often it is asked, store and upstream are asked once in this time.
HOLDS = 1.0
#: Seconds that the store may take.
PATIENCE = 2.0


class Health:
    """Answers ``/healthz`` and ``/readyz``. An empty path is the upstream's own."""

    def __init__(
        self, store: AsyncStore, gate: Gate, is_up: Callable[[], Awaitable[bool]], *, alive: str, ready: str
    ) -> None:
        """Ask *store* and *is_up*; once *gate* is closed, this proxy is not ready."""
        self._store = store
        self._gate = gate
        self._is_up = is_up
        self._alive = alive
        self._ready = ready
        self._looked = float("-inf")
        self._looking: asyncio.Task[dict[str, bool]] | None = None

    async def answer(self, scope: ASGIScope) -> Answer | None:
        """Return the answer to a request that asks for one of the two; None: it does not."""
        path = scope["path"]
        if not path or path not in {self._alive, self._ready} or scope["method"] not in {"GET", "HEAD"}:
            return None
        checks = {"accepts": not self._gate.is_closed}
        if path == self._alive:
            return _said(is_fine=True, checks={})
        checks |= await self._look()
        return _said(is_fine=all(checks.values()), checks=checks)

    async def _look(self) -> dict[str, bool]:
        now = asyncio.get_running_loop().time()
        if self._looking is None or now - self._looked > HOLDS:
            self._looked = now
            self._looking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._looking)

    async def _ask(self) -> dict[str, bool]:
        store, upstream = await asyncio.gather(self._ask_store(), self._is_up())
        return {"store": store, "upstream": upstream}

    async def _ask_store(self) -> bool:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._store.perform(Now())
        except (StoreError, OSError):
            return False
        return True


def _said(*, is_fine: bool, checks: dict[str, bool]) -> Answer:
    body = {"status": "ok" if is_fine else "not ready", **checks}
    headers = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"))
    return Answer(200 if is_fine else 503, headers, json.dumps(body).encode())

"""A FastAPI app with a login, permissions and a guarded payment; what a test adds to it, it adds itself."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel

from semel import Operation, Policy
from semel.core.commands import Browse
from semel.fastapi import Idempotent, install
from semel.stores.memory import AsyncMemoryStore, MemoryStore

KEY = {"Idempotency-Key": "key-1"}


class Payment(BaseModel):
    amount: int


class Shop:
    """What happens is written down in ``runs``; who may do it is in ``tokens`` and ``banned``."""

    def __init__(self, app: FastAPI | None = None, **policy: Any) -> None:
        self.memory = MemoryStore()
        self.app = app or FastAPI()
        install(self.app, store=AsyncMemoryStore(memory=self.memory), policy=Policy.ietf(**policy))
        self.runs: list[Any] = []
        self.tokens = {"token-1": "alice", "token-2": "alice", "token-b": "bob"}
        self.banned: set[str] = set()
        self.guard = Idempotent(scope=self.current_account)

    async def current_account(self, authorization: Annotated[str, Header()] = "") -> str:
        account = self.tokens.get(authorization.removeprefix("Bearer "))
        if account is None:
            raise HTTPException(401, "Who are you?")
        return account

    async def may_pay(self, authorization: Annotated[str, Header()] = "") -> None:
        if self.tokens.get(authorization.removeprefix("Bearer ")) in self.banned:
            raise HTTPException(403, "You may not.")

    def pay(self, path: str = "/pay") -> Callable[..., Any]:
        """Add the usual guarded route."""

        @self.app.post(path, status_code=201)
        async def pay(payment: Payment, operation: Annotated[Operation | None, Depends(self.guard)]) -> dict[str, Any]:
            self.runs.append((operation.key if operation else None, payment.amount))
            return {"payment": len(self.runs)}

        return pay

    @property
    def is_empty(self) -> bool:
        return self.memory.perform(Browse(limit=1)) == ()


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer token-1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test", headers=headers) as client:
        yield client


async def post(app: Any, path: str = "/pay", headers: dict[str, str] | None = None, **request: Any) -> httpx.Response:
    """Send one request with a key."""
    if not request:
        request = {"json": {"amount": 5}}
    async with client_of(app) as client:
        return await client.post(path, headers=KEY | (headers or {}), **request)


def seen(response: httpx.Response) -> tuple[int, bool]:
    """The status, and whether it is a replay."""
    return response.status_code, response.headers.get("idempotent-replayed") == "true"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}

"""A report that takes its time: accepted at once, made by a worker, asked for at its own address."""

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI, HTTPException, Request

import semel
from semel import Policy
from semel.asgi import PRINCIPAL, IdempotencyMiddleware, RequestView

ACCOUNTS = {"Bearer token-of-alice": "alice", "Bearer token-of-bob": "bob"}
PAUSE_SECONDS = 1.0

app = FastAPI()


def account_of(headers: Mapping[str, str]) -> str | None:
    return ACCOUNTS.get(headers.get("authorization", ""))


def user_of(request: RequestView) -> str | None:
    return account_of(request.headers)  # asked at the status URL, too


@app.post("/reports", status_code=201)
async def report(wanted: dict[str, str], request: Request) -> dict[str, str]:
    # Credentials are not stored: the worker's request names its user here.
    account = request.scope.get(PRINCIPAL) or account_of(request.headers)
    if account is None:
        raise HTTPException(401)
    operation = semel.current()
    for number in range(3):
        await operation.progress(number / 3, f"part {number + 1} of 3")
        await operation.effect(f"part_{number}", write_part, wanted["month"], number)
    return {"month": wanted["month"], "for": account}


async def write_part(month: str, number: int, **_: str) -> str:  # A provider would get the idempotency_key.
    await asyncio.sleep(PAUSE_SECONDS)
    return f"part {number} of {month}"


app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=user_of,
    policy=Policy.ietf(required=True, in_progress="accept"),
)

"""Requests that are kept until they are answered: what no client comes back for is finished without one."""

from collections.abc import Mapping

from fastapi import FastAPI, HTTPException, Request

from semel import Policy
from semel.asgi import PRINCIPAL, IdempotencyMiddleware, RequestView

ACCOUNTS = {"Bearer token-of-alice": "alice"}
orders: list[tuple[str, str]] = []

app = FastAPI()


def account_of(headers: Mapping[str, str]) -> str | None:
    return ACCOUNTS.get(headers.get("authorization", ""))


def user_of(request: RequestView) -> str | None:
    return account_of(request.headers)


@app.post("/orders", status_code=201)
async def order(wanted: dict[str, str], request: Request) -> dict[str, int]:
    # Credentials are not stored. A request that is finished without its client names its user here.
    account = request.scope.get(PRINCIPAL) or account_of(request.headers)
    if account is None:
        raise HTTPException(401)
    orders.append((account, wanted["item"]))
    return {"order": len(orders)}


app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=user_of,
    policy=Policy.ietf(store_request=True),
    work=True,  # this process sweeps, reaps and finishes, beside serving
)

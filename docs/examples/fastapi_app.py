"""FastAPI: each account has its own keys, and the handler asks what it is part of."""

from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel

import semel
from semel.asgi import IdempotencyMiddleware
from semel.door import RequestView

ACCOUNTS = {"token-of-alice": "alice", "token-of-bob": "bob"}
ledger: list[tuple[str, int]] = []


class Payment(BaseModel):
    amount: int


def account_of(authorization: str | None) -> str | None:
    return ACCOUNTS.get((authorization or "").removeprefix("Bearer "))


def whose_request(request: RequestView) -> str | None:
    """Name the account, not the token: a token may be renewed between two tries."""
    return account_of(request.headers.get("authorization"))


def current_account(authorization: Annotated[str | None, Header()] = None) -> str:
    account = account_of(authorization)
    if account is None:
        raise HTTPException(401)
    return account


app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///semel.db", scope=whose_request, paths="/payments")


@app.post("/payments", status_code=201)
def pay(payment: Payment, account: Annotated[str, Depends(current_account)]) -> dict[str, object]:
    ledger.append((account, payment.amount))
    return {"payment": len(ledger), "account": account, "amount": payment.amount}


@app.post("/notes", status_code=201)
def note() -> dict[str, bool]:
    """Not guarded (see `paths`), so there is no current operation."""
    try:
        semel.current()
    except LookupError:
        return {"guarded": False}
    return {"guarded": True}

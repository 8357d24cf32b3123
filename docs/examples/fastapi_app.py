"""FastAPI: routes say that they are guarded, and are, once the app's own login and permissions have been asked."""

from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

import semel
from semel import Operation, Policy
from semel.fastapi import Idempotent, install

ACCOUNTS = {"token-of-alice": "alice", "token-of-bob": "bob"}
CLERKS = {"alice"}
ledger: list[tuple[str, int]] = []

app = FastAPI()
install(app, store="sqlite:///semel.db", policy=Policy.ietf(required=True))

Token = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def current_account(token: Token) -> str:
    if token is None or token.credentials not in ACCOUNTS:
        raise HTTPException(401)
    return ACCOUNTS[token.credentials]  # the account, not the token: a token may be renewed between two tries


def is_clerk(account: Annotated[str, Depends(current_account)]) -> None:
    if account not in CLERKS:
        raise HTTPException(403, "Only a clerk may refund.")


guard = Idempotent(scope=current_account)


class Payment(BaseModel):
    amount: int


@app.post("/payments", status_code=201)
async def pay(payment: Payment, operation: Annotated[Operation, Depends(guard)]) -> dict[str, object]:
    ledger.append((operation.scope, payment.amount))
    return {"payment": len(ledger), "account": operation.scope, "attempt": operation.attempt}


refunds = APIRouter(prefix="/refunds", dependencies=[Depends(guard), Depends(is_clerk)])


@refunds.post("", status_code=201)
def refund(payment: Payment) -> dict[str, str]:
    ledger.append((semel.current().scope, -payment.amount))
    return {"refund": semel.current().key}


app.include_router(refunds)

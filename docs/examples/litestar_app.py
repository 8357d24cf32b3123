"""Litestar: a guard of its own kind claims the key, after the login and after every other guard."""

from typing import Any

from litestar import Litestar, post
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException, NotAuthorizedException
from litestar.handlers import BaseRouteHandler
from litestar.middleware import AbstractAuthenticationMiddleware, AuthenticationResult
from litestar.params import JSONBody

import semel
from semel import Policy
from semel.asgi import PER_ROUTE, IdempotencyMiddleware, Settled, claim

ACCOUNTS = {"Bearer token-of-alice": "alice", "Bearer token-of-bob": "bob"}
frozen: set[str] = set()
ledger: list[tuple[str, int]] = []

Connection = ASGIConnection[Any, Any, Any, Any]


class Login(AbstractAuthenticationMiddleware):
    async def authenticate_request(self, connection: Connection) -> AuthenticationResult:
        account = ACCOUNTS.get(connection.headers.get("authorization", ""))
        if account is None:
            raise NotAuthorizedException("Who are you?")
        return AuthenticationResult(user=account, auth=None)


def may_pay(connection: Connection, _handler: BaseRouteHandler) -> None:
    if connection.user in frozen:
        raise HTTPException("This account is frozen.", status_code=403)


async def idempotent(connection: Connection, _handler: BaseRouteHandler) -> None:
    """The last guard. What it raises is thrown away: the answer has been sent."""
    scope: Any = connection.scope
    try:
        await claim(scope, connection.user, Policy.ietf(required=True))
    except Settled as settled:
        raise HTTPException(status_code=settled.answer.status) from None


@post("/payments", guards=[may_pay, idempotent])
async def pay(data: JSONBody[dict[str, int]]) -> dict[str, object]:
    operation = semel.current()
    ledger.append((operation.scope, data["amount"]))
    return {"payment": len(ledger), "account": operation.scope}


litestar: Any = Litestar([pay], middleware=[Login])
app = IdempotencyMiddleware(litestar, store="sqlite:///semel.db", scope=PER_ROUTE)

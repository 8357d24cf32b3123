"""The demo's payments API, a plain ASGI app: it charges a card at a provider and answers with a receipt.

Only the middleware around it and the key that it passes on make it safe to retry. ``run.py`` runs it as a program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import httpx

import semel
from semel.asgi import IdempotencyMiddleware
from semel.cli.demo.serving import App, Receive, Scope, Send, lifespan, read_json, send_json, serve

#: In the environment, since every user of the machine can read command lines, and a URL may hold a password.
STORE_VARIABLE = "SEMEL_DEMO_STORE"

#: Short, so that the take-over of a killed worker's payments is seen in a demo of seconds. The default is 30 s.
LEASE = timedelta(seconds=2)

#: The provider answers within a second; this is for a busy machine.
PROVIDER_SECONDS = 30.0


class Payments:
    """``POST /payments`` with ``{"order": ..., "amount": ...}`` charges a card."""

    def __init__(self, provider: str, charge_key: Callable[[], str]) -> None:
        """Charge at *provider*, each time under the key that *charge_key* names."""
        self._provider = httpx.AsyncClient(base_url=provider, timeout=PROVIDER_SECONDS, trust_env=False)
        self._charge_key = charge_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
        elif (scope["method"], scope["path"]) != ("POST", "/payments"):
            await send_json(send, 404, {"error": "There is only POST /payments."})
        else:
            await self._pay(receive, send)

    async def _pay(self, receive: Receive, send: Send) -> None:
        try:
            payment = await read_json(receive)
            bill = {"order": str(payment["order"]), "amount": int(payment.get("amount", 0))}
        except (ValueError, TypeError, KeyError, AttributeError):
            await send_json(send, 400, {"error": 'Send {"order": "a name", "amount": 4200}.'})
            return
        response = await self._provider.post("/charges", json=bill, headers={"Idempotency-Key": self._charge_key()})
        charge = response.raise_for_status().json()["charge"]
        # The receipt is random on every run: two runs of one payment can't give the same answer by chance.
        await send_json(send, 201, {**bill, "charge": charge, "receipt": uuid4().hex[:12], "attempt": attempt()})


def attempt() -> int:
    """Return how often this payment was begun, if Semel counts it."""
    try:
        return semel.current().attempt
    except LookupError:
        return 1


def protected(provider: str, store: str) -> App:
    """The API with Semel. A handler that was killed runs again, and passes the same key on."""
    payments = Payments(provider, charge_key=lambda: semel.current().derive("charge"))
    policy = semel.Policy.ietf(required=True, lease=LEASE)
    return IdempotencyMiddleware(payments, store=store, scope=semel.SINGLE_TENANT, policy=policy)


def unprotected(provider: str) -> App:
    """The API without Semel: every request is a new payment."""
    return Payments(provider, charge_key=lambda: str(uuid4()))


if __name__ == "__main__":
    descriptor, provider = sys.argv[1:]
    store = os.environ.get(STORE_VARIABLE)
    serve(protected(provider, store) if store else unprotected(provider), int(descriptor))

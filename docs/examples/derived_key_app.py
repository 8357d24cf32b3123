"""A key for another service: the call to a provider carries a key that is the same on every retry and every attempt."""

from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware


class Provider:
    """Stands in for a payment provider that takes an idempotency key of its own."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}

    def charge(self, amount: int, *, idempotency_key: str) -> str:
        self.charges.setdefault(idempotency_key, amount)
        return f"ch_{idempotency_key[:8]}"


provider = Provider()

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///semel.db", scope=semel.SINGLE_TENANT)


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, object]:
    operation = semel.current()
    charge = provider.charge(order["amount"], idempotency_key=operation.derive("charge"))
    return {"charge": charge, "attempt": operation.attempt}

"""The Stripe preset: POST only, 400 on a mismatch, server errors kept, and errors in Stripe's own shape."""

from fastapi import FastAPI, HTTPException

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

charges: list[int] = []

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///semel.db", scope=SINGLE_TENANT, policy=Policy.stripe())


@app.post("/v1/charges")
def charge(order: dict[str, int]) -> dict[str, object]:
    charges.append(order["amount"])
    if order["amount"] > 10_000:
        raise HTTPException(503, "The bank is away.")  # kept nevertheless: the preset keeps server errors
    return {"id": f"ch_{len(charges)}", "amount": order["amount"]}

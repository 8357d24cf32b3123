from fastapi import FastAPI

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

payments: list[int] = []

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=SINGLE_TENANT,
    policy=Policy.ietf(required=True),
)


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, int]:
    payments.append(order["amount"])  # the effect
    return {"payment": len(payments), "amount": order["amount"]}

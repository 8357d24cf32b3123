"""The same endpoint, guarded, and with a key for the card company too."""

import time
from datetime import timedelta
from pathlib import Path

from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware

CHARGES = Path("charges.txt")

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(lease=timedelta(seconds=5)),
)


def charge(amount: int, idempotency_key: str) -> None:
    """Charge once per key, as card companies do."""
    if not CHARGES.exists() or idempotency_key not in CHARGES.read_text():
        with CHARGES.open("a") as book:
            book.write(f"{amount} {idempotency_key}\n")


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, int]:
    charge(order["amount"], semel.current().derive("charge"))
    time.sleep(2)
    return {"charged": order["amount"]}

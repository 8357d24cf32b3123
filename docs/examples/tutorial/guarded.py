"""The same endpoint, guarded."""

import time
from datetime import timedelta
from pathlib import Path

from fastapi import FastAPI

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware

CHARGES = Path("charges.txt")

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=SINGLE_TENANT,
    policy=Policy.ietf(lease=timedelta(seconds=5)),  # short, so that you need not wait long below
)


def charge(amount: int) -> None:
    with CHARGES.open("a") as book:
        book.write(f"{amount}\n")


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, int]:
    charge(order["amount"])
    time.sleep(2)
    return {"charged": order["amount"]}

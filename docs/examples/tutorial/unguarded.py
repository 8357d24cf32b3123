"""A payment endpoint without a guard."""

import time
from pathlib import Path

from fastapi import FastAPI

CHARGES = Path("charges.txt")  # stands in for the card company: a line here is money that has moved

app = FastAPI()


def charge(amount: int) -> None:
    with CHARGES.open("a") as book:
        book.write(f"{amount}\n")


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, int]:
    charge(order["amount"])
    time.sleep(2)  # the card company takes its time to answer
    return {"charged": order["amount"]}

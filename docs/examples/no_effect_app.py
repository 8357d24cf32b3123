"""NoEffect: the handler knows that nothing happened, so the error frees the key and a retry runs again."""

from fastapi import FastAPI, HTTPException

from semel import SINGLE_TENANT, NoEffect, current
from semel.asgi import IdempotencyMiddleware

bank = {"is_open": False}
transfers: list[int] = []

app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store="sqlite:///semel.db", scope=SINGLE_TENANT)


@app.post("/transfers", status_code=201)
def transfer(order: dict[str, int]) -> dict[str, int]:
    if not bank["is_open"]:
        raise NoEffect("The bank could not be reached, and nothing was sent.")
    transfers.append(order["amount"])
    return {"transfer": len(transfers)}


@app.post("/quotes", status_code=201)
def quote() -> dict[str, int]:
    if not bank["is_open"]:
        current().no_effect()  # the same, for an error answer of your own
        raise HTTPException(502, "No quote today.")
    return {"quote": 42}

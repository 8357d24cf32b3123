"""A receiver of webhooks: the sender delivers an event at least once, and it is acted on once."""

from fastapi import FastAPI, HTTPException

from semel.errors import InProgress, StoreError
from semel.functions import idempotent

shipped: list[str] = []

app = FastAPI()


@idempotent(key=lambda event: event["id"], scope="payments.example", compare=None, store="sqlite:///semel.db")
async def ship(event: dict[str, str]) -> dict[str, int]:
    shipped.append(event["order"])
    return {"parcel": len(shipped)}


@app.post("/webhooks")
async def receive(event: dict[str, str]) -> dict[str, int]:
    try:
        return await ship(event)
    except (InProgress, StoreError) as later:
        # The sender tries again, as it would after any failure.
        raise HTTPException(503, later.detail, {"Retry-After": str(later.retry_after)}) from later

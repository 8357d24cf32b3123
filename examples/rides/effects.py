"""What the API asks of others: a charge and a mail. Each is an effect, so none of this runs inside a transaction."""

from typing import Any

import httpx

from semel import NOT_APPLIED, Applied

FARE = 42_00  # cents

Ride = dict[str, Any]


async def charge_card(provider: httpx.AsyncClient, ride: Ride, card: str, *, idempotency_key: str) -> dict[str, str]:
    """An effect. Made again when its outcome is unknown: the provider knows the key, and charges once."""
    bill = {"ride": ride["id"], "amount": FARE, "card": card}
    answer = await provider.post("/charges", json=bill, headers={"Idempotency-Key": idempotency_key})
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:  # An outcome like any other: returned, so that it is kept.
        return {"declined": answer.json()["reason"]}
    return {"id": answer.raise_for_status().json()["id"]}


async def send_receipt(provider: httpx.AsyncClient, ride: Ride, **_: str) -> str:
    """An effect at a service that takes no keys: when its outcome is unknown, ``find_receipt`` finds out."""
    answer = await provider.post("/receipts", json={"ride": ride["id"], "to": ride["rider"]})
    return str(answer.raise_for_status().json()["id"])


async def find_receipt(provider: httpx.AsyncClient, ride: Ride, **_: str) -> object:
    """Whether the receipt was sent. As sure as the provider is: a mail still on its way there would not be found."""
    answer = await provider.get("/receipts", params={"ride": ride["id"]})
    sent = answer.raise_for_status().json()
    return Applied(sent[0]["id"]) if sent else NOT_APPLIED

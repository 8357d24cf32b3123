"""Three providers: one keeps keys, one can be asked, and the third can't be asked."""

from flask import Flask, request

import semel
from semel.wsgi import IdempotencyMiddleware

cards: dict[str, int] = {}  # three stand-ins: a card company,
parcels: list[int] = []  # a carrier,
faxes: list[int] = []  # and a fax machine

app = Flask(__name__)


def charge(order: int, *, idempotency_key: str) -> dict[str, str]:
    """Made again with the same key when its outcome is unknown: the card company charges once per key."""
    if order < 0:
        return {"declined": "no money"}  # an outcome, so it is returned; raising would mean that its outcome is unknown
    cards.setdefault(idempotency_key, order)
    return {"id": f"ch_{len(cards)}"}


def ship(order: int, **_: str) -> int:
    """Takes no key, but the carrier can be asked."""
    parcels.append(order)
    return len(parcels)


def find_parcel(order: int, **_: str) -> object:
    """Say whether it was sent. CANT_TELL, where the carrier does not answer, would park the operation."""
    return semel.Applied(parcels.index(order) + 1) if order in parcels else semel.NOT_APPLIED


def send_fax(order: int, **_: str) -> None:
    faxes.append(order)


@app.post("/orders")
def fulfil() -> tuple[dict[str, object], int]:
    operation, order = semel.current(), request.get_json()["order"]
    charged = operation.effect("charged", charge, order)  # on_unknown="retry" is the default
    if "declined" in charged:
        return {**charged}, 402
    parcel = operation.effect("shipped", ship, order, verify=find_parcel)  # on_unknown="verify"
    operation.effect("faxed", send_fax, order, on_unknown="park")
    return {"charge": charged["id"], "parcel": parcel}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
    app.wsgi_app, store="sqlite:///orders.db", scope=semel.SINGLE_TENANT
)

"""One policy per endpoint: patterns are tried in order, and what matches none of them is not guarded."""

from datetime import timedelta

from fastapi import FastAPI

from semel import SINGLE_TENANT, Fingerprinter, Policy
from semel.asgi import IdempotencyMiddleware

runs: list[str] = []

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///semel.db",
    scope=SINGLE_TENANT,
    paths={
        # Money: a key must be sent, and after a crash the handler is never run again by itself.
        "/payments": Policy.ietf(required=True, on_crash="refuse", retention=timedelta(days=7)),
        # The client stamps each try with the time; that is not part of what it asks for.
        "/events": Policy.ietf(fingerprint=Fingerprinter(omit=("sent_at",))),
        # `*` matches slashes too: /orders/7 and /orders/7/lines.
        "/orders/*": Policy.ietf(methods={"POST", "PATCH", "DELETE"}, scope_by="operation"),
    },
)


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, int]:
    runs.append("pay")
    return order


@app.post("/events", status_code=201)
def event(event: dict[str, str]) -> dict[str, str]:
    runs.append("event")
    return event


@app.delete("/orders/{number}")
def cancel(number: int) -> dict[str, int]:
    runs.append(f"cancel {number}")
    return {"cancelled": number}


@app.post("/searches")
def search() -> dict[str, int]:
    runs.append("search")
    return {"found": 0}

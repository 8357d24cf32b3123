"""A Celery task: delivered twice, or again after its worker was killed, it is done once."""

from datetime import timedelta

from celery import Celery, Task

import semel
from semel.errors import InProgress, StoreError
from semel.functions import idempotent

charges: dict[str, int] = {}  # stands in for a payment provider, which keeps keys

app = Celery("shop", broker="memory://")


def charge(order: int, amount: int, *, idempotency_key: str) -> str:
    charges.setdefault(idempotency_key, amount)
    return f"ch_{order}"


@app.task(acks_late=True, autoretry_for=(InProgress, StoreError), retry_backoff=True)  # type: ignore[untyped-decorator]  # Celery has no types
@idempotent(key="order", store="sqlite:///shop.db", lease=timedelta(seconds=30))
def pay(order: int, amount: int) -> str:
    charged: str = semel.current().effect("charged", charge, order, amount)
    return charged


@app.task(bind=True, acks_late=True)  # type: ignore[untyped-decorator]  # as above
@idempotent(key=lambda self, *_args: self.request.id, store="sqlite:///shop.db")
def greet(self: Task, address: str) -> str:
    return f"Greeted {address} in delivery {self.request.id}."

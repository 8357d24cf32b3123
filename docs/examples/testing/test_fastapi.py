"""Tests of a FastAPI endpoint: a day that passes, and a crash at every step."""

import sqlite3
from contextlib import closing
from datetime import timedelta
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from semel import SINGLE_TENANT, Operation
from semel.fastapi import Idempotent, install
from semel.testing import Clock, Request, crash_everywhere

charges: dict[str, int] = {}  # stands in for a payment provider, which keeps keys


def create_order(connection: sqlite3.Connection, amount: int) -> None:
    connection.execute("INSERT INTO orders (amount) VALUES (?)", [amount])


def charge_card(amount: int, *, idempotency_key: str) -> str:
    charges.setdefault(idempotency_key, amount)
    return f"ch_{idempotency_key[:8]}"


@pytest.fixture
def app(semel_store: str) -> FastAPI:
    app = FastAPI()
    install(app, store=semel_store)

    @app.post("/orders", status_code=201)
    def order(amount: int, operation: Annotated[Operation, Depends(Idempotent(scope=SINGLE_TENANT))]) -> str:
        operation.phase("order_created", create_order, amount)
        return operation.effect("card_charged", charge_card, amount)

    charges.clear()
    with closing(sqlite3.connect(semel_store.removeprefix("sqlite:///"))) as database:
        database.execute("CREATE TABLE orders (amount INTEGER)")
    return app


def test_a_key_is_new_after_a_day(app: FastAPI, semel_clock: Clock) -> None:
    answers = []
    with TestClient(app) as client:
        for hours in (0, 23, 2):
            semel_clock.advance(timedelta(hours=hours))
            answers.append(client.post("/orders?amount=5", headers={"Idempotency-Key": "k"}))
    assert ["Idempotent-Replayed" in answer.headers for answer in answers] == [False, True, False]


def test_a_crash_anywhere(app: FastAPI, semel_clock: Clock, semel_store: str) -> None:
    def effects() -> dict[str, int]:
        with closing(sqlite3.connect(semel_store.removeprefix("sqlite:///"))) as database:
            return {"orders": database.execute("SELECT count(*) FROM orders").fetchone()[0], "charges": len(charges)}

    report = crash_everywhere(app, Request("POST", "/orders?amount=5"), clock=semel_clock, effects=effects)
    report.assert_once()

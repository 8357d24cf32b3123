"""The same endpoint, in steps that are recorded: what is done is not done again."""

import sqlite3
from datetime import timedelta

import httpx
from fastapi import FastAPI

import semel
from semel.asgi import IdempotencyMiddleware

bank = httpx.Client(base_url="http://127.0.0.1:9000", timeout=10)

setup = sqlite3.connect("payments.db")
setup.execute("CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY, amount INTEGER, charge TEXT)")
setup.close()

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store="sqlite:///payments.db",  # the same file: a phase commits both
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(lease=timedelta(seconds=5)),  # short, so that you need not wait long below
)


def create_payment(connection: sqlite3.Connection, amount: int) -> int | None:
    return connection.execute("INSERT INTO payments (amount) VALUES (?)", [amount]).lastrowid


def charge_card(amount: int, *, idempotency_key: str) -> str:
    answer = bank.post("/charges", json={"amount": amount}, headers={"Idempotency-Key": idempotency_key})
    return str(answer.raise_for_status().json()["id"])


def mark_paid(connection: sqlite3.Connection, number: int | None, charge: str) -> None:
    connection.execute("UPDATE payments SET charge = ? WHERE id = ?", [charge, number])


def send_mail(to: str, **_: str) -> str:
    return str(bank.post("/mails", json={"to": to}).raise_for_status().json()["id"])


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, object]:
    operation = semel.current()
    number = operation.phase("payment_created", create_payment, order["amount"])
    charge = operation.effect("card_charged", charge_card, order["amount"])
    operation.phase("payment_marked", mark_paid, number, charge)
    operation.effect("mail_sent", send_mail, "ada", on_unknown="park")
    return {"payment": number, "charge": charge}

"""A payment endpoint in four steps, and nothing that remembers them."""

import sqlite3

import httpx
from fastapi import FastAPI

bank = httpx.Client(base_url="http://127.0.0.1:9000", timeout=10)

setup = sqlite3.connect("payments.db")
setup.execute("CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY, amount INTEGER, charge TEXT)")
setup.close()

app = FastAPI()


@app.post("/payments", status_code=201)
def pay(order: dict[str, int]) -> dict[str, object]:
    connection = sqlite3.connect("payments.db", isolation_level=None)  # each statement is committed at once
    number = connection.execute("INSERT INTO payments (amount) VALUES (?)", [order["amount"]]).lastrowid
    charge = bank.post("/charges", json=order).raise_for_status().json()["id"]
    connection.execute("UPDATE payments SET charge = ? WHERE id = ?", [charge, number])
    connection.close()
    bank.post("/mails", json={"to": "ada"}).raise_for_status()
    return {"payment": number, "charge": charge}

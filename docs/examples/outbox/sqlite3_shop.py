"""With sqlite3: the connection begins a transaction with its first write, and the block commits it."""

import sqlite3
from contextlib import closing

from semel.outbox import Outbox

outbox = Outbox("sqlite:///shop.db")


def pay(connection: sqlite3.Connection, order: int) -> str:
    connection.execute("INSERT INTO orders (number) VALUES (?)", [order])
    message_id: str = outbox.add(connection, "order.paid", {"order": order}, key=f"order-{order}")
    return message_id


if __name__ == "__main__":
    with closing(sqlite3.connect("shop.db")) as connection, connection:
        print(pay(connection, 17))

"""With psycopg: the order and the message that tells of it are one commit. Only the database is asked for anything."""

import os

import psycopg

from semel.outbox import Outbox

outbox = Outbox(os.environ["DATABASE_URL"])


def pay(connection: "psycopg.Connection[tuple[object, ...]]", order: int) -> str:
    with connection.transaction():
        connection.execute("INSERT INTO orders (number) VALUES (%s)", [order])
        message_id: str = outbox.add(connection, "order.paid", {"order": order}, key=f"order-{order}")
    return message_id


if __name__ == "__main__":
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        print(pay(connection, 17))

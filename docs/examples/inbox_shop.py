"""Ships each paid order once, whatever the broker delivers twice. The broker is a list here."""

import sqlite3
from contextlib import closing

from semel.inbox import Inbox, MessageDiffers

DELIVERIES = [
    ("evt-1", '{"order": "A17"}'),
    ("evt-2", '{"order": "B4"}'),
    ("evt-1", '{"order": "A17"}'),  # the ack was lost
    ("evt-1", '{"order": "C9"}'),  # a mistake of the producer
]

inbox = Inbox("sqlite:///shop.db", consumer="shipping")


def ship(connection: sqlite3.Connection, payload: str) -> int:
    """Write to the shop's own table, in the transaction in which the message becomes known."""
    return connection.execute("INSERT INTO parcels (content) VALUES (?)", [payload]).lastrowid or 0


def consume() -> None:
    with inbox:
        for message_id, payload in DELIVERIES:
            try:
                verdict = inbox.receive(message_id, ship, payload, payload=payload)
            except MessageDiffers:
                print(message_id, "refused: another message under the same id")
            else:
                print(message_id, verdict, "ack" if verdict.ack else "nack")


if __name__ == "__main__":
    with closing(sqlite3.connect("shop.db")) as shop, shop:
        shop.execute("CREATE TABLE IF NOT EXISTS parcels (id INTEGER PRIMARY KEY, content TEXT NOT NULL)")
    consume()

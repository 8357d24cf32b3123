"""Rides in SQLite, in the same file as Semel's own tables: that is how a phase commits both at once.

Phases get a connection of ``sqlite3``, and are plain functions: Semel runs them in a thread.
"""

import sqlite3
from contextlib import closing
from typing import Any

Ride = dict[str, Any]

_TABLE = """
CREATE TABLE IF NOT EXISTS rides (
    id INTEGER PRIMARY KEY,
    rider TEXT NOT NULL,
    origin TEXT NOT NULL,
    destination TEXT NOT NULL,
    status TEXT NOT NULL,
    charge TEXT
)
"""


async def create_table(url: str) -> None:
    """Have a table, at the app's start."""
    with closing(_connect(url)) as connection:
        connection.execute(_TABLE)


async def all_rides(url: str) -> list[Ride]:
    """Return every ride."""
    with closing(_connect(url)) as connection:
        return [dict(row) for row in connection.execute("SELECT * FROM rides ORDER BY id")]


def create_ride(connection: sqlite3.Connection, rider: str, wanted: dict[str, str]) -> Ride:
    """A phase: the ride is there, and nothing is paid yet."""
    row = (rider, wanted["from"], wanted["to"], "booked")
    cursor = connection.execute("INSERT INTO rides (rider, origin, destination, status) VALUES (?, ?, ?, ?)", row)
    return {"id": cursor.lastrowid, "rider": rider, "from": wanted["from"], "to": wanted["to"], "status": "booked"}


def mark(connection: sqlite3.Connection, ride: Ride, status: str, charge: str | None = None) -> Ride:
    """A phase: the ride has another status."""
    connection.execute("UPDATE rides SET status = ?, charge = ? WHERE id = ?", (status, charge, ride["id"]))
    return ride | {"status": status, "charge": charge}


def _connect(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection

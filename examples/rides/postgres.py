"""Rides in PostgreSQL, in the same database as Semel's own tables: that is how a phase commits both at once.

Phases get a connection of ``asyncpg``, inside an open transaction that Semel commits.
"""

from __future__ import annotations

from typing import Any

import asyncpg

Ride = dict[str, Any]

_TABLE = """
CREATE TABLE IF NOT EXISTS rides (
    id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    rider text NOT NULL,
    origin text NOT NULL,
    destination text NOT NULL,
    status text NOT NULL,
    charge text
)
"""


async def create_table(url: str) -> None:
    """Have a table, at the app's start."""
    connection = await asyncpg.connect(url)
    await connection.execute(_TABLE)
    await connection.close()


async def all_rides(url: str) -> list[Ride]:
    """Return every ride."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetch("SELECT * FROM rides ORDER BY id")
    await connection.close()
    return [dict(row) for row in rows]


async def create_ride(connection: asyncpg.Connection[Any], rider: str, wanted: dict[str, str]) -> Ride:
    """A phase: the ride is there, and nothing is paid yet."""
    insert = "INSERT INTO rides (rider, origin, destination, status) VALUES ($1, $2, $3, 'booked') RETURNING id"
    number = await connection.fetchval(insert, rider, wanted["from"], wanted["to"])
    return {"id": number, "rider": rider, "from": wanted["from"], "to": wanted["to"], "status": "booked"}


async def mark(connection: asyncpg.Connection[Any], ride: Ride, status: str, charge: str | None = None) -> Ride:
    """A phase: the ride has another status."""
    await connection.execute("UPDATE rides SET status = $1, charge = $2 WHERE id = $3", status, charge, ride["id"])
    return ride | {"status": status, "charge": charge}

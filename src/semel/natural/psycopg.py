"""Natural keys on a psycopg connection, sync or async. The statements are in ``text.py``."""

from __future__ import annotations

from typing import Any

from semel.natural.asked import Asked
from semel.natural.flow import Rows, arun, run
from semel.natural.flow import insert_or_get as flow
from semel.natural.got import Got
from semel.natural.text import PostgresText, Query, as_dict, plain

try:
    from psycopg import AsyncConnection, AsyncRawCursor, Connection, RawCursor
    from psycopg.rows import tuple_row
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg 3.2 or newer. Run: pip install 'semel[postgres]'") from error


def insert_or_get(connection: Connection[Any], into: object, asked: Asked) -> Got[dict[str, Any]]:
    """Insert the row, or get the stored one."""

    def perform(query: Query) -> Rows:
        # Not connection.execute: the connection may have another cursor class or row factory.
        with RawCursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(query.sql, query.parameters)
            return Rows(tuple(column.name for column in cursor.description or ()), cursor.fetchall())

    return run(flow(_language(asked, into)), perform)


async def async_insert_or_get(connection: AsyncConnection[Any], into: object, asked: Asked) -> Got[dict[str, Any]]:
    """Insert the row, or get the stored one."""

    async def perform(query: Query) -> Rows:
        async with AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(query.sql, query.parameters)
            return Rows(tuple(column.name for column in cursor.description or ()), await cursor.fetchall())

    return await arun(flow(_language(asked, into)), perform)


def _language(asked: Asked, into: object) -> PostgresText[dict[str, Any]]:
    return PostgresText(asked, plain(asked, into), "${}".format, as_dict)

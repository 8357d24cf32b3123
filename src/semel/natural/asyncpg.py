"""Natural keys on an asyncpg connection, from a pool or not. The statements are in ``text.py``."""

from __future__ import annotations

from typing import Any

from semel.natural.asked import Asked
from semel.natural.flow import Rows, arun
from semel.natural.flow import insert_or_get as flow
from semel.natural.got import Got
from semel.natural.text import PostgresText, Query, as_dict, plain


async def async_insert_or_get(connection: Any, into: object, asked: Asked) -> Got[dict[str, Any]]:
    """Insert the row, or get the stored one."""

    async def perform(query: Query) -> Rows:
        records = await connection.fetch(query.sql, *query.parameters)
        columns = tuple(records[0].keys()) if records else ()
        return Rows(columns, [tuple(record.values()) for record in records])

    return await arun(flow(PostgresText(asked, plain(asked, into), "${}".format, as_dict)), perform)

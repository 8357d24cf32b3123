"""Whether a connection can carry every character, as the server has told with its greeting. It asks nothing.

Scopes, results of effects and messages may have any. One that can't be written is an outcome that can't be recorded,
when the effect is over: each retry would call it again. So such a connection is refused before a handler runs.
"""

from __future__ import annotations

from typing import Any

from semel.errors import StoreNotReady

#: What sessions of Semel's own have, whatever the role, the database, the URL or the environment say.
ENCODING = "UTF8"
_SAME = frozenset({"UTF8", "UNICODE"})


def check_encoding(connection: Any, where: object) -> None:
    """Raise where a connection of psycopg's or asyncpg's can't carry every character; *where* it leads, for people."""
    server, client = _told(connection, "server_encoding"), _told(connection, "client_encoding")
    if not _is_whole(server):
        raise StoreNotReady(
            f"{where} has server_encoding = {server}, and can't hold every character. Make a database that can, and "
            f"move the tables there: CREATE DATABASE name ENCODING '{ENCODING}' TEMPLATE template0"
        )
    if not _is_whole(client):
        raise StoreNotReady(
            f"{where} is given connections that have client_encoding = {client}, and can't send every character. Give "
            f"client_encoding={ENCODING} to the engine, the pool or OPTIONS; or run: ALTER ROLE name SET "
            f"client_encoding = '{ENCODING}'"
        )


def _told(connection: Any, name: str) -> str | None:
    if hasattr(connection, "info"):
        told: str | None = connection.info.parameter_status(name)
        return told
    return getattr(connection.get_settings(), name, None)


def _is_whole(encoding: str | None) -> bool:
    # None: a pooler does not say. The client's may be told in the client's own spelling.
    return encoding is None or encoding.strip("'").replace("-", "").upper() in _SAME

"""A connection of the store's own, for an event loop, made as the application makes its own. As ``opening.py``, and for
the same reason.

An application on psycopg has connections of psycopg's; ``PsycopgSession`` lets the store use them as it uses asyncpg's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.durability import FOR_SESSION_IF_OFF
from semel.stores.postgres.standing import HEARTBEAT, HEARTBEAT_SECONDS

try:
    import asyncpg
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL under an event loop needs asyncpg. Run: pip install 'semel[postgres]'") from error

if TYPE_CHECKING:
    from psycopg import AsyncConnection


async def as_given(address: Address) -> Any:
    """Have the application's engine or pool make a connection; raises what asyncpg raises where it can't be made."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await address.opener()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError):  # TimeoutError is an OSError
        raise
    except Exception as error:
        if type(error).__name__ == "ProgrammingError":
            # What psycopg can't read may be a password, so its words go no further.
            raise ValueError from None
        # psycopg's; or what else the application does to connect, such as to fetch a password.
        raise ConnectionError(str(error) or type(error).__name__) from error
    return PsycopgSession(connection) if hasattr(connection, "pgconn") else connection


async def settle(connection: Any, settings: Mapping[str, str]) -> None:
    """Make *settings* on a direct connection, and see that its COMMIT is on the disk when it is answered."""
    calls = [f"SELECT set_config('{name}', '{value}', false)" for name, value in settings.items()]
    try:
        await connection.execute("; ".join([*calls, FOR_SESSION_IF_OFF]), timeout=CONNECT_SECONDS)
    except BaseException:
        connection.terminate()
        raise


class ServerError(asyncpg.PostgresError):
    """What the server said to psycopg, told as asyncpg would."""

    def __init__(self, error: Any) -> None:
        """Keep its number and its words."""
        super().__init__(str(error))
        self.sqlstate = error.sqlstate  # type: ignore[misc]  # the class has one for each number that it knows


class PsycopgSession:
    """A connection of psycopg's with the methods of asyncpg's that the store uses. One task at a time uses it."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        """Use a connection that is open."""
        self._connection = connection
        self._is_settled = False

    async def fetch(self, sql: str, *parameters: Any, timeout: float) -> list[Any]:  # noqa: ASYNC109 - asyncpg's
        """Run one statement, and return its rows."""
        from psycopg import AsyncRawCursor  # noqa: PLC0415 - there where there is a connection of it
        from psycopg.rows import tuple_row  # noqa: PLC0415 - as above

        async def run() -> list[Any]:
            cursor = AsyncRawCursor(self._connection, row_factory=tuple_row)
            await cursor.execute(sql.encode(), parameters, binary=True)
            return await cursor.fetchall() if cursor.description else []

        rows: list[Any] = await self._within(timeout, run)
        return rows

    async def execute(self, sql: str, *, timeout: float = CONNECT_SECONDS) -> str:  # noqa: ASYNC109 - asyncpg's
        """Run statements without parameters, and return the last one's command tag."""
        from psycopg import AsyncCursor  # noqa: PLC0415 - there where there is a connection of it

        async def run() -> str:
            cursor = await AsyncCursor(self._connection).execute(sql.encode(), prepare=False)
            while cursor.nextset():
                pass
            return cursor.statusmessage or ""

        tag: str = await self._within(timeout, run)
        return tag

    async def hear(self, channel: str, on_hint: Callable[[str], None], begun: asyncio.Event) -> NoReturn:
        """Listen until the connection is lost, which is raised."""
        await self.execute(f"LISTEN {channel}")
        begun.set()
        try:
            while True:
                async for notification in self._connection.notifies(timeout=HEARTBEAT_SECONDS):
                    on_hint(notification.payload)
                await self.execute(HEARTBEAT)
        except Exception as error:
            raise _told(error) from error

    def prepare_nothing(self) -> None:
        """Do without prepared statements, for a pooler in between."""
        self._connection.prepare_threshold = None

    def get_server_pid(self) -> int:
        """Return which process of the server's serves this, as the greeting said."""
        return self._connection.info.backend_pid

    @property
    def info(self) -> Any:
        """What the server has told of itself."""
        return self._connection.info

    def is_closed(self) -> bool:
        """Tell whether the connection is no more."""
        return self._connection.closed

    async def close(self, *, timeout: float = CONNECT_SECONDS) -> None:  # noqa: ARG002, ASYNC109 - asyncpg's
        """Disconnect."""
        self.terminate()

    def terminate(self) -> None:
        """Disconnect at once."""
        # Not close(): a pool may have made "give it back" of that.
        with suppress(Exception):
            self._connection.pgconn.finish()

    async def _within(self, limit: float, run: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(limit):
                if not self._is_settled:
                    await self._settle()
                return await run()
        except TimeoutError:
            self.terminate()
            raise
        except Exception as error:
            raise _told(error) from error

    async def _settle(self) -> None:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415 - there where there is a connection of it

        if self._connection.info.transaction_status != TransactionStatus.IDLE:
            await self._connection.commit()  # what was SET as it was made is to stay
        await self._connection.set_autocommit(True)
        self._connection.prepare_threshold = 0
        self._is_settled = True


def _told(error: Exception) -> Exception:
    from psycopg import InterfaceError, OperationalError  # noqa: PLC0415 - there where there is a connection of it

    if getattr(error, "sqlstate", None) is not None:
        return ServerError(error)
    if isinstance(error, InterfaceError | OperationalError):
        return ConnectionError(" ".join(str(error).split()))
    return error

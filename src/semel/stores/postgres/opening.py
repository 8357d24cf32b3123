"""A connection of the store's own, for threads, made as the application makes its own. What is asked on it, others say.

An engine or a pool that the application gives knows what no URL does: certificates, a password that is fetched anew
each time, the schema that is searched first. So it is asked to make the connection, in its own way and with its own
settings, and this store keeps it. The pool does not know of it, and it takes no place in there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from semel.errors import ConfigurationError
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.durability import FOR_SESSION_IF_OFF
from semel.stores.postgres.network import tell_kernel

try:
    import psycopg
    from psycopg.pq import TransactionStatus
    from psycopg.rows import tuple_row
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg. Run: pip install 'semel[postgres]'") from error


def as_given(address: Address, network: Mapping[str, int]) -> psycopg.Connection[Any]:
    """Have the application's engine or pool make a connection, in autocommit; *network* is in libpq's names.

    Raises ``psycopg.Error`` where it can't be made.
    """
    connection = _made(address)
    try:
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.commit()  # what was SET as it was made is to stay
        connection.autocommit = True
        connection.row_factory, connection.cursor_factory = tuple_row, psycopg.Cursor
        connection.prepare_threshold = 0
        tell_kernel(connection.fileno(), network)
    except BaseException:
        connection.close()
        raise
    return connection


def settle(connection: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    """Make *settings* on a direct connection, and see that its COMMIT is on the disk when it is answered."""
    calls = [f"SELECT set_config('{name}', '{value}', false)" for name, value in settings.items()]
    try:
        connection.execute("; ".join([*calls, FOR_SESSION_IF_OFF]).encode(), prepare=False)
    except BaseException:
        connection.close()
        raise


def _made(address: Address) -> psycopg.Connection[Any]:
    try:
        return _within_limit(address.opener)
    except psycopg.ProgrammingError:
        # The driver's own words may quote the password, so they go no further.
        raise ConfigurationError(f"How {address} is reached can't be read from what was given as store.") from None
    except (psycopg.Error, ConfigurationError):
        raise
    except Exception as error:
        # What else it does to connect is the application's, such as to fetch a password.
        raise psycopg.OperationalError(str(error) or type(error).__name__) from error


def _within_limit(make: Callable[[], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """Call *make* in a thread of its own: an engine without a time limit would wait for a dead server for minutes."""
    future: Future[psycopg.Connection[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="semel-connecting", daemon=True).start()
    try:
        return future.result(CONNECT_SECONDS)
    except TimeoutError:
        future.add_done_callback(_close_late)
        raise psycopg.errors.ConnectionTimeout(f"no connection within {CONNECT_SECONDS} s") from None


def _close_late(future: Future[psycopg.Connection[Any]]) -> None:
    if future.exception() is None:
        future.result().close()

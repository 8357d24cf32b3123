"""A direct connection that a thread keeps open, and opens again when it is lost. What is said on it, others say.

The thread ends with the process, and does not keep it alive. Behind a pooler there is no such connection: what belongs
to a session would be lost between two transactions.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from typing import Any, ClassVar

from semel.stores.forks import start_afresh_in_children
from semel.stores.postgres.address import CONNECT_SECONDS, Address
from semel.stores.postgres.network import STANDING
from semel.stores.postgres.opening import as_given
from semel.stores.postgres.pooler import is_direct
from semel.stores.postgres.standing import (
    APPLICATION_NAME,
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    SETTLE,
    pauses,
)

try:
    import psycopg
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("PostgreSQL needs psycopg. Run: pip install 'semel[postgres]'") from error

_logger = logging.getLogger("semel")


class DirectConnection(ABC):
    """One direct connection, for as long as it is wanted. All that others supply is called in its thread."""

    #: What its thread is called.
    name: ClassVar[str]

    _mutex: threading.Lock
    _life: _Life | None = None

    def __init__(self, address: Address) -> None:
        """Connect to *address*, once it is started."""
        self.address = address
        self.start_afresh()
        start_afresh_in_children(self)

    @abstractmethod
    def opened(self, connection: psycopg.Connection[Any]) -> None:
        """Say what is to be said on a new connection."""

    @abstractmethod
    def heard(self, payload: str) -> None:
        """Take note of a notification."""

    @abstractmethod
    def lost(self) -> None:
        """Take note that a connection which was opened has ended, on either side."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Take note that there is no connection now. It is tried again later."""

    @abstractmethod
    def pooled(self) -> None:
        """Take note that there is a pooler in between, and never will be a connection."""

    def start(self) -> None:
        """Have a connection from now on. Does nothing where there is one already, or is about to be."""
        with self._mutex:
            if self._life is None:
                self._life = _Life(self)

    def close(self) -> None:
        """Have none from now on."""
        with self._mutex:
            life, self._life = self._life, None
        if life is not None:
            life.end()

    def start_afresh(self) -> None:
        """Have no connection, and no thread. In a forked child, let go of the parent's."""
        life, self._life = self._life, None
        if life is not None:
            life.leave_to_parent()
        self._mutex = threading.Lock()


class _Life:
    """One thread with its connection, from start to close."""

    def __init__(self, direct: DirectConnection) -> None:
        self._direct = direct
        self._stopping = threading.Event()
        #: Wakes the thread while it waits for the server.
        self._bell, self._ringer = socket.socketpair()
        self._connection: psycopg.Connection[Any] | None = None
        self._thread = threading.Thread(target=self._live, name=direct.name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Disconnect, and wait until that is done; but not for a server that does not answer."""
        self._stopping.set()
        with suppress(OSError):  # it has ended by itself
            self._ringer.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join(CONNECT_SECONDS)

    def leave_to_parent(self) -> None:
        """Close this process's copies of what is open, without a word to the server.

        While a copy is open anywhere, the server takes the parent for alive.
        """
        self._bell.close()
        self._ringer.close()
        if self._connection is not None:
            with suppress(psycopg.Error, OSError):
                os.close(self._connection.fileno())

    def _live(self) -> None:
        waits = pauses()
        try:
            while not self._stopping.is_set():
                try:
                    with closing(_connect(self._direct.address)) as connection:
                        self._connection = connection
                        if not is_direct(connection):
                            self._direct.pooled()
                            return
                        connection.execute(SETTLE.encode())
                        self._direct.opened(connection)
                        waits = pauses()
                        self._stay(connection)
                except Exception as error:  # noqa: BLE001 - whatever it was, the thread must live to try again
                    self._direct.failed(error)
                finally:
                    self._connection = None
                self._stopping.wait(next(waits))
        finally:
            self._bell.close()
            self._ringer.close()

    def _stay(self, connection: psycopg.Connection[Any]) -> None:
        """Hear what the server says, until the connection is lost or not wanted any more."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                selector.register(self._bell, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    if not selector.select(HEARTBEAT_SECONDS):
                        connection.execute(HEARTBEAT)
                    for notification in connection.notifies(timeout=0):
                        self._direct.heard(notification.payload)
        finally:
            # Before it is closed: it must not be relied on for longer than the server does.
            self._direct.lost()


def _connect(address: Address) -> psycopg.Connection[Any]:
    if address.opener is not None:
        given = as_given(address, STANDING)
        given.prepare_threshold = None
        return given
    return psycopg.connect(
        address.url,
        autocommit=True,
        prepare_threshold=None,
        application_name=APPLICATION_NAME,
        connect_timeout=CONNECT_SECONDS,
        **STANDING,
    )

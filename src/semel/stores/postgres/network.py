"""When a server that says nothing any more counts as gone, as the kernel is told. It opens no connection.

A process that dies closes its connections, and the other side hears of it at once. Of a machine that dies, or a cable
that is cut, neither side hears. What is sent and not confirmed ends by ``tcp_user_timeout``. A client that has sent its
statement, and waits for the reply, sends nothing: it would wait for two hours, as kernels do, or for ever.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from semel.stores.postgres.address import STATEMENT_SECONDS

#: Each side asks the other after this many seconds of silence whether it is there,
KEEPALIVE_IDLE_SECONDS = 5
#: and again,
KEEPALIVE_INTERVAL_SECONDS = 5
#: so many times in all, before it gives up: after fifteen seconds, half of the usual lease. Sooner, and a switch that
#: is restarted would look like a dead machine.
KEEPALIVE_COUNT = 2
DEAD_AFTER_SECONDS = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_COUNT * KEEPALIVE_INTERVAL_SECONDS

_KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": KEEPALIVE_IDLE_SECONDS,
    "keepalives_interval": KEEPALIVE_INTERVAL_SECONDS,
    "keepalives_count": KEEPALIVE_COUNT,
}
#: For connections of statements and transactions, in libpq's names: no reply is waited for in vain for longer.
STATEMENTS: Mapping[str, Any] = {**_KEEPALIVES, "tcp_user_timeout": STATEMENT_SECONDS * 1000}
#: For connections that stay open as long as their process (``standing.py``).
STANDING: Mapping[str, Any] = {**_KEEPALIVES, "tcp_user_timeout": DEAD_AFTER_SECONDS * 1000}

_KERNEL = {
    "keepalives": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "keepalives_count": (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None)),
    "keepalives_idle": (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None)),
    "keepalives_interval": (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None)),
    "tcp_user_timeout": (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None)),
}


def tell_kernel(file: int, network: Mapping[str, int]) -> None:
    """Tell it about a connection that is made already, by the number of its file; *network* is in libpq's names."""
    with socket.socket(fileno=os.dup(file)) as own:
        for name, value in network.items():
            level, option = _KERNEL[name]
            if option is not None:
                with suppress(OSError):  # a Unix socket has no network
                    own.setsockopt(level, option, value)

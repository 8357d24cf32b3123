"""PgBouncer in front of a test PostgreSQL server, in transaction mode: a server connection is a client's for one
transaction, and then another's. It starts no PostgreSQL.
"""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import unquote, urlsplit

from semel.testing.process import Process
from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, Server, free_port, give, own_folder
from tests.kit.servers.programs import PGBOUNCER, find

#: So few that two clients of one test are bound to be given each other's connections.
POOL_SIZE = 2

#: A client's first words may be this, and the answer is one letter: it takes neither a driver nor a user's name.
SSL_REQUEST = struct.pack("!ii", 8, 80877103)

#: As PgBouncer comes, but for who may connect; how soon it tries a server again that was away; and after how many
#: seconds it tells a client that waits in vain, which a test should not wait minutes for.
SETTINGS = {
    "pool_mode": "transaction",
    "auth_type": "any",
    "max_client_conn": "500",
    "server_login_retry": "1",
    "query_wait_timeout": "30",
}


class PgBouncer(Server):
    """A PgBouncer. Its `url` leads to the same database as the server's."""

    def through(self, url: str) -> str:
        """Return the URL of the same server's database `url`, through here."""
        ours, theirs = urlsplit(self.url), urlsplit(url)
        return theirs._replace(netloc=ours.netloc).geturl()

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._ours.end(signal.SIGTERM)


@contextmanager
def pgbouncer(
    server: Server, *, pool_size: int = POOL_SIZE, settings: Mapping[str, str] = NO_SETTINGS
) -> Iterator[PgBouncer]:
    """Lend a PgBouncer in front of every database of `server`, with `pool_size` connections to each of them."""
    with own_folder() as folder:
        program = find(PGBOUNCER, folder) / "pgbouncer"
        port = free_port()
        where = {"listen_addr": LOOPBACK, "listen_port": str(port), "unix_socket_dir": ""}
        own = {**SETTINGS, "default_pool_size": str(pool_size), **settings, **where}
        lines = ["[databases]", f"* = {_target(server)}", "[pgbouncer]", *(f"{name} = {own[name]}" for name in own)]
        configuration = folder / "pgbouncer.ini"
        configuration.write_text("\n".join([*lines, ""]))
        give(configuration)
        with Process([program, configuration], folder, lambda _: _is_ready(port), signal.SIGTERM) as process:
            path = urlsplit(server.url).path
            yield PgBouncer(f"postgresql://{urlsplit(server.url).username}@{LOOPBACK}:{port}{path}", process)


def _target(server: Server) -> str:
    """Where it connects to, and as whom: the server's own owner, whoever asks."""
    parts = urlsplit(server.url)
    target = {"host": parts.hostname, "port": parts.port or 5432, "user": parts.username, "password": parts.password}
    return " ".join(f"{name}='{unquote(str(value))}'" for name, value in target.items() if value)


def _is_ready(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1) as connection:
        connection.sendall(SSL_REQUEST)
        return connection.recv(1) in {b"N", b"S"}
    return False

"""HAProxy in front of a test cluster: one address, which leads to the node that Patroni calls the primary. It starts
no PostgreSQL, and reads nothing of what it carries.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from semel.testing.process import Command, Process
from tests.kit.servers.base import LOOPBACK, Server, free_port, give, own_folder
from tests.kit.servers.patroni import PatroniCluster
from tests.kit.servers.programs import HAPROXY, find

#: A node is asked once a second, and counts as gone after the second answer that is none. Then its sessions are closed:
#: without that, a session of an old primary's would hang, or be a standby's.
_CONFIGURATION = """\
defaults
    mode tcp
    timeout connect 4s
    timeout client 30m
    timeout server 30m
    timeout check 2s

listen primary
    bind {loopback}:{port}
    option httpchk
    http-check send meth OPTIONS uri /primary
    http-check expect status 200
    default-server inter 1s fall 2 rise 1 on-marked-down shutdown-sessions
{nodes}
"""


class HAProxy(Server):
    """An HAProxy. Its `url` leads to the primary."""

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._ours.end(signal.SIGTERM)


@contextmanager
def haproxy(cluster: PatroniCluster) -> Iterator[HAProxy]:
    """Lend an HAProxy in front of *cluster*."""
    with own_folder() as folder:
        program = find(HAPROXY, folder) / "haproxy"
        port = free_port()
        nodes = (f"    server {node.name} {LOOPBACK}:{node.port} check port {node.rest}" for node in cluster.nodes)
        configuration = folder / "haproxy.cfg"
        configuration.write_text(_CONFIGURATION.format(loopback=LOOPBACK, port=port, nodes="\n".join(nodes)))
        give(configuration)
        command: Command = [program, "-db", "-f", configuration]  # in the foreground
        with Process(command, folder, lambda _: _is_listening(port), signal.SIGTERM) as process:
            yield HAProxy(f"postgresql://semel@{LOOPBACK}:{port}/postgres", process)


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False

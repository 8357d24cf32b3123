"""NATS servers with JetStream for tests: one alone, or a cluster of three. Streams in them are others' affair."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit
from urllib.request import urlopen

from semel.testing.process import Process
from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, Server, free_port, give, own_folder, until
from tests.kit.servers.programs import NATS, find

#: As many as a stream with three replicas needs.
NODES = 3


class NATSServer(Server):
    """A NATS server. Its streams are there again after `kill` and `start`, if they are kept in files."""

    def __init__(self, url: str, process: Process, name: str, monitor: int) -> None:
        super().__init__(url, process)
        self.name = name
        self._monitor = monitor

    @property
    def port(self) -> int:
        """Where it listens."""
        return urlsplit(self.url).port or 4222

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._ours.end(signal.SIGTERM)

    def sees_leader(self) -> bool:
        """Tell whether its cluster has a leader, and all are there: before that it makes no streams."""
        with suppress(OSError), urlopen(f"http://{LOOPBACK}:{self._monitor}/jsz") as answer:
            meta = json.load(answer).get("meta_cluster", {})
            return bool(meta.get("leader")) and meta.get("cluster_size") == NODES
        return False


class NATSCluster:
    """Three NATS servers, `nodes`, which can be killed and started one by one."""

    def __init__(self, nodes: Sequence[NATSServer]) -> None:
        self.nodes = tuple(nodes)
        self.url = "nats://" + ",".join(urlsplit(node.url).netloc for node in nodes)

    def node(self, name: str) -> NATSServer:
        """Return the node that calls itself so."""
        return next(node for node in self.nodes if node.name == name)


@contextmanager
def nats(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[NATSServer]:
    """Lend a NATS server with `settings` in its configuration, such as `max_payload`, in the words of that file."""
    with _process("alone", free_port(), settings) as server:
        yield server


@contextmanager
def nats_cluster() -> Iterator[NATSCluster]:
    """Lend a cluster of three, which has a leader."""
    routes = [free_port() for _ in range(NODES)]
    others = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in routes)
    with ExitStack() as ends:
        nodes = []
        for number, route in enumerate(routes):
            cluster = f'{{ name: semel, listen: "{LOOPBACK}:{route}", routes: [{others}] }}'
            nodes.append(ends.enter_context(_process(f"node-{number}", free_port(), {"cluster": cluster})))
        until("every node knows a leader", lambda: all(node.sees_leader() for node in nodes))
        yield NATSCluster(nodes)


@contextmanager
def _process(name: str, port: int, settings: Mapping[str, str]) -> Iterator[NATSServer]:
    with own_folder() as folder:
        program = find(NATS, folder) / "nats-server"
        monitor = free_port()
        own = {
            "server_name": name,
            "listen": f'"{LOOPBACK}:{port}"',
            "http": f'"{LOOPBACK}:{monitor}"',
            "jetstream": f'{{ store_dir: "{folder}/data" }}',
        }
        configuration = folder / "nats.conf"
        configuration.write_text("".join(f"{key}: {value}\n" for key, value in {**own, **settings}.items()))
        give(configuration)
        with Process([program, "-c", configuration], folder, lambda _: _is_ready(port), signal.SIGTERM) as process:
            yield NATSServer(f"nats://{LOOPBACK}:{port}", process, name, monitor)


def _is_ready(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1) as connection:
        return connection.recv(5) == b"INFO "
    return False

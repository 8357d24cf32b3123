"""One RabbitMQ node for tests, with an empty database of its own. It is in no cluster, and loads no plugins."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from semel.testing.process import Command, Process, run
from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, Server, free_port, give, own_folder
from tests.kit.servers.programs import RABBITMQ, find

#: A client's first words; the answer begins with a frame of the method Connection.Start.
GREETING = b"AMQP\x00\x00\x09\x01"
START = b"\x01\x00\x00"

#: The log of the quorum queues takes its whole size on disk at the start: 512 MB, and most of the time.
SETTINGS = {"raft.wal_max_size_bytes": "4194304"}

#: What nodes and tools know each other by.
COOKIE = "semel"
#: As it comes: the user for whom nothing but loopback is open.
USER = "guest"


class RabbitMQServer(Server):
    """A RabbitMQ node. What is persistent in it is there again after `kill` and `start`."""

    def __init__(self, url: str, process: Process, programs: Path, node: Mapping[str, str], folder: Path) -> None:
        super().__init__(url, process)
        self._programs = programs
        self._node = node
        self._folder = folder

    @property
    def port(self) -> int:
        """Where it listens."""
        return urlsplit(self.url).port or 5672

    def stop(self) -> None:
        """Stop it in good order: connections are closed, and what is persistent is written."""
        self._ours.end(signal.SIGTERM)

    def control(self, *words: str) -> str:
        """Run `rabbitmqctl` with *words*. It starts an Erlang of its own, which takes seconds."""
        arguments = ["--erlang-cookie", COOKIE, "--quiet"]
        return run(_with(self._node, [self._programs / "rabbitmqctl", *arguments, *words]), self._folder)


@contextmanager
def rabbitmq(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[RabbitMQServer]:
    """Lend a RabbitMQ node with `settings` in its configuration file, such as `max_message_size`."""
    with own_folder() as folder, own_folder() as names_folder:
        programs = find(RABBITMQ, folder)
        # Erlang's register of names. A node without one starts one, which outlives it.
        names = free_port()
        epmd: Command = ["/usr/bin/env", "epmd", "-port", str(names), "-address", LOOPBACK]
        configuration = folder / "rabbitmq.conf"
        configuration.write_text("".join(f"{name} = {value}\n" for name, value in {**SETTINGS, **settings}.items()))
        give(configuration)
        port = free_port()
        node = _node(folder, port, names)
        command = _with(node, [programs / "rabbitmq-server"])
        with (
            Process(epmd, names_folder, lambda _: _is_open(names), signal.SIGTERM),
            Process(command, folder, lambda _: _is_ready(port), signal.SIGKILL) as process,
        ):
            yield RabbitMQServer(f"amqp://{USER}:{USER}@{LOOPBACK}:{port}/", process, programs, node, folder)


def _node(folder: Path, port: int, names: int) -> dict[str, str]:
    # Its threads wake each other for every module that is loaded. On a virtual machine that takes longer than the work,
    # so they wait awake for a moment instead: 6 s to the start, not 20.
    awake = "+sbwt long +sbwtdio long"
    erlang = f"-noinput -setcookie {COOKIE} -kernel inet_dist_use_interface {{127,0,0,1}} {awake}"
    return {
        "ERL_EPMD_PORT": str(names),
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "LC_ALL": "C.UTF-8",
        "RABBITMQ_NODENAME": f"semel-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # The machine's own settings are for its own node.
        "RABBITMQ_ALLOW_INPUT": "1",  # No shell in between: a signal is for the node itself.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": erlang,
    }


def _with(environment: Mapping[str, str], command: Command) -> Command:
    return ["/usr/bin/env", *(f"{name}={value}" for name, value in environment.items()), *command]


def _is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False


def _is_ready(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=5) as connection:
        connection.sendall(GREETING)
        return connection.recv(len(START)) == START
    return False

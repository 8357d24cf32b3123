"""PostgreSQL servers under Patroni, with one etcd: one is the primary, the others its standbys, and they fail over by
themselves. What is in their databases is others' affair.

A node is Patroni and its PostgreSQL. What a node sends to the others and to etcd goes through forwarders, which can be
cut; clients reach PostgreSQL itself. PostgreSQL comes from where every test server does; etcd and Patroni come from the
extra `failover`. Patroni runs as the servers' user, and needs a Python that this user may read: it gets a copy of its
packages and, where need be, of Python. All of it is for Linux alone: it looks into /proc for what belongs to a node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from semel.testing.process import Command, Process, ServerDidNotStart, run
from tests.kit.servers.base import LOOPBACK, free_port, give, own_folder, until
from tests.kit.servers.forwarder import Forwarder
from tests.kit.servers.programs import ETCD, PATRONI, POSTGRES, NoServerBinary, find

#: What Patroni calls besides the server itself.
PROGRAMS = replace(
    POSTGRES,
    names=("postgres", "initdb", "pg_ctl", "pg_isready", "pg_controldata", "pg_basebackup", "pg_rewind"),
)
#: Patroni's shortest. A node that is gone is replaced once its lock has expired, after `ttl` seconds.
TIMES = {"ttl": 20, "loop_wait": 1, "retry_timeout": 3}
#: How long a cluster may take to be whole again: a node may have to be copied anew, on a busy machine.
WHOLE_SECONDS = 240.0
#: How long one of its interfaces may take to answer.
ASK_SECONDS = 5.0

#: A silent network is noticed by the replication after so long.
SETTINGS = {"wal_sender_timeout": "4s", "wal_receiver_timeout": "4s", "wal_keep_size": "256MB"}
HBA = [f"host all all {LOOPBACK}/32 trust", f"host replication all {LOOPBACK}/32 trust"]
#: What Patroni with etcd and psycopg consists of, beside what these require.
PACKAGES = ("patroni", "python-etcd", "psycopg", "psycopg-binary")
#: Of Python's own library, what no server needs.
UNUSED = ("site-packages", "test", "idlelib", "lib2to3", "ensurepip", "config-*", "__pycache__")


class Node:
    """Patroni and its PostgreSQL."""

    def __init__(self, name: str, data: Path, port: int, rest: int, process: Process) -> None:
        self.name = name
        self.port = port
        #: The port at which its Patroni is asked.
        self.rest = rest
        #: The URL of this very server, primary or not.
        self.url = f"postgresql://semel@{LOOPBACK}:{port}/postgres"
        self._data = data
        self._process = process

    @property
    def postmaster(self) -> int:
        """The process id of its PostgreSQL; 0: it has none now."""
        with suppress(FileNotFoundError, IndexError, ValueError):
            return int((self._data / "postmaster.pid").read_text().splitlines()[0])
        return 0

    @property
    def patroni(self) -> int:
        """The process id of its Patroni."""
        return self._process.pid

    def processes(self) -> list[int]:
        """Every process of its PostgreSQL: they alone work in its folder."""
        return [pid for pid in _pids() if _folder_of(pid) == self._data]

    def kill_postmaster(self) -> None:
        """End PostgreSQL's first process with SIGKILL. Its backends notice, sooner or later, and end."""
        with suppress(ProcessLookupError):
            os.kill(self.postmaster, signal.SIGKILL)

    def kill(self) -> None:
        """End Patroni and PostgreSQL with SIGKILL."""
        postmaster = self.postmaster
        self._process.end(signal.SIGKILL)
        for pid in [postmaster, *self.processes()] if postmaster else self.processes():
            if _folder_of(pid) == self._data:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until(f"{self.name} has ended", lambda: not self.processes())

    def start(self) -> None:
        """Start it after `kill`."""
        self._process.start()

    def ask(self, path: str, body: Mapping[str, str] | None = None) -> Any:
        """Ask its Patroni; None: there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        asked = Request(f"http://{LOOPBACK}:{self.rest}{path}", data)
        with suppress(OSError, ValueError), urlopen(asked, timeout=ASK_SECONDS if data is None else 60) as answer:  # noqa: S310 - as above
            text = answer.read().decode()
            return json.loads(text) if text.startswith("{") else text
        return None


class PatroniCluster:
    """Two nodes, or more. Its `url` names all, and leads to the one that can be written."""

    def __init__(self, nodes: tuple[Node, ...], wires: Mapping[str, Mapping[str, Forwarder]], sync: str) -> None:
        self.nodes = nodes
        hosts = ",".join(f"{LOOPBACK}:{node.port}" for node in nodes)
        self.url = f"postgresql://semel@{hosts}/postgres?target_session_attrs=read-write"
        self._wires = wires
        self._sync = sync

    def primary(self) -> Node:
        """Wait until there is one, and return it."""
        until("there is a primary", lambda: bool(self._primaries()), WHOLE_SECONDS)
        return next(iter(self._primaries()), None) or self.primary()

    def other(self, node: Node) -> Node:
        """Return the other one of two."""
        return next(each for each in self.nodes if each is not node)

    def kill_postmaster(self) -> Node:
        """Kill the primary's PostgreSQL, and not its Patroni; return its node."""
        node = self.primary()
        node.kill_postmaster()
        return node

    def switch_over(self) -> Node:
        """Have Patroni swap the two, in good order; return the old primary."""
        old = self.primary()
        wanted = {"leader": old.name, "candidate": self.other(old).name}
        until("they have swapped", lambda: self._is_swapped(old, wanted), WHOLE_SECONDS)
        return old

    def cut(self, isolated: Node | None = None) -> None:
        """Cut the network between the nodes; and that between one of them and etcd."""
        for node in self.nodes:
            for name, wire in self._wires[node.name].items():
                if name != "etcd" or node is isolated:
                    wire.cut()

    def heal(self) -> None:
        """End every cut."""
        for wires in self._wires.values():
            for wire in wires.values():
                wire.heal()

    def is_whole(self) -> bool:
        """Tell whether there is a primary, and every standby follows it: one synchronously, if that was asked for."""
        return self._are_there(self.nodes) and bool(self._primaries())

    def until_whole(self) -> None:
        """Wait for that."""
        until("primary and standby are there", self.is_whole, WHOLE_SECONDS)

    def until_whole_without(self, lost: Node) -> None:
        """Wait for that among the other nodes."""
        rest = [node for node in self.nodes if node is not lost]
        until("primary and standby are there", lambda: self._are_there(rest), WHOLE_SECONDS)

    def _are_there(self, nodes: Collection[Node]) -> bool:
        wanted = Counter({("leader", "running"): 1, (self._sync, "streaming"): 1})
        wanted["replica", "streaming"] += len(nodes) - wanted.total()
        names = {node.name for node in nodes}
        for node in nodes:
            seen = node.ask("/cluster")
            if isinstance(seen, dict):
                members = [each for each in seen.get("members", []) if each.get("name") in names]
                return Counter((each.get("role"), each.get("state")) for each in members) == wanted
        return False

    def _primaries(self) -> list[Node]:
        return [node for node in self.nodes if node.ask("/primary") is not None]

    def _is_swapped(self, old: Node, wanted: Mapping[str, str]) -> bool:
        # In the middle of something else Patroni refuses, and is asked again.
        if old in self._primaries():
            old.ask("/switchover", wanted)
        return self.other(old) in self._primaries()


@contextmanager
def patroni(
    *, synchronous: bool, strict: bool = False, fsync: bool = True, standbys: int = 1
) -> Iterator[PatroniCluster]:
    """Lend a cluster that is whole. `strict`: without a standby, a synchronous primary commits nothing."""
    with ExitStack() as ends:
        shared = ends.enter_context(own_folder())
        etcd = _etcd(ends)
        programs = find(PROGRAMS, shared)
        python = _python(shared)
        times = {**TIMES, "primary_start_timeout": 0, "maximum_lag_on_failover": 1 << 30}
        modes = {"synchronous_mode": synchronous, "synchronous_mode_strict": strict}
        settings = {**SETTINGS, **({} if fsync else {"fsync": "off"})}
        dcs = {**times, **modes, "postgresql": {"use_pg_rewind": True, "parameters": settings, "pg_hba": HBA}}
        wires: dict[str, dict[str, Forwarder]] = {}
        nodes = []
        for name in "abcde"[: 1 + standbys]:
            ports = {"postgres": free_port(), "rest": free_port(), "etcd": etcd}
            wires[name] = {each: ends.enter_context(Forwarder(free_port(), ports[each])) for each in ports}
            nodes.append(_node(ends, name, ports, wires[name], (programs, python, dcs)))
        cluster = PatroniCluster(tuple(nodes), wires, "sync_standby" if synchronous else "replica")
        ends.callback(cluster.heal)
        cluster.until_whole()
        yield cluster


def _node(
    ends: ExitStack,
    name: str,
    ports: Mapping[str, int],
    wires: Mapping[str, Forwarder],
    how: tuple[Path, list[str], Mapping[str, Any]],
) -> Node:
    programs, python, dcs = how
    folder = ends.enter_context(own_folder())
    data = folder / "data"
    user = {"username": "semel"}
    configuration = {
        "scope": "semel",
        "name": name,
        "restapi": {
            "listen": f"{LOOPBACK}:{ports['rest']}",
            "connect_address": f"{LOOPBACK}:{wires['rest'].port}",
        },
        # Not the address that etcd would tell: it leads past the forwarder.
        "etcd3": {"host": f"{LOOPBACK}:{wires['etcd'].port}", "use_proxies": True},
        "bootstrap": {"dcs": dcs, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}, "no-sync"]},
        "postgresql": {
            "listen": f"{LOOPBACK}:{ports['postgres']}",
            "connect_address": f"{LOOPBACK}:{wires['postgres'].port}",
            "data_dir": str(data),
            "bin_dir": str(programs),
            "pgpass": str(folder / "pgpass"),
            "authentication": {"superuser": user, "replication": user, "rewind": user},
            "parameters": {"unix_socket_directories": ""},
            "pg_hba": HBA,
            "basebackup": ["no-sync", {"checkpoint": "fast"}],
        },
    }
    path = folder / "patroni.yml"
    path.write_text(json.dumps(configuration))  # JSON is YAML
    give(path)
    command: Command = [*python, "-S", "-m", "patroni", path]
    # Its PostgreSQL may take longer: the cluster is waited for as a whole.
    is_alive = f"http://{LOOPBACK}:{ports['rest']}/liveness"
    process = Process(command, folder, lambda _: _answers(is_alive), signal.SIGTERM)
    node = Node(name, data, ports["postgres"], ports["rest"], process)
    process.start()
    ends.callback(node.kill)
    return node


def _etcd(ends: ExitStack) -> int:
    """Start one; return its port."""
    folder = ends.enter_context(own_folder())
    program = find(ETCD, folder) / "etcd"
    clients, peers = (f"http://{LOOPBACK}:{free_port()}" for _ in range(2))
    options = {
        "data-dir": folder / "data",
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": peers,
        "initial-advertise-peer-urls": peers,
        "initial-cluster": f"default={peers}",
        # Its own disk is not what is tried here: on a busy one it would lose the leader's lock.
        "unsafe-no-fsync": "true",
    }
    command: Command = [program, *(f"--{name}={value}" for name, value in options.items())]
    ends.enter_context(Process(command, folder, lambda _: _answers(f"{clients}/health"), signal.SIGTERM))
    return int(clients.rpartition(":")[2])


def _answers(url: str) -> bool:
    with suppress(OSError, ValueError), urlopen(url, timeout=ASK_SECONDS) as answer:  # noqa: S310 - always http
        return bool(answer.status == 200)
    return False


def _python(folder: Path) -> list[str]:
    """Return how to run Python with Patroni's packages, as the servers' user; copies go into *folder*."""
    packages = folder / "packages"
    for name in _required(PACKAGES):
        for file in distribution(name).files or []:
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file() and source.suffix != ".pyc":
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, packages / file)
    environment = ["/usr/bin/env", f"PYTHONPATH={packages}", "PYTHONDONTWRITEBYTECODE=1"]
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for program in (sys.executable, f"/usr/bin/{minor}"):
        with suppress(OSError, ServerDidNotStart):
            command = [*environment, program]
            run([*command, "-S", "-c", "import patroni, psycopg, ssl"], folder)
            return command
    own = folder / "python"
    for source in (Path(sys.base_prefix) / "bin" / minor, *Path(sys.base_prefix, "lib").glob("libpython*.so*")):
        (own / source.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, own / source.parent.name)
    library = sysconfig.get_path("stdlib")
    shutil.copytree(library, own / "lib" / minor, ignore=shutil.ignore_patterns(*UNUSED))
    return [*environment, f"LD_LIBRARY_PATH={own / 'lib'}", str(own / "bin" / minor)]


@cache
def _required(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return *names* and all packages that they require. What only some platforms need may be missing."""
    found: dict[str, None] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:
            if name in names:
                raise NoServerBinary(PATRONI) from None
            continue
        if name not in found:
            found[name] = None
            wanted += [re.split(r"[^\w.-]", each)[0] for each in required if "extra ==" not in each]
    return tuple(found)


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]


def _folder_of(pid: int) -> Path | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cwd").readlink()
    return None

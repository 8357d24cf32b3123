"""The processes of the story: PostgreSQL, a broker, and three programs that may be killed. They end with the ``with``
block. What happens to them is in ``__main__.py``.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psycopg

from tests.kit import servers

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0
POLL_SECONDS = 0.05

#: A Redis that has on its disk what it has acknowledged. Queues of RabbitMQ do by themselves, being durable.
DURABLE = {"appendonly": "yes", "appendfsync": "always"}


@dataclass(frozen=True)
class Signs:
    """What a program writes."""

    #: When it is started.
    ready: str
    #: When it has done something.
    works: str


class Program:
    """One of the three: it can be killed, and started again."""

    def __init__(
        self, name: str, command: Sequence[str], signs: Signs, variables: Mapping[str, str], log: Path
    ) -> None:
        """Start nothing yet. What it writes goes to *log*, and *signs* in there say how far it is."""
        self.name = name
        self.log = log
        self.kills = 0
        self._signs = signs
        self._bytes = 0  # of the log, when it was started last
        self._command = [sys.executable, "-m", *command]
        self._variables = os.environ | variables
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it needs a second or so to be ready."""
        self._bytes = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            # In a session of its own: Ctrl-C is for us, and we end it.
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._variables, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> int:
        """``kill -9``: it gets no chance to write or to say anything. Return its process id."""
        self.kills += 1
        return self.end()

    def end(self) -> int:
        """End it for good."""
        if self._process is None:
            return 0
        self._process.kill()
        self._process.wait()
        return self._process.pid

    def until_ready(self) -> None:
        """Wait until it is started."""
        self._until_said(self._signs.ready)

    def until_at_work(self) -> None:
        """Wait until it has done something since its start: killed before, it would be killed for nothing."""
        self._until_said(self._signs.works)

    def _until_said(self, words: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while words not in self.log.read_bytes()[self._bytes :].decode():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start, or does nothing.\n{self.log.read_text()}")
            time.sleep(POLL_SECONDS)


class World:
    """All of it: the two databases, the broker, the three programs."""

    def __init__(self, folder: Path, postgres: str, broker: str) -> None:
        """Start nothing yet."""
        self.shop, self.shipping = (urlsplit(postgres)._replace(path=f"/{name}").geturl() for name in DATABASES)
        self.broker = broker
        port = servers.free_port()
        self.url = f"http://{servers.LOOPBACK}:{port}"
        variables = {"SHOP_STORE": self.shop, "SHIPPING_STORE": self.shipping, "SEMEL_STORE": self.shop}
        api = ("uvicorn", "examples.parcels.shop:app", "--port", str(port))
        relay = ("semel", "relay", "--to", f"orders={broker}", "--lease", "1s")
        self.api = Program("api", api, Signs("startup complete", '" 201'), variables, folder / "api")
        self.relay = Program("relay", relay, Signs("Relaying to", "relayed to"), variables, folder / "relay")
        consumer = ("examples.parcels.shipping", broker)
        self.consumer = Program("consumer", consumer, Signs("ready", "Ran"), variables, folder / "consumer")

    @property
    def programs(self) -> tuple[Program, Program, Program]:
        """What may be killed."""
        return self.api, self.relay, self.consumer

    def start(self) -> None:
        """Start the three, and wait until they are ready."""
        for each in self.programs:
            each.start()
        for each in self.programs:  # The consumer has declared its queue then, and nothing was ordered yet.
            each.until_ready()

    def ask(self, store: str, sql: str) -> list[Any]:
        """Read a database, past all programs."""
        with psycopg.connect(store) as connection:
            return connection.execute(sql.encode()).fetchall()


DATABASES = ("shop", "shipping")


@contextmanager
def world(broker: str | None = None) -> Iterator[World]:
    """Run everything during the block. Without *broker*, it is RabbitMQ if that is installed."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="parcels-")))
        opened = threads.submit(_open_broker, stack, broker)  # RabbitMQ takes some seconds.
        with ExitStack() as later:
            postgres = later.enter_context(servers.postgres())
            _make_databases(postgres.url)
            made = World(folder, postgres.url, opened.result())
            for each in made.programs:
                later.callback(each.end)
            made.start()
            yield made


def _open_broker(stack: ExitStack, wanted: str | None) -> str:
    if wanted != "redis":
        try:
            return stack.enter_context(servers.rabbitmq()).url
        except servers.NoServerBinary:
            if wanted is not None:
                raise
    return stack.enter_context(servers.redis(settings=DURABLE)).url


def _make_databases(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        for name in DATABASES:
            connection.execute(f"CREATE DATABASE {name}".encode())
    for name in DATABASES:
        url = urlsplit(postgres)._replace(path=f"/{name}").geturl()
        command = [sys.executable, "-m", "semel", "migrate", url]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

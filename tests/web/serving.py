"""Real servers as child processes on loopback, and what a checker can see of them from outside."""

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.kit.servers import free_port
from tests.web.harness import HANG_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
PORT = "{port}"
#: Nothing here is encrypted. To read the world's certificates would take ten times as long as a request.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

COMMANDS: dict[str, Sequence[str]] = {
    "uvicorn": ("uvicorn", "tests.web.apps:asgi_app", "--port", PORT, "--log-level", "warning"),
    "uvicorn without lifespan": ("uvicorn", "tests.web.apps:asgi_app", "--port", PORT, "--lifespan", "off"),
    "uvicorn, 2 workers": ("uvicorn", "tests.web.apps:asgi_app", "--port", PORT, "--workers", "2"),
    "hypercorn": ("hypercorn", "tests.web.apps:asgi_app", "--bind", "127.0.0.1:{port}"),
    "granian ASGI": ("granian", "tests.web.apps:asgi_app", "--port", PORT, "--interface", "asgi"),
    "granian WSGI": (
        *("granian", "tests.web.apps:wsgi_app", "--port", PORT, "--interface", "wsgi"),
        *("--blocking-threads", "4"),
    ),
    "gunicorn sync": ("gunicorn", "tests.web.apps:wsgi_app", "--bind", "127.0.0.1:{port}", "--workers", "2"),
    "gunicorn gthread": ("gunicorn", "tests.web.apps:wsgi_app", "--bind", "127.0.0.1:{port}", "--threads", "4"),
    "gunicorn, 8 threads": ("gunicorn", "tests.web.apps:wsgi_app", "--bind", "127.0.0.1:{port}", "--threads", "8"),
    "gunicorn --preload": (
        *("gunicorn", "tests.web.apps:wsgi_app", "--bind", "127.0.0.1:{port}"),
        *("--preload", "--workers", "2", "--threads", "2"),
    ),
    "gunicorn gevent": ("gunicorn", "tests.web.apps:wsgi_app", "--bind", "127.0.0.1:{port}", "-k", "gevent"),
    "wsgiref": ("tests.web.apps", PORT),
}


@dataclass(frozen=True)
class Effect:
    pid: int
    key: str
    attempt: int


@dataclass
class Backstage:
    """What the servers of one test share: a store, a file of effects, a file that lets held handlers go."""

    folder: Path
    store: str
    lease_ms: int = 30_000
    on_crash: str = "rerun"
    mode: str = "guard"
    in_progress: str = "conflict"
    #: A Redis in front of the store.
    cache: str = ""
    #: When an event loop that shows no life is taken for dead; 0: as usual.
    loop_silence_ms: int = 0
    servers: list["Server"] = field(default_factory=list)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def serve(self, kind: str) -> "Server":
        server = Server(kind, self)
        self.servers.append(server)
        wait_until(server.is_up)
        return server

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path[1:]]),
            "SEMEL_TEST_STORE": self.store,
            "SEMEL_TEST_EFFECTS": str(self.folder / "effects"),
            "SEMEL_TEST_LEASE_MS": str(self.lease_ms),
            "SEMEL_TEST_ON_CRASH": self.on_crash,
            "SEMEL_TEST_MODE": self.mode,
            "SEMEL_TEST_IN_PROGRESS": self.in_progress,
            "SEMEL_TEST_CACHE": self.cache,
            "SEMEL_TEST_LOOP_SILENCE_MS": str(self.loop_silence_ms),
        }

    @property
    def effects(self) -> list[Effect]:
        file = self.folder / "effects"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Effect(int(pid), key, int(attempt)) for pid, key, attempt in map(str.split, lines)]

    def is_blocked(self) -> bool:
        """Whether one of them blocks its loop, or has."""
        return (self.folder / "effects.blocked").exists()

    def let_go(self) -> None:
        (self.folder / "effects.go").touch()

    def close(self) -> None:
        self.let_go()
        for server in self.servers:
            server.kill()
        self.threads.shutdown()


class Server:
    """One server, with every process that it starts."""

    def __init__(self, kind: str, backstage: Backstage) -> None:
        self._backstage = backstage
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = backstage.folder / f"{len(backstage.servers)}.log"
        command = [word.format(port=port) for word in COMMANDS[kind]]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=backstage.environment,
                cwd=backstage.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health", verify=NO_CERTIFICATES).status_code == 201
        except httpx.TransportError:
            return False

    def pay(self, key: str = "key-1", body: str = '{"amount": 5}') -> httpx.Response:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        url = f"{self.url}/pay"
        return httpx.post(url, content=body, headers=headers, timeout=HANG_SECONDS, verify=NO_CERTIFICATES)

    def start_paying(self, key: str = "key-1", body: str = '{"hold": true}') -> "Future[httpx.Response]":
        return self._backstage.threads.submit(self.pay, key, body)

    @property
    def waiting(self) -> int:
        """How many wait in it. It has one process."""
        return int(httpx.get(f"{self.url}/waiting", verify=NO_CERTIFICATES, timeout=HANG_SECONDS).text)

    def stop(self) -> int:
        """Ask it to end, and wait until it has."""
        self.process.terminate()
        return self.process.wait(HANG_SECONDS)

    def kill(self) -> None:
        """End it and all that it started, at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(HANG_SECONDS)


def seen(response: httpx.Response) -> tuple[int, bool]:
    """The status, and whether it is a replay."""
    return response.status_code, response.headers.get("idempotent-replayed") == "true"


def code(response: httpx.Response) -> Any:
    return response.json().get("code")

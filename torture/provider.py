"""A payment provider that honours idempotency keys and logs every call: ``python -m torture.provider LOG``.

It runs in a process of its own, so that no fault reaches it. It prints its port, and ends when its input does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torture.witness import append

HOST = "127.0.0.1"
PATIENCE_SECONDS = 20
#: Where ``torture`` can be imported from.
ROOT = Path(__file__).parent.parent


class Provider(ThreadingHTTPServer):
    """Charges once per idempotency key, however often it is asked."""

    def __init__(self, log: Path) -> None:
        """Log to the file *log*."""
        super().__init__((HOST, 0), _Handler)
        self._log = log
        self._mutex = threading.Lock()
        self._charges: dict[str, str] = {}

    def charge(self, idempotency_key: str, key: str) -> str:
        """Charge once; return the charge's number."""
        with self._mutex:
            is_first = idempotency_key not in self._charges
            number = self._charges.setdefault(idempotency_key, f"ch_{len(self._charges) + 1}")
            append(self._log, {"idempotency_key": idempotency_key, "key": key, "is_first": is_first})
        return number


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"charge": self.server.charge(self.headers["Idempotency-Key"], asked["key"])}).encode()
        self.send_response(201)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Print nothing: the log file has the calls."""


def charge(port: int, key: str, idempotency_key: str) -> str:
    """Ask the provider on *port* to charge for *key*; return the charge's number."""
    connection = HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", "/charges", json.dumps({"key": key}), {"Idempotency-Key": idempotency_key})
        return str(json.load(connection.getresponse())["charge"])
    finally:
        connection.close()


@contextmanager
def provider(log: Path) -> Iterator[int]:
    """Run a provider during the block; yield its port."""
    command = [sys.executable, "-m", "torture.provider", str(log)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdout is None:
            raise AssertionError
        yield int(process.stdout.readline())
        process.communicate()


def main() -> None:
    """Serve until the input ends."""
    server = Provider(Path(sys.argv[1]))
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()

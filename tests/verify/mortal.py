"""A small server that is killed and started again, as a program. Its payments and keys are in a SQLite file, and what
it does after a crash is chosen by a word. It is not Semel.

    python mortal.py MODE FOLDER PORT
"""

import json
import sqlite3
import sys
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: A request is under way for so long that a kill meets it.
HANDLER_SECONDS = 0.15
LEASE_SECONDS = 0.3
#: How many requests are refused while there is a file "away" in the folder; the last of them removes it.
REFUSALS = 3

mode, folder = sys.argv[1], Path(sys.argv[2])
in_memory: dict[str, bytes] = {}
away = folder / "away"
refused: list[str] = []


def database() -> sqlite3.Connection:
    return sqlite3.connect(folder / "payments.db", timeout=10, isolation_level=None)


def claimed(key: str, asked: bytes) -> bytes | bool | int | None:
    """Whether the key is this request's now; else the stored answer, a status, or None while another runs."""
    with closing(database()) as connection:
        row = connection.execute("SELECT body, asked FROM keys WHERE key = ?", [key]).fetchone()
        if row is None:
            new = "INSERT OR IGNORE INTO keys VALUES (?, NULL, ?, ?)"
            return connection.execute(new, [key, time.time() + LEASE_SECONDS, asked]).rowcount == 1 or None
        if row[1] != asked and not (mode == "another-body-takes-over" and row[0] is None):
            return 422
        if row[0] is not None:
            return bytes(row[0])
        if mode == "409-for-ever":
            return None
        over = "UPDATE keys SET until = ? WHERE key = ? AND body IS NULL AND until < ?"
        return connection.execute(over, [time.time() + LEASE_SECONDS, key, time.time()]).rowcount == 1 or None


def paid(key: str, asked: bytes) -> bytes:
    with closing(database()) as connection:
        insert = "INSERT INTO payments DEFAULT VALUES"
        if mode in {"effect-before-record", "another-body-takes-over", "keys-ignored"}:
            number = connection.execute(insert).lastrowid
            time.sleep(HANDLER_SECONDS)
        else:
            time.sleep(HANDLER_SECONDS)
            connection.execute("BEGIN IMMEDIATE")
            number = connection.execute(insert).lastrowid
        body = json.dumps({"id": number}).encode()
        connection.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, 0, ?)", [key, body, asked])
        if connection.in_transaction:
            connection.execute("COMMIT")
    return body


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with closing(database()) as connection:
            self.reply(200, json.dumps(connection.execute("SELECT count(*) FROM payments").fetchone()[0]).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        key = self.headers["idempotency-key"]
        if away.exists():
            refused.append(key)
            if len(refused) == REFUSALS:
                away.unlink()
            self.reply(503, b"{}")
            return
        if mode == "keys-ignored":
            self.reply(201, paid(key, asked))
            return
        if mode == "keys-in-memory":
            if key not in in_memory:
                in_memory[key] = paid(key, asked)
            self.reply(201, in_memory[key])
            return
        claim = claimed(key, asked)
        if claim is None or claim is False:
            self.reply(409, b"{}")
        elif claim is True:
            self.reply(201, paid(key, asked))
        elif isinstance(claim, int):
            self.reply(claim, b"{}")
        else:
            self.reply(201, claim)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    with closing(database()) as tables:
        tables.execute("PRAGMA journal_mode = WAL")
        tables.execute("CREATE TABLE IF NOT EXISTS payments (id INTEGER PRIMARY KEY)")
        tables.execute("CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, body BLOB, until REAL, asked BLOB)")
    Server(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()

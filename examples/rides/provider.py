"""A payment provider and a mail provider, in one server of their own. It knows nothing of Semel.

Charges are made once per ``Idempotency-Key``. Mails take no key: a caller has to ask whether one was sent.
``POST /trouble {"to": "/charges", "kind": "lose"}`` makes the next such call go wrong:

    fail       500, and nothing was done
    hang       nothing is done and nothing said, until the caller hangs up
    lose       it is done, and the connection closed without an answer
    decline    402: the card has no money
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

LOOPBACK = "127.0.0.1"

Trouble = Literal["fail", "hang", "lose", "decline"]
Answer = tuple[int, Any]


class Books:
    """What the provider did."""

    def __init__(self) -> None:
        self.charges: list[dict[str, Any]] = []
        self.receipts: list[dict[str, Any]] = []
        #: Every order that came in, whatever was made of it.
        self.orders: list[dict[str, Any]] = []
        #: The next call of a path that goes wrong.
        self.troubles: dict[str, Trouble] = {}
        #: The paths of callers that are kept waiting.
        self.hanging: list[str] = []
        self._answers: dict[str, tuple[Any, Answer]] = {}
        self._lock = threading.Lock()

    def charge(self, key: str, bill: dict[str, Any], *, has_money: bool = True) -> Answer:
        """Charge a card: once per key, whatever the result."""
        with self._lock:
            known, answer = self._answers.setdefault(key, (bill, self._charge(key, bill, has_money=has_money)))
        return answer if known == bill else (422, {"error": "This key was used for another charge."})

    def mail(self, receipt: dict[str, Any]) -> Answer:
        """Send a mail: each time."""
        with self._lock:
            sent = {"id": f"mail_{len(self.receipts) + 1}", **receipt}
            self.receipts.append(sent)
        return 201, sent

    def _charge(self, key: str, bill: dict[str, Any], *, has_money: bool) -> Answer:
        if key in self._answers:
            return self._answers[key][1]
        if not has_money:
            return 402, {"reason": "insufficient funds"}
        charge = {"id": f"ch_{len(self.charges) + 1}", "ride": bill["ride"], "amount": bill["amount"]}
        self.charges.append(charge)
        return 201, charge


class Provider(BaseHTTPRequestHandler):
    """Serves one call."""

    server: Server

    def do_GET(self) -> None:
        """``/charges``, ``/receipts``, ``/orders`` (each may ask for one ``?ride=``) and ``/hanging``."""
        books, url = self.server.books, urlsplit(self.path)
        lists: dict[str, list[Any]] = {
            "/charges": books.charges,
            "/receipts": books.receipts,
            "/orders": books.orders,
            "/hanging": books.hanging,
        }
        wanted = dict(parse_qsl(url.query)).get("ride")
        self._answer(200, [each for each in lists[url.path] if wanted is None or str(each["ride"]) == wanted])

    def do_POST(self) -> None:
        """``/charges``, ``/receipts`` and ``/trouble``."""
        books = self.server.books
        content = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/trouble":
            books.troubles[content["to"]] = content["kind"]
            self._answer(201, content)
            return
        books.orders.append({"to": self.path, "ride": content["ride"]})
        trouble = books.troubles.pop(self.path, None)
        if trouble == "fail":
            self._answer(500, {"error": "Something is wrong here."})
        elif trouble == "hang":
            self._hang()
        else:
            status, answer = self._do(content, has_money=trouble != "decline")
            if trouble != "lose":
                self._answer(status, answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Print nothing: the books have the calls."""

    def _do(self, content: dict[str, Any], *, has_money: bool) -> Answer:
        if self.path == "/receipts":
            return self.server.books.mail(content)
        return self.server.books.charge(self.headers["idempotency-key"], content, has_money=has_money)

    def _hang(self) -> None:
        hanging = self.server.books.hanging
        hanging.append(self.path)
        self.rfile.read(1)  # Ends when the caller hangs up, or is killed.
        hanging.remove(self.path)

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """The provider on a port of its own: 0 is any that is free."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), Provider)
        self.books = Books()
        self.url = f"http://{LOOPBACK}:{self.server_address[1]}"


if __name__ == "__main__":
    server = Server(*map(int, sys.argv[1:]))
    print(server.url, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # The parent process holds the other end, and has ended when this returns.

"""A card company and a mail service on port 9000. They know nothing of Semel, and take their time to answer.

A charge is made once per Idempotency-Key; of an amount of 13, the answer is lost. Mails take no key: each is sent.
"""

import json
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW = 3.0  # seconds
UNLUCKY = 13

book: list[str] = []  # what really happened; curl localhost:9000 shows it
answers: dict[str, dict[str, str]] = {}


class Bank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer("".join(f"{line}\n" for line in book))

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("idempotency-key")
        if self.path == "/mails":
            book.append(f"mail to {order['to']}")
            done = {"id": f"mail_{len(book)}"}
        elif key in answers:
            done = answers[key]  # seen before: nothing happens
        else:
            book.append(f"charge of {order['amount']}")
            done = {"id": f"ch_{len(book)}"}
            if key:
                answers[key] = done
            if order["amount"] == UNLUCKY:
                return  # charged, and the connection is closed without an answer
        time.sleep(SLOW)
        self.answer(json.dumps(done))

    def answer(self, text: str) -> None:
        with suppress(ConnectionError):  # the caller has gone
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 9000), Bank).serve_forever()

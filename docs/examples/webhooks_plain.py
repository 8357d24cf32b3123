"""A receiver of webhooks without a framework: Python's own server, and an inbox that handles each event once."""

import sqlite3
from http.server import BaseHTTPRequestHandler, HTTPServer

from semel.errors import MessageDiffers, Refusal
from semel.inbox import Duplicate, Inbox, Ran
from semel.webhooks import WebhookEvent, verify

inbox = Inbox("sqlite:///shop.db", consumer="shop")


def paid(connection: sqlite3.Connection, event: WebhookEvent) -> None:
    connection.execute("INSERT INTO paid (number) VALUES (?)", [event.json()["data"]["order"]])


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            event = verify(self.headers, body, secrets=["env:SHOP_HOOK_SECRET"])
            verdict = inbox.receive(event.id, paid, event, payload=event.payload)
            status = 200 if isinstance(verdict, Ran | Duplicate) else 503
        except Refusal as refusal:
            status = refusal.status
        except MessageDiffers:
            status = 422
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("127.0.0.1", 8000), Receiver).serve_forever()

"""What the demo's two servers share: an inherited socket, JSON, and an end together with their parent."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What a child prints when it is ready.
READY = "ready"


def serve(app: App, descriptor: int) -> None:
    """Serve *app* on the listening socket that the parent passed on, until the parent ends it or ends itself."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = uvicorn.Config(app, lifespan="on", log_level="warning", access_log=False)
    _Server(config).run(sockets=[socket.socket(fileno=descriptor)])


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(READY, flush=True)


def _end_with_parent() -> None:
    # Nothing is ever written to this pipe. It closes when the parent ends, even by kill -9.
    sys.stdin.buffer.read()
    os._exit(0)


async def lifespan(receive: Receive, send: Send) -> None:
    """Answer the lifespan messages: there is nothing to prepare."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def read_json(receive: Receive) -> Any:
    """Read the request's body; raise ``ValueError`` if it is not JSON."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return json.loads(body)


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    """Send a whole response."""
    body = json.dumps(content).encode() + b"\n"
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

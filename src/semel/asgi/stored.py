"""A stored request as an ASGI server would have brought it. Its answer is not sent anywhere."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

from semel.asgi.protocol import ASGIScope, Message
from semel.core.message import Request
from semel.guard.request import PRINCIPAL


def surroundings_of(scope: ASGIScope) -> dict[str, Any]:
    """Return what the layers outside of ours put into every scope: the app itself, and what its start left behind."""
    return {name: scope[name] for name in ("app", "state") if name in scope}


def scope_of(request: Request, surroundings: dict[str, Any]) -> ASGIScope:
    """Return the connection scope of a stored *request*."""
    head = request.head
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": head.method,
        "scheme": "http",
        "path": unquote(head.path),
        "raw_path": head.path.encode("latin-1"),
        "query_string": head.query,
        "root_path": head.mount,
        "headers": list(head.headers),
        "client": None,
        "server": None,
        PRINCIPAL: request.principal,
    }
    # A request may change its state, and not that of the next.
    return scope | surroundings | ({"state": dict(surroundings["state"])} if "state" in surroundings else {})


async def silence() -> Message:
    """Wait for a client that is not there."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError  # pragma: no cover - it is never resolved


async def nowhere(_message: Message) -> None:
    """Drop an answer that is stored and has no client."""

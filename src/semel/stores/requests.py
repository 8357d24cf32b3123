"""A stored request as readable text, and back. The body is bytes, and is stored separately."""

from __future__ import annotations

import json

from semel.core.commands import Claim
from semel.core.credentials import NEVER_STORED
from semel.core.message import Head, Request

#: Headers that no store ever writes. The policy has left out others before (``core/credentials.py``).
_NEVER_STORED = frozenset(name.encode() for name in NEVER_STORED)

#: Characters of a request line that are stored.
MAX_REQUEST_LINE = 200

# In ASCII: a path may hold half of a surrogate pair, which no database accepts as text.
_write = json.JSONEncoder(separators=(",", ":")).encode


def written(request: Request) -> str:
    """Return all of *request* but its body as it is stored: a JSON object, bytes spelled as latin-1."""
    head = request.head
    return _write(
        {
            "method": head.method,
            "path": head.path,
            "query": head.query.decode("latin-1"),
            "headers": [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in head.headers
                if name.lower() not in _NEVER_STORED
            ],
            "principal": request.principal,
        }
        | ({"mount": head.mount} if head.mount else {})
    )


def line_of(claim: Claim) -> str | None:
    """Return the request line that is stored with a claim, for operators; None if it has none. In ASCII, as above."""
    line = claim.request_line[:MAX_REQUEST_LINE]
    if line.isascii() and line.isprintable():
        return line or None
    return line.encode("unicode_escape").decode("ascii")[:MAX_REQUEST_LINE]


def read_back(text: str, body: bytes) -> Request:
    """Return a stored request."""
    stored = json.loads(text)
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in stored["headers"])
    head = Head(stored["method"], stored["path"], stored["query"].encode("latin-1"), headers, stored.get("mount", ""))
    return Request(head, body, stored["principal"])

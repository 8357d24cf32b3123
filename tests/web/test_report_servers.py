"""Report mode on real servers: what leaves them is what leaves them without Semel, byte for byte."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.web import serving
from tests.web.harness import HANG_SECONDS
from tests.web.serving import PORT, Backstage, Server

COMMANDS: dict[str, Sequence[str]] = {
    "uvicorn": ("uvicorn", "tests.web.watched:asgi_app", "--port", PORT, "--log-level", "critical"),
    "hypercorn": ("hypercorn", "tests.web.watched:asgi_app", "--bind", "127.0.0.1:{port}"),
    "granian ASGI": ("granian", "tests.web.watched:asgi_app", "--port", PORT, "--interface", "asgi"),
    "granian WSGI": ("granian", "tests.web.watched:wsgi_app", "--port", PORT, "--interface", "wsgi"),
    "gunicorn": ("gunicorn", "tests.web.watched:wsgi_app", "--bind", "127.0.0.1:{port}", "--threads", "2"),
    "wsgiref": ("tests.web.watched", PORT),
}

# Body, key, and whether it is sent in chunks. Some come twice, and some use a key again.
REQUESTS: list[tuple[bytes, str | None, bool]] = [
    (b"one", "key-1", False),
    (b"one", "key-1", False),
    (b"other", "key-1", False),
    (b"one", None, False),
    (b"one", "not,one", False),
    (b"", "empty", False),
    (b"several", "key-2", False),
    (b"iterator", "key-3", False),
    (b"file", "key-4", False),
    (b"raise", "key-5", False),
    (b"raise", "key-5", False),
    (b"x" * 500_000, "large", False),
    (b"in chunks", "key-6", True),
    (b"y" * 5000, "large chunk", True),
]


@pytest.fixture
def backstage(tmp_path: Path) -> Iterator[Backstage]:
    backstage = Backstage(tmp_path, "memory://")
    yield backstage
    backstage.close()


def ask(server: Server, path: str, body: bytes, key: str | None, is_chunked: bool) -> bytes:
    """Send one request, and return all that comes back but the date."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"Idempotency-Key: {key}"] if key else []
    lines += ["Transfer-Encoding: chunked"] if is_chunked else [f"Content-Length: {len(body)}"]
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    with socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), HANG_SECONDS) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + sent)
        received = bytearray()
        with suppress(ConnectionResetError):  # A server may close with a reset what it has answered in full.
            while part := connection.recv(65_536):
                received += part
    return b"\r\n".join(line for line in bytes(received).split(b"\r\n") if not line.lower().startswith(b"date:"))


@pytest.mark.parametrize("kind", COMMANDS)
def test_nothing_changes(backstage: Backstage, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is that of the bare app: framing, order of headers, errors, files sent by the server."""
    monkeypatch.setitem(serving.COMMANDS, kind, COMMANDS[kind])
    server = backstage.serve(kind)
    for request in REQUESTS:
        bare, watched = (ask(server, path, *request) for path in ("/bare", "/watched"))
        assert bare.startswith(b"HTTP/1."), request[1]
        assert watched == bare, request[1]

"""A stored request as a WSGI environ, and a ``start_response`` that sends nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes
from wsgiref.types import WSGIEnvironment

from semel.core.message import Request
from semel.guard.request import PRINCIPAL


def environ_of(request: Request) -> WSGIEnvironment:
    """Return the environ of a stored *request*."""
    head = request.head
    path, mount = unquote_to_bytes(head.path).decode("latin-1"), head.mount.encode().decode("latin-1")
    environ: WSGIEnvironment = {
        "REQUEST_METHOD": head.method,
        "SCRIPT_NAME": mount,
        "PATH_INFO": path.removeprefix(mount),
        "RAW_URI": head.path,
        "QUERY_STRING": head.query.decode("latin-1"),
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        PRINCIPAL: request.principal,
    }
    for name, value in head.headers:
        spelled = name.decode("latin-1").upper().replace("-", "_")
        environ[spelled if spelled in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{spelled}"] = value.decode(
            "latin-1"
        )
    return environ


def nowhere(_status: str, _headers: list[tuple[str, str]], _exc_info: Any = None, /) -> Callable[[bytes], object]:
    """Begin an answer that is only stored: there is no client."""
    return len

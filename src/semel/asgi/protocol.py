"""The words of ASGI, and a connection scope as the core wants a request. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from traceback import walk_tb
from typing import Any
from urllib.parse import quote

from semel.core.message import Answer, Head, Headers
from semel.door import ROUTERS_STATUSES, framed

ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
ASGISend = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, ASGISend], Awaitable[None]]

#: Where a route finds its exchange, in the ASGI scope.
EXCHANGE = "semel.exchange"
#: What it finds there instead, where the middleware has claimed the key by itself.
WHOLE_APP = "whole app"

#: Ways round ``http.response.body``: an answer that takes one can't be seen, so a guarded request is not offered them.
HIDDEN_EXTENSIONS = frozenset({"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"})


def head_of(scope: ASGIScope) -> Head:
    """Return all of the request but its body."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(full_path(scope))
    return Head(scope["method"], path, scope.get("query_string", b""), lowered(scope["headers"]))


def full_path(scope: ASGIScope) -> str:
    """Return the whole path, decoded."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    # Since ASGI 2.3 the path includes the mount point; some servers and frameworks still leave it out.
    return path if path.startswith(root) else root + path


def lowered(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return *headers* as the core has them. ASGI asks for lower-case names, and not every app obliges."""
    return tuple([(name.lower(), value) for name, value in headers])


def reached_handler(scope: ASGIScope, status: int, error: BaseException | None) -> bool:
    """Whether a handler saw the request. Without a word from the framework, suppose that one did.

    Starlette's router says which handler it chose. FastAPI answers for the *error* by which it refused the parameters;
    but a handler may raise that error too, and then its frame is in the traceback.
    """
    if type(error).__name__ == "RequestValidationError":
        frames = walk_tb(error.__traceback__ if error else None)
        return any(frame.f_code.co_name == "run_endpoint_function" for frame, _ in frames)
    return status not in ROUTERS_STATUSES or "router" not in scope or "endpoint" in scope


def hide_extensions(scope: ASGIScope) -> None:
    """Take away what would let an answer past us."""
    extensions = scope.get("extensions")
    if extensions and not HIDDEN_EXTENSIONS.isdisjoint(extensions):
        scope["extensions"] = {name: each for name, each in extensions.items() if name not in HIDDEN_EXTENSIONS}


async def send_answer(send: ASGISend, answer: Answer, *, is_ours: bool) -> None:
    """Send a whole answer: the app's as it is, one of ours with its length."""
    headers = framed(answer) if is_ours else answer.headers
    await send({"type": "http.response.start", "status": answer.status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": answer.body or b""})

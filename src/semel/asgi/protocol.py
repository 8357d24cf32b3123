"""The words of ASGI, and a connection scope as the core wants a request. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from traceback import walk_tb
from typing import Any
from urllib.parse import quote

from semel.core.message import Answer, Head, Headers
from semel.core.replay import FIRST_SERVER_ERROR
from semel.guard.body import framed
from semel.guard.endings import ROUTERS_STATUSES

ASGIScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
ASGISend = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[ASGIScope, Receive, ASGISend], Awaitable[None]]

#: Where a route finds its exchange, in the ASGI scope.
EXCHANGE = "semel.exchange"
#: What it finds there instead, where the middleware has claimed the key by itself.
WHOLE_APP = "whole app"
#: Where it is found for which operation an app serves a request. An app that a handler calls by itself, in the same
#: process, is given a scope of its own, without it.
OPERATION = "semel.operation"
#: Where the route of a stored request finds whom to tell its policy.
STORED = "semel.stored"

#: The functions in which FastAPI and Litestar find out that a handler should not be called, by module and name.
BEFORE_HANDLER = frozenset(
    {
        ("fastapi.dependencies.utils", "solve_dependencies"),
        ("litestar._asgi.routing_trie.traversal", "parse_path_to_route"),
        ("litestar._kwargs.kwargs_model", "resolve_dependencies"),
        ("litestar._kwargs.kwargs_model", "to_kwargs"),
        ("litestar._signature.model", "parse_values_from_connection_kwargs"),
        ("litestar.handlers.base", "authorize_connection"),
    }
)
#: The one in which FastAPI calls it.
HANDLER = ("fastapi.routing", "run_endpoint_function")
#: What FastAPI raises for parameters that don't fit, by module and name.
VALIDATION = ("fastapi.exceptions", "RequestValidationError")

#: Ways round ``http.response.body``: an answer that takes one can't be seen, so a guarded request is not offered them.
HIDDEN_EXTENSIONS = frozenset({"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"})


def head_of(scope: ASGIScope) -> Head:
    """Return all of the request but its body."""
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(full_path(scope))
    mount = scope.get("root_path", "")
    return Head(
        scope["method"].upper(),
        path,
        scope.get("query_string", b""),
        lowered(scope["headers"]),
        mount.rstrip("/") if mount else "",
    )


def method_of(scope: ASGIScope) -> str:
    """Return the method in capitals, as ASGI wants it. Not every server obliges, and some frameworks don't mind."""
    method: str = scope["method"]
    return method.upper()


def full_path(scope: ASGIScope) -> str:
    """Return the whole path, decoded."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"]
    # Since ASGI 2.3 the path includes the mount point; some servers and frameworks still leave it out.
    return path if path.startswith(root) else root + path


def template_of(scope: ASGIScope) -> str | None:
    """Return the template of the route that a framework has chosen, where it says so: FastAPI and Litestar do."""
    template = scope.get("path_template")  # Litestar
    if template is None:
        extra = scope.get("fastapi")
        # Of a router that is included, the route itself does not know the prefix.
        route = (extra.get("effective_route_context") if isinstance(extra, dict) else None) or scope.get("route")
        template = getattr(route, "path", None)
    return template if isinstance(template, str) else None


def mount_of(scope: ASGIScope) -> str:
    """Return where the app is mounted, decoded; an empty string is the root."""
    root: str = scope.get("root_path", "")
    return root.rstrip("/")


def lowered(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return *headers* as the core has them. ASGI asks for lower-case names, and not every app obliges."""
    return tuple([(name.lower(), value) for name, value in headers])


def reached_handler(scope: ASGIScope, status: int, error: BaseException | None) -> bool:
    """Whether a handler saw the request. Without a word from the framework, suppose that one did.

    Starlette's router says which handler it chose; FastAPI answers for an *error*.
    A server error says less than others: a dependency that raised it may have done something before.
    """
    if status < FIRST_SERVER_ERROR and error is not None and is_before_handler(error):
        return False
    return status not in ROUTERS_STATUSES or "router" not in scope or "endpoint" in scope


def is_before_handler(error: BaseException) -> bool:
    """Whether a framework raised *error* on the way to a handler: for parameters, or in a dependency that refuses it.

    A handler may raise the same error, and then it was called, which the traceback shows.
    """
    frames = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)}
    kind = type(error).__module__, type(error).__name__
    is_refused = kind == VALIDATION or not BEFORE_HANDLER.isdisjoint(frames)
    return is_refused and HANDLER not in frames


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

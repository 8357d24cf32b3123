"""One app twice on a real server, in both colours: bare, and under ``/watched`` in report mode. It asserts nothing."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware

SETTINGS: dict[str, Any] = {
    "store": "memory://",
    "scope": SINGLE_TENANT,
    "policy": Policy(enforcement="report", required=True, max_request_body=1000),
}
FILE = Path(__file__)
FILE_SIZE = FILE.stat().st_size


async def bare_asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if b"raise" in body:
        raise RuntimeError("as the client asked")
    headers = [(b"content-type", b"text/plain"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
    if b"file" in body and "http.response.pathsend" in scope.get("extensions", {}):
        headers.append((b"content-length", b"%d" % FILE_SIZE))
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.pathsend", "path": str(FILE)})
        return
    parts = [b"%d bytes" % len(body)] if b"one" in body else [b"part one", b"part two", b"%d bytes" % len(body)]
    if b"one" in body:
        headers.append((b"content-length", b"%d" % len(parts[0])))
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


def bare_wsgi(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    length, is_terminated = environ.get("CONTENT_LENGTH"), environ.get("wsgi.input_terminated")
    body = environ["wsgi.input"].read(int(length)) if length else environ["wsgi.input"].read() if is_terminated else b""
    if b"raise" in body:
        raise RuntimeError("as the client asked")
    headers = [("Content-Type", "text/plain"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
    start_response("201 Created", headers)
    if b"file" in body and "wsgi.file_wrapper" in environ:
        file: Iterable[bytes] = environ["wsgi.file_wrapper"](FILE.open("rb"))
        return file
    parts = [b"%d bytes" % len(body)] if b"one" in body else [b"part one", b"part two", b"%d bytes" % len(body)]
    return iter(parts) if b"iterator" in body else parts


watched_asgi = AsgiMiddleware(bare_asgi, **SETTINGS)
watched_wsgi = WsgiMiddleware(bare_wsgi, **SETTINGS)


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    is_bare = scope["type"] == "http" and not scope["path"].startswith("/watched")
    await (bare_asgi if is_bare else watched_asgi)(scope, receive, send)


def wsgi_app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    return (watched_wsgi if environ["PATH_INFO"].startswith("/watched") else bare_wsgi)(environ, start_response)


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), wsgi_app).serve_forever()

"""A WSGI environ as the core's ``Head``: the changes that CGI makes to a request are undone. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, urlsplit
from wsgiref.types import WSGIEnvironment

from semel.core.message import Head, Headers
from semel.errors import BodyIncomplete
from semel.guard.body import CHUNK_BYTES, Body
from semel.guard.endings import ROUTERS_STATUSES
from semel.guard.request import declared_length

_PREFIX = "HTTP_"


def head_of(environ: WSGIEnvironment) -> Head:
    """Return all of the request but its body."""
    headers = {name.removeprefix(_PREFIX): environ[name] for name in environ if name.startswith(_PREFIX)}
    # These two have no prefix. If a server gives both spellings, the one without is the standard's.
    headers |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    fields = lowered([(name.replace("_", "-"), value) for name, value in headers.items()])
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    return Head(method_of(environ), _raw_path(environ), query, fields, mount_of(environ))


def method_of(environ: WSGIEnvironment) -> str:
    """Return the method in capitals, as Flask and Django read it. Some clients and servers leave ``patch`` as it is."""
    method: str = environ["REQUEST_METHOD"]
    return method.upper()


def path_of(environ: WSGIEnvironment) -> str:
    """Return the whole path, decoded."""
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    # PEP 3333 passes bytes as Latin-1, whatever their encoding is.
    return path.encode("latin-1").decode("utf-8", "replace")


def mount_of(environ: WSGIEnvironment) -> str:
    """Return where the app is mounted, decoded; an empty string is the root."""
    mount: str = environ.get("SCRIPT_NAME", "")
    return mount.encode("latin-1").decode("utf-8", "replace").rstrip("/")


def read_body(environ: WSGIEnvironment, head: Head, body: Body, limit: int) -> bool:
    """Read the request's body into *body*; say whether it is within *limit*."""
    length = _length(environ, head)
    if length is not None and length > limit:
        return False
    while length is None or body.size < length:
        # Never a byte more than was declared: a raw socket would block for ever.
        wanted = CHUNK_BYTES if length is None else min(CHUNK_BYTES, length - body.size)
        chunk = environ["wsgi.input"].read(wanted)
        if not chunk:
            break
        body.add(chunk)
        if body.size > limit:
            return False
    if length is not None and body.size < length:
        raise BodyIncomplete
    return True


def put_body(environ: WSGIEnvironment, body: Body) -> None:
    """Give the handler the same body that was fingerprinted, with its length, also if it came in chunks."""
    environ["wsgi.input"] = body.stream()
    environ["wsgi.input_terminated"] = True
    environ["CONTENT_LENGTH"] = str(body.size)
    environ.pop("HTTP_TRANSFER_ENCODING", None)


def reached_handler(environ: WSGIEnvironment, status: int) -> bool:
    """Whether a handler ran. Flask's request says so; without that, assume that one did."""
    request = environ.get("werkzeug.request")
    return getattr(request, "routing_exception", None) is None or status not in ROUTERS_STATUSES


def lowered(fields: Iterable[tuple[str, str]]) -> Headers:
    """Return header *fields* in the core's form."""
    return tuple([(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields])


def _raw_path(environ: WSGIEnvironment) -> str:
    """Return the path as the client sent it, if the server still has it, or else requoted."""
    target: str = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    if target.startswith("/"):
        return target.partition("?")[0]
    if "://" in target:
        return urlsplit(target).path
    return quote(path_of(environ))


def _length(environ: WSGIEnvironment, head: Head) -> int | None:
    """Return how many bytes of body may be read; None means to the end, if the server marks the end."""
    is_declared = environ.get("CONTENT_LENGTH") and not environ.get("HTTP_TRANSFER_ENCODING")
    if environ.get("wsgi.input_terminated") and not is_declared:
        return None
    return declared_length(head)

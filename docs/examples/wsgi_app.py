"""Plain WSGI: any callable of (environ, start_response) can be wrapped."""

from collections.abc import Callable, Iterable
from typing import Any

from semel import SINGLE_TENANT, Policy, current
from semel.wsgi import IdempotencyMiddleware

runs: list[str] = []


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    runs.append(current().key)
    start_response("201 Created", [("Content-Type", "text/plain"), ("Set-Cookie", "seen=yes")])
    return [b"run %d with a body of %d bytes\n" % (len(runs), len(environ["wsgi.input"].read()))]


app = IdempotencyMiddleware(
    application, store="sqlite:///semel.db", scope=SINGLE_TENANT, policy=Policy.ietf(required=True)
)

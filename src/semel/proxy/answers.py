"""What an answer of the proxy gets on its way out: a date, and what lets a page of another origin read it (CORS).

The answers of the server behind have its own ``Access-Control-*``, and get none here. A replay and a refusal never
passed that server, so a browser would hide them from the page that has asked.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from email.utils import formatdate

from semel.asgi.protocol import ASGISend, Message
from semel.core.message import Headers
from semel.core.policy import Policy
from semel.core.problem import SHOULD_RETRY
from semel.core.replay import MARKER, REPLAYED_HEADERS

Pair = tuple[bytes, bytes]

#: Says of an answer that it is the upstream's. It never leaves: ``Leaving`` takes it away.
UPSTREAMS: Pair = (b"semel-upstream", b"true")

_ALLOWED = b"access-control-allow-origin"
#: What a script can't read unless it is exposed, of what the proxy answers by itself.
_EXPOSED = {MARKER[0], SHOULD_RETRY, b"preference-applied", b"retry-after", b"www-authenticate"}
#: What every script can read (of the Fetch standard), and what is no concern of one.
_READABLE = {b"cache-control", b"content-encoding", b"content-language", b"content-type", b"last-modified"}


class Cors:
    """Which pages may read the answers of this proxy."""

    def __init__(self, origins: Collection[str], policy: Policy) -> None:
        """Let pages of *origins* read them; "*" is all, without their cookies."""
        self._origins = frozenset(each.encode() for each in origins)
        self._is_open = "*" in origins
        exposed = (_EXPOSED | REPLAYED_HEADERS | {name.encode() for name in policy.replay_headers}) - _READABLE
        self._expose = (b"access-control-expose-headers", b", ".join(sorted(exposed)))

    def headers(self, request: Iterable[Pair]) -> list[Pair]:
        """Return what an answer to a request with these headers needs."""
        if self._is_open:
            return [(_ALLOWED, b"*"), self._expose]
        sent = [each for name, each in request if name == b"origin"]
        varies = (b"vary", b"Origin")
        if len(sent) != 1 or sent[0] not in self._origins:
            return [varies]
        # A page that was refused its cookies by the server behind could not have sent the request at all.
        return [(_ALLOWED, sent[0]), (b"access-control-allow-credentials", b"true"), self._expose, varies]


class Leaving:
    """A server's ``send`` that adds what is missing in the head of an answer."""

    __slots__ = ("_cors", "_request", "_send", "has_begun")

    def __init__(self, send: ASGISend, request: Headers, cors: Cors | None) -> None:
        """Send by *send* what is answered to a request with these headers."""
        self._send = send
        self._request = request
        self._cors = cors
        #: An answer has begun.
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        """Send *message*."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers: list[Pair] = [pair for pair in message["headers"] if pair != UPSTREAMS]
            names = {name for name, _ in headers}
            is_ours = len(headers) == len(message["headers"])
            if is_ours and self._cors is not None and _ALLOWED not in names:
                headers += self._cors.headers(self._request)
            if b"date" not in names:
                headers.append((b"date", _now()))
            message = {**message, "headers": headers}
        await self._send(message)


_date: tuple[int, bytes] = (0, b"")


def _now() -> bytes:
    global _date  # noqa: PLW0603 - a cache of one entry, for a second
    second = int(time.time())
    if _date[0] != second:
        _date = second, formatdate(second, usegmt=True).encode()
    return _date[1]

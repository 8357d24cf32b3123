"""Which headers pass a reverse proxy, and in what form: pure rules over pairs of bytes. Nothing here reads a socket.

A proxy and the server behind it may read one request differently. What could be read in two ways is refused (400), and
what names the user of a request can be neither removed nor imitated on its way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semel.core.message import Headers
from semel.core.value import value
from semel.errors import IdentityRefused, RequestAmbiguous

Pairs = Sequence[tuple[bytes, bytes]]

#: They belong to one connection. ``Expect`` is answered by this proxy, which reads the body by itself.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

#: Where a request has come from. What a peer says of that counts if the peer is trusted.
FORWARDING = frozenset(
    {
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-port",
        b"x-forwarded-proto",
        b"x-forwarded-server",
        b"x-real-ip",
    }
)

#: How many times a request was begun, as the server behind the proxy is told.
ATTEMPT = b"semel-attempt"

#: Listed in ``Connection``, they would be removed on the way, and the request would mean something else.
_NEVER_LISTED = FORWARDING | {b"authorization", b"content-length", b"content-type", b"cookie", b"host", b"via"}
#: What a server behind the proxy must not get in another spelling.
_NEVER_IMITATED = FORWARDING | HOP_BY_HOP | {ATTEMPT, b"authorization", b"content-length", b"cookie", b"host", b"via"}

#: The name of this proxy in ``Via``.
_VIA = b"1.1 semel"
#: How often a request may pass a proxy of this name. One that is its own upstream would never end.
MAX_HOPS = 8
#: Answers with these statuses have no body. A length is then one of another answer.
_BODILESS = frozenset({204, 205, 304})

_NOT_A_WORD = re.compile(rb"[^a-z0-9]+")
#: RFC 7239: whatever is more than a token is quoted.
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNKED = b"chunked"


@value
class Framing:
    """How long the body of a request is."""

    #: None where it is sent in chunks.
    length: int | None

    @property
    def is_empty(self) -> bool:
        """Whether there is none."""
        return self.length == 0


@value
class Peer:
    """Where a request has come from: an address, or None for a Unix socket; and whether its word is taken."""

    address: str | None
    is_trusted: bool
    scheme: str = "http"


def framing(headers: Pairs, http_version: str = "1.1") -> Framing:
    """Return how long the body is. What another server could read differently is refused."""
    lengths = [each for name, each in headers if name == b"content-length"]
    codings = [each for name, each in headers if name == b"transfer-encoding"]
    if codings:
        if lengths:
            raise RequestAmbiguous("A request has Content-Length or Transfer-Encoding, and not both.")
        if codings != [codings[0]] or codings[0].strip().lower() != _CHUNKED or http_version == "1.0":
            raise RequestAmbiguous('Transfer-Encoding can only be "chunked", once, in HTTP/1.1.')
        return Framing(None)
    if not lengths:
        return Framing(0)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise RequestAmbiguous("Content-Length is one number, sent once.")
    return Framing(int(lengths[0]))


def listed(headers: Pairs) -> frozenset[bytes]:
    """Return the names in ``Connection``, in lower case."""
    return frozenset(
        word.strip().lower() for name, each in headers if name == b"connection" for word in each.split(b",")
    )


@dataclass(frozen=True)
class HeaderRules:
    """What is the same for all requests of one proxy."""

    #: The header that names the user, where one does. Lower case, as all names here.
    identity: bytes | None
    #: The headers that a key is sent in.
    keys: tuple[bytes, ...]
    #: Whether the server behind the proxy is shown the key.
    passes_key: bool = True

    def __post_init__(self) -> None:
        """Prepare what every request is compared with."""
        own = frozenset({*self.keys, *({self.identity} if self.identity else ())})
        object.__setattr__(self, "_unlisted", _NEVER_LISTED | own)
        object.__setattr__(self, "_exact", _NEVER_IMITATED | own)
        object.__setattr__(self, "_words", frozenset(_NOT_A_WORD.sub(b"-", name) for name in _NEVER_IMITATED | own))
        hidden = frozenset(() if self.passes_key else self.keys)
        object.__setattr__(self, "_dropped", HOP_BY_HOP | hidden | {ATTEMPT, b"content-length"})

    def check(self, headers: Pairs, peer: Peer, http_version: str = "1.1") -> Framing:
        """Refuse what can be read in two ways, or names a user that is not to be believed; return the framing."""
        hosts = identities = 0
        for name, each in headers:
            if not each.isascii():
                _check_text(each)
            if name == b"host":
                hosts += 1
            elif name == self.identity:
                identities += 1
            elif name == b"connection":
                self._check_listed(each)
            elif name == b"via" and each.count(_VIA) >= MAX_HOPS:
                raise RequestAmbiguous("This request goes round in a circle of proxies.")
        if hosts > 1 or (hosts == 0 and http_version != "1.0"):
            raise RequestAmbiguous("A request has one Host header.")
        if identities > 1:
            raise IdentityRefused("The header that names the user was sent more than once.")
        if identities and not peer.is_trusted:
            raise IdentityRefused("The header that names the user is not accepted from this address.")
        return framing(headers, http_version)

    def _check_listed(self, connection: bytes) -> None:
        for word in connection.split(b","):
            if word.strip().lower() in self._unlisted:  # type: ignore[attr-defined]  # see __post_init__
                raise RequestAmbiguous("Connection names a header that is not about this connection.")

    def _is_twin(self, name: bytes) -> bool:
        """Whether *name* is another spelling of one that counts: ``x_user`` is ``x-user`` to CGI, WSGI and Rack."""
        return name not in self._exact and _NOT_A_WORD.sub(b"-", name) in self._words  # type: ignore[attr-defined]  # as above

    def outgoing(self, headers: Pairs, peer: Peer, *, attempt: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return the headers of the request to the server behind the proxy; the length of its body is not among them.

        *attempt* is that of a guarded request.
        """
        dropped: frozenset[bytes] = self._dropped  # type: ignore[attr-defined]  # as above
        if any(name == b"connection" for name, _ in headers):
            dropped |= listed(headers)
        if not peer.is_trusted:
            dropped |= FORWARDING
        kept: list[tuple[bytes, bytes]] = []
        said: dict[bytes, list[bytes]] = {}
        host = b""
        for pair in headers:
            name = pair[0]
            if name in dropped or (not name.replace(b"-", b"").isalnum() and self._is_twin(name)):
                continue
            if name in _JOINED:
                said.setdefault(name, []).append(pair[1])
                continue
            if name == b"host":
                host = pair[1]
            kept.append(pair)
        kept.extend(_travelled(said, peer, host))
        if attempt is not None:
            kept.append((ATTEMPT, b"%d" % attempt))
        return kept


def _check_text(each: bytes) -> None:
    try:
        each.decode()
    except UnicodeDecodeError:
        # To some servers it is Latin-1, to some an error; and the client of this proxy writes UTF-8.
        raise RequestAmbiguous("A header is neither ASCII nor UTF-8.") from None


#: Each hop adds to them.
_JOINED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"})


def _travelled(said: dict[bytes, list[bytes]], peer: Peer, host: bytes) -> list[tuple[bytes, bytes]]:
    """Return where the request has come from, and by which way."""
    scheme = peer.scheme.encode()
    address = peer.address.encode() if peer.address else None
    element = b"for=%s;proto=%s" % (_node(address), scheme)
    if host:
        element += b";host=" + _quoted(host)
    made = [
        (b"via", b", ".join([*said.get(b"via", ()), _VIA])),
        (b"forwarded", b", ".join([*said.get(b"forwarded", ()), element])),
        (b"x-forwarded-proto", b", ".join(said.get(b"x-forwarded-proto", [scheme]))),
    ]
    before = said.get(b"x-forwarded-for", [])
    if address or before:
        made.append((b"x-forwarded-for", b", ".join([*before, *([address] if address else [])])))
    if host or b"x-forwarded-host" in said:
        made.append((b"x-forwarded-host", b", ".join(said.get(b"x-forwarded-host", [host]))))
    return made


def _node(address: bytes | None) -> bytes:
    if address is None:
        return b"_unix"
    return b'"[%s]"' % address if b":" in address else address


def _quoted(text: bytes) -> bytes:
    if _TOKEN.fullmatch(text):
        return text
    return b'"%s"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def incoming(status: int, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of an answer as its client gets them: in order, repeated ones too, none of the connection."""
    lowered = [(name.lower(), each) for name, each in headers]
    dropped = HOP_BY_HOP
    is_chunked = False
    for name, each in lowered:
        if name == b"connection":
            dropped |= {word.strip().lower() for word in each.split(b",")}
        elif name == b"transfer-encoding":
            is_chunked = True
    if is_chunked or status in _BODILESS:
        # The chunks say how long it is, and a length beside them is there to mislead.
        dropped |= {b"content-length"}
    return tuple([pair for pair in lowered if pair[0] not in dropped])


def is_replay(headers: Headers) -> bool:
    """Whether the server behind the proxy has replayed this answer: it keeps keys by itself."""
    return any(name == b"idempotent-replayed" and each.strip().lower() == b"true" for name, each in headers)

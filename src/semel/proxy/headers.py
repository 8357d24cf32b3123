"""Which headers pass a reverse proxy, and in what form: pure rules over pairs of bytes. Nothing here reads a socket.

A proxy and the server behind it may read one request differently. What could be read in two ways is refused (400), and
what names the user of a request can be neither removed nor imitated on its way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import lru_cache

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

#: By this header an upstream says that it has done nothing. It is for the proxy alone.
NO_EFFECT = b"semel-no-effect"

#: Listed in ``Connection``, they would be removed on the way, and the request would mean something else.
_NEVER_LISTED = FORWARDING | {b"authorization", b"content-length", b"content-type", b"cookie", b"host", b"via"}
#: What a server behind the proxy must not get in another spelling.
_NEVER_IMITATED = FORWARDING | HOP_BY_HOP | {ATTEMPT, b"authorization", b"content-length", b"cookie", b"host", b"via"}


class _Fate(IntEnum):
    """What becomes of a header of a request."""

    #: It is passed on as it is; all below are looked at first.
    PASS = auto()
    #: It belongs to the connection, or imitates another.
    DROP = auto()
    #: It says by which way the request has come: each hop adds to it.
    WAY = auto()
    HOST = auto()
    LENGTH = auto()
    CODING = auto()
    CONNECTION = auto()
    IDENTITY = auto()


#: By themselves: a member of an enumeration is slow to get, and every header of every request is looked at.
_PASS, _DROP, _WAY, _HOST, _LENGTH, _CODING, _CONNECTION, _IDENTITY = _Fate
#: Those that are looked at and passed on.
_KEPT = frozenset({_HOST, _LENGTH, _IDENTITY})
_FATES = {
    **dict.fromkeys(HOP_BY_HOP | {ATTEMPT}, _DROP),
    **dict.fromkeys(FORWARDING | {b"via"}, _WAY),
    b"host": _HOST,
    b"content-length": _LENGTH,
    b"transfer-encoding": _CODING,
    b"connection": _CONNECTION,
}
#: What a proxy reads or writes by itself can't name a user, too.
NO_IDENTITY = frozenset(_FATES) - FORWARDING

#: Of an answer.
_NOT_PASSED = HOP_BY_HOP | {NO_EFFECT}

#: Of those that say the way, what no hop adds to.
_TOLD_ONCE = (b"x-forwarded-port", b"x-forwarded-server", b"x-real-ip")

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

#: How many names of headers are remembered, of which length: a client can think of many.
_MAX_KNOWN = 2000
_MAX_KNOWN_LENGTH = 100


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
    """Where a request has come from; and whether its word is taken. A Unix socket has no address, nor has a connection
    that was reset.
    """

    address: str | None
    is_trusted: bool
    scheme: str = "http"


def framing(lengths: Sequence[bytes], codings: Sequence[bytes], http_version: str = "1.1") -> Framing:
    """Return how long the body is, by ``Content-Length`` and ``Transfer-Encoding``, each as often as it was sent.

    What another server could read differently is refused.
    """
    if codings:
        if lengths:
            raise RequestAmbiguous("A request has Content-Length or Transfer-Encoding, and not both.")
        if len(codings) > 1 or codings[0].strip().lower() != _CHUNKED or http_version == "1.0":
            raise RequestAmbiguous('Transfer-Encoding can only be "chunked", once, in HTTP/1.1.')
        return Framing(None)
    if not lengths:
        return Framing(0)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise RequestAmbiguous("Content-Length is one number, sent once.")
    return Framing(int(lengths[0]))


@dataclass(frozen=True)
class HeaderRules:
    """What is the same for all requests of one proxy."""

    #: The header that names the user, where one does. Lower case, as all names here.
    identity: bytes | None
    #: The headers that a key is sent in.
    keys: tuple[bytes, ...]
    #: Whether the server behind the proxy is shown the key.
    passes_key: bool = True
    #: What becomes of a header, by its name: those that count, and some of those that have come.
    _fates: dict[bytes, _Fate] = field(init=False, repr=False, compare=False)
    _unlisted: frozenset[bytes] = field(init=False, repr=False, compare=False)
    _words: frozenset[bytes] = field(init=False, repr=False, compare=False)
    _unsent: frozenset[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare what every request is compared with."""
        own = frozenset({*self.keys, *({self.identity} if self.identity else ())})
        fates = dict.fromkeys(_NEVER_IMITATED | own, _PASS) | _FATES
        if self.identity:
            fates[self.identity] = _IDENTITY
        object.__setattr__(self, "_fates", fates)
        object.__setattr__(self, "_unlisted", _NEVER_LISTED | own)
        object.__setattr__(self, "_words", frozenset(_NOT_A_WORD.sub(b"-", name) for name in _NEVER_IMITATED | own))
        object.__setattr__(self, "_unsent", frozenset({b"content-length", *(() if self.passes_key else self.keys)}))

    def received(
        self, headers: Pairs, peer: Peer, http_version: str = "1.1"
    ) -> tuple[Framing, list[tuple[bytes, bytes]]]:
        """Return the framing of a request, and its headers without what is of its connection, or not to be believed.

        They tell by which way it has come, so that it can be run later, too. What can be read in two ways is refused,
        and what names a user that is not to be believed.
        """
        kept: list[tuple[bytes, bytes]] = []
        said: dict[bytes, list[bytes]] = {}
        seen: dict[_Fate, list[bytes]] = {}
        fates = self._fates
        for pair in headers:
            name, each = pair
            if not each.isascii():
                _check_text(each)
            fate = fates.get(name) or self._unknown(name)
            if fate is _PASS:
                kept.append(pair)
            elif fate is _WAY:
                said.setdefault(name, []).append(each)
            else:
                seen.setdefault(fate, []).append(each)
                if fate in _KEPT:
                    kept.append(pair)
        hosts = seen.get(_HOST, ())
        if len(hosts) > 1 or (not hosts and http_version != "1.0"):
            raise RequestAmbiguous("A request has one Host header.")
        if _IDENTITY in seen:
            _check_identity(seen[_IDENTITY], peer)
        found = framing(seen.get(_LENGTH, ()), seen.get(_CODING, ()), http_version)
        if _CONNECTION in seen:
            listed = self._listed(seen[_CONNECTION])
            kept = [pair for pair in kept if pair[0] not in listed]
        kept += _travelled(said, peer, hosts[0] if hosts else b"")
        return found, kept

    def outgoing(self, headers: Pairs, *, attempt: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return those of the *headers* that are received which are sent on, without the length of the body.

        *attempt* is that of a guarded request. Its answer is stored, and a retry may not accept the same coding.
        """
        unsent = self._unsent
        kept = [pair for pair in headers if pair[0] not in unsent]
        if attempt is not None:
            kept = [pair for pair in kept if pair[0] != b"accept-encoding"]
            kept += [(b"accept-encoding", b"identity"), (ATTEMPT, b"%d" % attempt)]
        return kept

    def _listed(self, lines: Iterable[bytes]) -> set[bytes]:
        words = {word.strip().lower() for each in lines for word in each.split(b",")}
        if not words.isdisjoint(self._unlisted):
            raise RequestAmbiguous("Connection names a header that is not about this connection.")
        return words

    def _unknown(self, name: bytes) -> _Fate:
        """Return what becomes of a name that does not count; or is another spelling of one that does: ``x_user`` is
        ``x-user`` to CGI, WSGI and Rack.
        """
        fate = _DROP if _NOT_A_WORD.sub(b"-", name) in self._words else _PASS
        if len(self._fates) < _MAX_KNOWN and len(name) < _MAX_KNOWN_LENGTH:
            self._fates[name] = fate
        return fate


def _check_identity(values: Sequence[bytes], peer: Peer) -> None:
    if len(values) > 1:
        raise IdentityRefused("The header that names the user was sent more than once.")
    if not peer.is_trusted:
        raise IdentityRefused("The header that names the user is not accepted from this address.")


def _check_text(each: bytes) -> None:
    try:
        each.decode()
    except UnicodeDecodeError:
        # To some servers it is Latin-1, to some an error; and the client of this proxy writes UTF-8.
        raise RequestAmbiguous("A header is neither ASCII nor UTF-8.") from None


def _travelled(said: dict[bytes, list[bytes]], peer: Peer, host: bytes) -> list[tuple[bytes, bytes]]:
    """Return where the request has come from, and by which way."""
    if sum([each.count(_VIA) for each in said.get(b"via", ())]) >= MAX_HOPS:
        raise RequestAmbiguous("This request goes round in a circle of proxies.")
    if not peer.is_trusted:
        said = {b"via": said[b"via"]} if b"via" in said else {}
    if not said and len(host) < _MAX_KNOWN_LENGTH:
        return _first_hop(peer, host)
    return _next_hop(said, peer, host)


@lru_cache(maxsize=_MAX_KNOWN)
def _first_hop(peer: Peer, host: bytes) -> list[tuple[bytes, bytes]]:
    return _next_hop({}, peer, host)


def _next_hop(said: dict[bytes, list[bytes]], peer: Peer, host: bytes) -> list[tuple[bytes, bytes]]:
    scheme = peer.scheme.encode()
    address = peer.address.encode() if peer.address else None
    element = b"for=%s;proto=%s" % (_node(peer), scheme)
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
    made += [(name, each) for name in _TOLD_ONCE for each in said.get(name, ())]
    return made


def _node(peer: Peer) -> bytes:
    if peer.address is None:
        return b"_unix" if peer.is_trusted else b"unknown"
    address = peer.address.encode()
    return b'"[%s]"' % address if b":" in address else address


def _quoted(text: bytes) -> bytes:
    if _TOKEN.fullmatch(text):
        return text
    return b'"%s"' % text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def incoming(status: int, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of an answer as its client gets them: in order, repeated ones too, none of the connection."""
    lowered = [(name.lower(), each) for name, each in headers]
    dropped = _NOT_PASSED
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


def is_replay(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the server behind the proxy has replayed this answer: it keeps keys by itself."""
    return _says(headers, b"idempotent-replayed")


def says_no_effect(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the server behind the proxy says that it has done nothing."""
    return _says(headers, NO_EFFECT)


def _says(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bool:
    return any(name.lower() == wanted and each.strip().lower() == b"true" for name, each in headers)

"""Which operation a request asks for, as the server behind the proxy may read it. Nothing is refused or forwarded here.

The guard reads a path byte for byte, and a server does not: one takes ``/Payments/`` for ``/payments``, and one does
what ``X-HTTP-Method-Override`` says. So every spelling of a guarded path is guarded, and what chooses the operation
counts in the fingerprint: one key on two of them is refused.
"""

from __future__ import annotations

import ipaddress
from fnmatch import fnmatchcase
from functools import lru_cache

from semel.core.fingerprint import Fingerprinter, Subject
from semel.core.policy import EVERYTHING
from semel.guard.request import Routes

#: What Rails, Express, Laravel, Symfony and ASP.NET take for the method of a ``POST``. ``_method`` is in the query or
#: the body, and counts there.
_OVERRIDES = frozenset({b"x-http-method", b"x-http-method-override", b"x-method-override"})
#: Those of the schemes, which a client may name or leave out.
_DEFAULT_PORTS = (":80", ":443")

#: Paths and hosts that are remembered: a client chooses them, and how long they are.
_MAX_KNOWN = 64


class SpelledRoutes(Routes):
    """Guards a path in every spelling that some server takes for it."""

    @staticmethod
    def fits(path: str, pattern: str) -> bool:
        """Whether *path*, decoded, is one of *pattern*, or some server takes it for one."""
        if fnmatchcase(path, pattern):
            return True
        plain, wanted = _plain(path), _plain(pattern)
        return fnmatchcase(plain, wanted) or (path.endswith("/") and fnmatchcase(plain + "/", wanted))


@lru_cache(maxsize=_MAX_KNOWN)
def _plain(path: str) -> str:
    """Return *path*, or a pattern of paths, in one spelling for all that servers take for the same."""
    parts: list[str] = []
    for segment in path.replace("\\", "/").split("/"):
        part = segment.partition(";")[0]  # Servlets read parameters from there on.
        if part == "..":
            del parts[-1:]
        elif part not in {"", "."}:
            parts.append(part)
    root = "" if path.startswith("*") else "/"
    return root + "/".join(parts).casefold()


class ProxyFingerprinter(Fingerprinter):
    """Counts the overriding method as a part of the method, and the host that the client has named.

    A request without either has the same fingerprint as in other entry points. A record without a host may be one of a
    proxy that did not count it, and is compared without.
    """

    def of(self, subject: Subject) -> bytes:
        """Return the fingerprint to store with the key."""
        read = _read(subject)
        has_host = any(name == b"host" for name, _ in read.headers)
        return super().of(read) if has_host else EVERYTHING.of(read)

    def matches(self, stored: bytes, fresh: bytes, subject: Subject) -> bool:
        """Return whether *subject*, with the fingerprint *fresh*, asks for what was *stored*."""
        read = _read(subject)
        if EVERYTHING.has_made(stored):
            return EVERYTHING.matches(stored, EVERYTHING.of(read), read)
        return super().matches(stored, fresh, read)


#: What counts in a proxy.
COUNTED = ProxyFingerprinter(headers=("host",))


def _read(subject: Subject) -> Subject:
    """Return *subject* as the server behind may read it: once read, it is read as the same again."""
    host = forwarded = b""
    overrides: set[str] = set()
    headers = []
    for pair in subject.headers:
        name, each = pair
        if name == b"host":
            host = each
        elif name == b"x-forwarded-host":
            # The first is the client's. ``HeaderRules`` has seen to it that a trusted peer has said so, or this proxy.
            forwarded = each.partition(b",")[0]
        elif b"method" in name and name.replace(b"_", b"-") in _OVERRIDES:
            overrides.add(each.decode("latin-1").strip().upper())
        else:
            headers.append(pair)
    named = _named(forwarded or host)
    if named:
        headers.append((b"host", named))
    method = " ".join([subject.method, *sorted(overrides - {subject.method, ""})])
    return Subject(method, subject.path, subject.query, headers, subject.body, subject.mount)


@lru_cache(maxsize=_MAX_KNOWN)
def _named(host: bytes) -> bytes:
    """Return *host* in one spelling; nothing for an address, which names no shop: proxies send to one or another."""
    text = host.decode("latin-1").strip().lower()
    for port in _DEFAULT_PORTS:
        text = text.removesuffix(port)
    name, _, port = text.rpartition(":") if ":" in text and not text.endswith("]") else (text, "", "")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return (name.rstrip(".") + (f":{port}" if port else "")).encode("latin-1")
    return b""

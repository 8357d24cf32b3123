"""Requests and responses of the console, as values, and the headers that each answer has. It knows no framework."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from semel.console.access import User
from semel.core.value import value

logger = logging.getLogger("semel.console")

#: Bytes of a form: a result and a reason.
MAX_BODY = 256 * 1024
#: Fields of a form or a query.
MAX_FIELDS = 50

#: Nothing is loaded from elsewhere, nothing in a page is run, and no page can be framed.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
ALWAYS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-store"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)


@value
class Request:
    """One request, below the place where the console is mounted."""

    method: str
    #: Decoded, from the console's own root on: it begins with one slash.
    path: str
    #: Where the console is mounted, decoded, without a slash at its end: ``""`` or ``/semel``.
    base: str = ""
    #: Not decoded.
    query: str = ""
    #: Lower-case names.
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_secure: bool = False
    #: The user by the host application's own login, where that is asked.
    user: User | None = None

    @property
    def asked(self) -> dict[str, str]:
        """The fields of the query."""
        return _fields(self.query)

    @property
    def form(self) -> dict[str, str]:
        """The fields of the form that was sent."""
        return _fields(self.body.decode("latin-1"))

    def cookies(self, kind: str) -> list[str]:
        """Return the cookies of a kind: several, if a browser has some for different paths. Those of the host
        application may be of any shape, and hide none of ours.
        """
        name = self.cookie_name(kind)
        pairs = (each.strip().partition("=") for each in self.headers.get("cookie", "").split(";"))
        return [text for found, _, text in pairs if found == name]

    def cookie_name(self, kind: str) -> str:
        """Return what a cookie of this console is called: browsers keep those of all ports of a host together."""
        where = f"{self.headers.get('host', '')}{self.base}".encode("utf-8", "surrogatepass")
        return f"{kind}_{hashlib.sha256(where).hexdigest()[:8]}"

    @property
    def is_from_here(self) -> bool:
        """Whether a page of this very origin has sent it, as the browser says."""
        site = self.headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        # Browsers say it on https and on loopback only. The scheme may be changed on the way, by a proxy.
        origin, host = self.headers.get("origin"), self.headers.get("host")
        try:
            return bool(origin and host) and urlsplit(str(origin)).netloc == host
        except ValueError:
            return False


@value
class Response:
    """One answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def plus(self, *headers: tuple[str, str]) -> Response:
        """Return the same with more headers."""
        return replace(self, headers=(*self.headers, *headers))


def html(text: str, status: int = 200) -> Response:
    """Return a page."""
    return Response(status, (("content-type", "text/html; charset=utf-8"),), text.encode("utf-8", "replace"))


def see_other(place: str) -> Response:
    """Send the browser on, after a form."""
    return Response(303, (("location", place),))


def with_slash(base: str, query: str) -> Response:
    """Send the browser from the mount without a slash at its end to the one with it, where the cookies are."""
    place = f"{quoted(base)}/" + (f"?{query}" if query else "")
    return finished(Response(308, (("location", place),)))


def quoted(base: str) -> str:
    """Return the place of the console as it is written in links."""
    return quote(base, safe="/")


def finished(response: Response) -> Response:
    """Return *response* with what every answer has."""
    return response.plus(*ALWAYS, ("content-length", str(len(response.body))))


def too_long() -> Response:
    """Refuse a form that is too long."""
    return finished(Response(413, (("content-type", "text/plain"),), b"This form is too long.\n"))


def cut_off() -> Response:
    """Refuse a form that is not as long as was said: half a form may say something else than the whole."""
    said = b"This form is not as long as its Content-Length says. Nothing was done.\n"
    return finished(Response(400, (("content-type", "text/plain"),), said))


def login_failed(error: Exception) -> Response:
    """Say that the host application's login has failed: then nothing is shown."""
    logger.error("auth= has failed, so the console shows nothing.", exc_info=error)
    said = b"The login of this console has failed, so nothing is shown. The log has the rest.\n"
    return finished(Response(500, (("content-type", "text/plain"),), said))


def placed(path: str, root: str) -> tuple[str, str]:
    """Return the path below the mount *root*, and the root without slashes too many."""
    base = "/" + "/".join(part for part in root.split("/") if part)
    parts = "/" + "/".join(part for part in path.split("/") if part)
    if base == "/":
        return parts, ""
    # Some servers give the path with the mount in front, and some without.
    below = parts[len(base) :] if parts == base or parts.startswith(f"{base}/") else parts
    return below or "/", base


def _fields(text: str) -> dict[str, str]:
    try:
        pairs: list[tuple[str, Any]] = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        return {}
    return dict(pairs)

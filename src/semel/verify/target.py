"""What is to be verified, from what was typed: a URL, a request, headers, a counter. A mistake is an error before
anything is sent.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from semel.core.vendors import VENDORS
from semel.errors import ConfigurationError
from semel.verify.connection import Client, Place, tls
from semel.verify.message import Request
from semel.verify.model import KeyHeader
from semel.verify.request_file import BAD_IN_VALUE, TOKEN, RequestFileWrong, parse
from semel.verify.telling import OWN_HEADERS

MAX_FILE = 16 * 1024 * 1024

_WHICH = "Which request? Give one of --request FILE, --json BODY and --openapi FILE."


class Target:
    """A server, and the part of its URL that paths are relative to."""

    def __init__(self, url: str, *, timeout: float, is_checked: bool = True) -> None:
        parts = _split(url)
        self._timeout = timeout
        self._is_checked = is_checked
        self.client = self._client(parts)
        self.prefix = parts.path.rstrip("/")
        self.query = parts.query
        self.path = parts.path
        #: Without credentials.
        self.origin = f"{parts.scheme}://{self.client.place.authority}"
        self.base = self.origin + self.prefix
        self.credentials = _basic(parts)

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine: only then is nothing asked before requests are sent."""
        host = self.client.place.host
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def client_for(self, url: str) -> tuple[Client, str]:
        """Return what sends requests to *url*, and the request target there."""
        parts = _split(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return self._client(parts), target

    def _client(self, parts: SplitResult) -> Client:
        try:
            port = parts.port
        except ValueError:
            raise ConfigurationError("The URL has a port that is no number from 0 to 65535.") from None
        is_tls = parts.scheme == "https"
        context = tls(is_checked=self._is_checked) if is_tls else None
        place = Place(parts.hostname or "", port or (443 if is_tls else 80), context)
        return Client(place, self._timeout)


def request_of(
    target: Target, *, file: Path | None, content: str | None, headers: Iterable[tuple[str, str]], found: Request | None
) -> Request:
    """Return the request: from a *file*, from JSON *content* for the URL itself, or as it was *found* elsewhere."""
    if sum(each is not None for each in (file, content, found)) > 1:
        raise ConfigurationError(_WHICH)
    if file is not None:
        request = read(file)
        prefixed = Request(request.method, target.prefix + request.target, request.headers, request.body)
    elif content is not None:
        _look_at(content)
        path = (target.path or "/") + (f"?{target.query}" if target.query else "")
        prefixed = Request("POST", path, (("Content-Type", "application/json"),), content.encode())
    elif found is not None:
        prefixed = Request(found.method, target.prefix + found.target, found.headers, found.body)
    else:
        raise ConfigurationError(_WHICH)
    given = list(headers)
    if target.credentials and prefixed.header("authorization") is None:
        given.append(("Authorization", target.credentials))
    request = prefixed.having(*given)
    return request.having(*(each for each in OWN_HEADERS if request.header(each[0]) is None))


def read(file: Path, environment: Mapping[str, str] = os.environ) -> Request:
    """Read the request in *file*."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read: {error.strerror}.") from None
    if len(data) > MAX_FILE:
        raise ConfigurationError(f"{file} is larger than {MAX_FILE} bytes.")
    return parse(data, environment, name=str(file))


def header(text: str) -> tuple[str, str]:
    """Read ``Name: value``."""
    name, colon, value = text.partition(":")
    if not colon or not TOKEN.fullmatch(name):
        raise ConfigurationError(f"{text[:20]!r} is no header. Write it as 'Name: value'.")
    if BAD_IN_VALUE.search(value):
        raise ConfigurationError(f"The value of the header {name} has a character that can't be sent.")
    return name, value.strip()


def key_header(text: str) -> KeyHeader:
    """Return the header of the key: the one of a vendor, or the one with this name."""
    for name, vendor in VENDORS.items():
        if name == text:
            return KeyHeader(vendor.header, vendor.max_key_length)
    if not TOKEN.fullmatch(text):
        vendors = ", ".join(VENDORS)
        raise ConfigurationError(f"{text!r} is neither the name of a header nor a vendor: {vendors}.")
    return KeyHeader(text)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        raise ConfigurationError("The URL can't be read.") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ConfigurationError("The URL begins with http:// or https:// and names a host.")
    if not url.isascii() or re.search(r"[\x00-\x20\x7f]", url):
        raise ConfigurationError("The URL has a character that can't be sent. Write it percent-encoded.")
    return parts


def _basic(parts: SplitResult) -> str | None:
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _look_at(content: str) -> None:
    try:
        json.loads(content)
    except json.JSONDecodeError as error:
        raise RequestFileWrong("--json", error.lineno, error.colno, f"That is no JSON: {error.msg}.") from None

"""A request and an answer, as bytes on the wire. Nothing is sent here, and no rule about keys is known."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

#: A header value is text that stands for bytes: one character for each.
WIRE = "latin-1"

Headers = tuple[tuple[str, str], ...]

SUCCESS = range(200, 300)
CLIENT_ERROR = range(400, 500)
SERVER_ERROR = range(500, 600)
CHUNK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A request to be sent exactly as it is, with a length and a host added."""

    method: str
    #: Path and query.
    target: str
    headers: Headers = ()
    body: bytes = b""
    is_chunked: bool = False
    #: Whether it says ``Expect: 100-continue`` and waits for the server to ask for the body.
    expects: bool = False

    def header(self, name: str) -> str | None:
        """Return the first value of the header *name*."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), None)

    def having(self, *headers: tuple[str, str]) -> Request:
        """Return it with these headers in place of those of the same names."""
        names = {name.lower() for name, _ in headers}
        kept = tuple(each for each in self.headers if each[0].lower() not in names)
        return replace(self, headers=(*kept, *headers))

    def lacking(self, *names: str) -> Request:
        """Return it without the headers of these *names*."""
        lacked = {name.lower() for name in names}
        return replace(self, headers=tuple(each for each in self.headers if each[0].lower() not in lacked))

    @property
    def media_type(self) -> str:
        """The media type of the body, in lower case, without parameters."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower()

    @property
    def is_json(self) -> bool:
        """Whether the body says that it is JSON."""
        return self.media_type == "application/json" or self.media_type.endswith("+json")

    def head(self, host: str) -> bytes:
        """The request line and the header section."""
        lines = [f"{self.method} {self.target} HTTP/1.1"]
        if self.header("host") is None:
            lines.append(f"Host: {host}")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.is_chunked:
            lines.append("Transfer-Encoding: chunked")
        elif self.body or self.method in {"POST", "PUT", "PATCH"}:
            lines.append(f"Content-Length: {len(self.body)}")
        if self.expects:
            lines.append("Expect: 100-continue")
        lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode(WIRE)

    def content(self) -> bytes:
        """The body, in chunks if it is sent so."""
        if not self.is_chunked:
            return self.body
        starts = range(0, len(self.body), CHUNK_BYTES)
        chunks = [self.body[start : start + CHUNK_BYTES] for start in starts]
        return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer that was received whole."""

    status: int
    headers: Headers = ()
    body: bytes = b""
    seconds: float = 0.0

    def header(self, name: str) -> str | None:
        """Return the first value of the header *name*."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), None)

    def all(self, name: str) -> tuple[str, ...]:
        """Return every value of the header *name*, in order."""
        return tuple(value for each, value in self.headers if each.lower() == name.lower())

    @property
    def is_success(self) -> bool:
        """Whether the operation took place, as the answer says."""
        return self.status in SUCCESS

    @property
    def is_marked(self) -> bool:
        """Whether the answer says of itself that it is a replay."""
        marker = self.header("idempotent-replayed") or ""
        return marker.strip().lower() in {"true", "?1", "1"}

    @property
    def media_type(self) -> str:
        """The media type, in lower case, without parameters."""
        return (self.header("content-type") or "").partition(";")[0].strip().lower()

    def json(self) -> Any:
        """Return the body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """There was no answer, or none that could be read. Whether the request took effect is unknown."""

    reason: str
    #: Whether the request was not even sent: nothing listens there.
    is_unsent: bool = False


Outcome = Answer | NoAnswer

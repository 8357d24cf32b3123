"""Requests and answers as the core sees them: values made of bytes. They are read from no socket and sent to none."""

from __future__ import annotations

import re
from dataclasses import field
from urllib.parse import unquote

from semel.core.value import value

Headers = tuple[tuple[bytes, bytes], ...]

# Nearly every character that is not ASCII's own can be printed; each is looked at by itself.
_UNPRINTABLE = re.compile(r"[^ -~]")


@value
class Head:
    """What is known of a request before its body: enough to refuse it."""

    method: str
    #: As the client sent it, with the mount point (``root_path``, ``SCRIPT_NAME``) in front: not decoded,
    #: since decoding can make one resource of two.
    path: str
    query: bytes
    #: Lower-case names, in the order they came, repeats and all.
    headers: Headers
    #: The mount point by itself, decoded: a request that is kept is run again from there.
    mount: str = ""

    def values(self, name: bytes) -> list[bytes]:
        """Every value sent under *name* (lower case), in order."""
        return [value for each, value in self.headers if each == name]


def one_line(text: str) -> str:
    """Return *text* as it may stand in a log: with a line break of its own it could forge the line that follows."""
    return text if text.isprintable() else _UNPRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    found: str = match[0]
    return found if found.isprintable() else found.encode("unicode_escape").decode("ascii")


def request_of(method: str, path: str) -> str:
    """Return by what one request is known to two guards that it passes: servers and adapters quote a path anew."""
    return f"{method} {unquote(path)}"


@value
class Request:
    """A whole request, kept so that it can be run again without its client."""

    head: Head
    body: bytes
    #: Whose it is, as the application's own login said at the time.
    principal: str


@value
class Answer:
    """A response: status, ordered header pairs, bytes. ``body=None`` is a tombstone: it was sent, but not kept.

    Header names are lower case.
    """

    status: int
    headers: Headers = field(default=())
    body: bytes | None = b""

    @property
    def is_tombstone(self) -> bool:
        """Whether the operation ended with an answer that could not be kept."""
        return self.body is None

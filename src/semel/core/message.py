"""Requests and answers in the core: values made of bytes. Nothing here reads or writes a socket."""

from __future__ import annotations

import re
from dataclasses import field
from urllib.parse import unquote

from semel.core.value import value

Headers = tuple[tuple[bytes, bytes], ...]

# Nearly every character beyond ASCII can be printed; each is checked by itself.
_UNPRINTABLE = re.compile(r"[^ -~]")


@value
class Head:
    """What is known of a request before its body: enough to refuse it."""

    method: str
    #: As the client sent it, with the mount point (``root_path``, ``SCRIPT_NAME``) in front: not decoded,
    #: since two resources can have one decoded path.
    path: str
    query: bytes
    #: Lower-case names, in the order they came, with repeated ones.
    headers: Headers
    #: The mount point by itself, decoded: a stored request is run again with it.
    mount: str = ""

    def values(self, name: bytes) -> list[bytes]:
        """Every value sent under *name* (lower case), in order."""
        return [value for each, value in self.headers if each == name]


def one_line(text: str) -> str:
    """Return *text* escaped for a log: with a line break it could forge the next line."""
    return text if text.isprintable() else _UNPRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    found: str = match[0]
    return found if found.isprintable() else found.encode("unicode_escape").decode("ascii")


def request_of(method: str, path: str) -> str:
    """Return a name of the request that two guards around it agree on: servers and adapters may requote its path."""
    return f"{method} {unquote(path)}"


@value
class Request:
    """A whole request, stored so that it can be run again without its client."""

    head: Head
    body: bytes
    #: Its principal, from the application's own login at the time.
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

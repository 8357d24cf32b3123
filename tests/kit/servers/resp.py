"""Questions to a Redis server, over a socket of their own. No driver, since what starts servers must need none; and
one question per connection, since few are asked.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import IO

from tests.kit.servers.base import LOOPBACK

#: How long a server may take to answer. It is on this machine, and may be busy.
ANSWER_SECONDS = 5.0

Reply = str | int | None | list["Reply"]


class RedisRefused(RuntimeError):
    """The server has answered with an error. The message is its own."""


def ask(port: int, *words: str) -> Reply:
    """Send one command and return the reply."""
    parts = [word.encode() for word in words]
    request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    with socket.create_connection((LOOPBACK, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(request)
        with connection.makefile("rb") as replies:
            return _read(replies)


def ask_facts(port: int, *words: str) -> dict[str, str]:
    """Send a command such as INFO, whose reply is lines of names and values."""
    lines = str(ask(port, *words)).splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def is_answering(port: int) -> bool:
    """Tell whether a server takes commands there: one that still reads its data does not."""
    try:
        return ask(port, "PING") == "PONG"
    except (OSError, RedisRefused):
        return False


def _read(replies: IO[bytes]) -> Reply:
    line = replies.readline().removesuffix(b"\r\n")
    kind, rest = line[:1], line[1:].decode()
    if kind not in _READERS:
        raise ConnectionError(f"The connection ended within a reply, or it is none of Redis: {line!r}")
    return _READERS[kind](replies, rest)


def _error(_replies: IO[bytes], rest: str) -> Reply:
    raise RedisRefused(rest)


def _bulk(replies: IO[bytes], rest: str) -> Reply:
    return None if rest == "-1" else replies.read(int(rest) + 2)[:-2].decode(errors="replace")


_READERS: dict[bytes, Callable[[IO[bytes], str], Reply]] = {
    b"+": lambda _replies, rest: rest,
    b"-": _error,
    b":": lambda _replies, rest: int(rest),
    b"$": _bulk,
    b"*": lambda replies, rest: None if rest == "-1" else [_read(replies) for _ in range(int(rest))],
}

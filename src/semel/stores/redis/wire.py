"""What goes over the wire: commands as bytes, and the scripts of ``scripts/`` as commands. Nothing here sends any."""

from __future__ import annotations

import binascii
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias

from semel.stores.redis.address import Node

try:
    from hiredis import ReplyError
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Redis needs hiredis. Run: pip install 'semel[redis]'") from error

__all__ = ["Call", "Parcel", "Reply", "ReplyError", "Script", "Trouble", "packed", "script", "slot_of"]

PACKAGE = "semel.stores.redis"

#: As hiredis reads it; an error is a value, too.
Reply: TypeAlias = Any

#: How many slots a Cluster has.
SLOTS = 16384


@dataclass(slots=True)
class Call:
    """One command for whoever has *key*; or, without one, for a certain *node*."""

    key: bytes
    data: bytes
    script: Script | None = None
    node: Node | None = None


@dataclass(slots=True)
class Parcel:
    """Some commands for one server, packed together, and how many replies will come."""

    node: Node
    data: bytes
    count: int


@dataclass(slots=True)
class Trouble:
    """What came back in place of replies: no connection, or one that was lost."""

    error: BaseException
    #: Whether any of it may have reached the server.
    was_sent: bool

    @property
    def is_too_slow(self) -> bool:
        """Whether the server took longer than it may: sending it again would only add to the load."""
        return isinstance(self.error, TimeoutError)


def packed(*words: bytes | str | int) -> bytes:
    """Return one command as it is sent."""
    spelled = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(spelled) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in spelled])


class Script:
    """One file of ``scripts/``, called by the digest that the server knows it by."""

    def __init__(self, name: str) -> None:
        """Read the script."""
        text = (files(PACKAGE) / "scripts" / f"{name}.lua").read_text("utf-8")
        self.name = name
        # Comments are for the reader of the file.
        self._text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--")).encode()
        self._digest = sha1(self._text, usedforsecurity=False).hexdigest().encode()
        self._forms: dict[int, bytes] = {}

    @property
    def loading(self) -> bytes:
        """The command that tells a server the script."""
        return packed("SCRIPT", "LOAD", self._text)

    def on(self, key: bytes, *arguments: bytes) -> Call:
        """Call it on one record."""
        # One form for each number of arguments, filled in at once: packing word by word takes three times as long.
        form = self._forms.get(len(arguments)) or self._form(len(arguments))
        words: list[Any] = [len(key), key]
        for argument in arguments:
            words.append(len(argument))
            words.append(argument)
        return Call(key, form % tuple(words), self)

    def _form(self, count: int) -> bytes:
        # EVALSHA digest 1 key argument...
        head = b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n1\r\n" % (count + 4, self._digest)
        form = self._forms[count] = head + b"$%d\r\n%b\r\n" * (count + 1)
        return form


@cache
def script(name: str) -> Script:
    """Return a script, which is read once."""
    return Script(name)


def slot_of(key: bytes) -> int:
    """Return the slot of a Cluster that *key* is in. None of ours has a hash tag."""
    return binascii.crc_hqx(key, 0) % SLOTS

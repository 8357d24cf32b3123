"""The wire format: commands as bytes, the scripts of ``scripts/``, and error replies as Semel's exceptions. Nothing
here connects, sends or retries.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, TypeAlias

from hiredis import pack_command

from semel.errors import StoreError, StoreReadOnly, StoreRefused, StoreUnavailable
from semel.stores.redis.address import Address, Node

PACKAGE = "semel.stores.redis"

#: As hiredis reads it; an error is a value, too.
Reply: TypeAlias = Any
Word: TypeAlias = bytes | str | int

#: How many slots a Cluster has.
SLOTS = 16384


@dataclass(slots=True)
class Call:
    """One command for the server that has *key*; or, without a key, for a certain *node*."""

    key: bytes
    data: bytes
    script: Script | None = None
    node: Node | None = None


def packed(*words: Word) -> bytes:
    """Return one command as it is sent."""
    data: bytes = pack_command(words)  # type: ignore[arg-type]  # its stub says: a tuple of one
    return data


class Script:
    """One file of ``scripts/``, called by its digest."""

    def __init__(self, name: str) -> None:
        """Read the script."""
        text = (files(PACKAGE) / "scripts" / f"{name}.lua").read_text("utf-8")
        self.name = name
        # Comments are for the reader of the file.
        self._text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--")).encode()
        self._digest = sha1(self._text, usedforsecurity=False).hexdigest().encode()

    @property
    def loading(self) -> bytes:
        """The command that loads the script into a server."""
        return packed("SCRIPT", "LOAD", self._text)

    def on(self, key: bytes, *arguments: Word) -> Call:
        """Call it on one key."""
        return Call(key, packed(b"EVALSHA", self._digest, b"1", key, *arguments), self)

    def on_all(self, keys: Sequence[bytes], arguments: Sequence[Word]) -> Call:
        """Call it once on several keys, which a Cluster does not allow."""
        words: Any = (b"EVALSHA", self._digest, len(keys), *keys, *arguments)
        return Call(keys[0], pack_command(words), self)


@cache
def script(name: str) -> Script:
    """Return a script; its file is read once."""
    return Script(name)


def slot_of(key: bytes) -> int:
    """Return the slot of *key* in a Cluster. No key of Semel has a hash tag."""
    return binascii.crc_hqx(key, 0) % SLOTS


#: Redis 6 puts the error of a command in a script inside its message about the script.
_INNER = re.compile(r"-([A-Z]{3,}) ")

#: The server can't serve now, and did nothing: what to do about it, if anything.
_UNABLE = {
    "BUSY": "A script has been running for a long time.",
    "BUSYKEY": "",
    "CLUSTERDOWN": "A part of the Cluster has no master.",
    "LOADING": "It is still reading its data.",
    "MASTERDOWN": "It is a replica, and has lost its master.",
    "MISCONF": "It can't write to its disk, and takes no writes until it can.",
    "NOREPLICAS": "It has fewer replicas than min-replicas-to-write.",
    "OOM": "Its memory is full: raise maxmemory, or shorten the retention.",
    "TRYAGAIN": "A slot is being moved.",
    "UNBLOCKED": "",
}

#: Errors of the login.
_LOGIN = {
    "NOAUTH": "It needs a password. Write it as redis://:password@host, or redis://user:password@host.",
    "WRONGPASS": "User name or password is wrong.",
    "NOPERM": "This user lacks a permission that the store needs. The page on Redis has the ACL rule.",
}


def code_of(error: Exception) -> str:
    """Return the first word of the error, which is its code in Redis."""
    text = str(error)
    word = text.partition(" ")[0]
    if (word == "ERR" or word.startswith("@user_script")) and (inner := _INNER.search(text)):
        return inner[1]
    return word


def translated(error: Exception, address: Address, *, was_sent: bool = False) -> StoreError:
    """Return the exception for an error reply. A refused command was not run; *was_sent* is of an earlier try."""
    code = code_of(error)
    if code in _UNABLE:
        told = StoreUnavailable(f"{address} can't serve now ({code}). {_UNABLE[code]}".rstrip(), was_sent=was_sent)
        told.has_no_space = code == "OOM"
        return told
    if code in _LOGIN:
        return StoreUnavailable(f"{address} refuses the login ({code}). {_LOGIN[code]}", was_sent=was_sent)
    if code == "READONLY":
        return read_only(address)
    # Its message may quote what was sent, so it is left out.
    return StoreRefused(f"{address} refused a command ({code}).")


def read_only(address: Address) -> StoreReadOnly:
    """Return the error of a read-only replica."""
    return StoreReadOnly(f"{address} is a read-only replica. Give the address of the primary.")


def lost(error: BaseException, address: Address, node: Node | None, *, was_sent: bool) -> StoreUnavailable:
    """Return the error of a connection that can't be opened, or was lost."""
    where = f"{address}" if node is None or len(address.nodes) == 1 else f"{node} of {address}"
    # Some errors have no message, and a log needs one line.
    words = " ".join(str(error).split()) or type(error).__name__
    told = StoreUnavailable(f"{where} can't be reached: {words}", was_sent=was_sent)
    told.__cause__ = error
    return told

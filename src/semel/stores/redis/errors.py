"""Redis's errors in Semel's words, by their first word. Nothing here connects or retries."""

from __future__ import annotations

import re

from semel.errors import StoreError, StoreReadOnly, StoreRefused, StoreUnavailable
from semel.stores.redis.address import Address, Node

#: What Redis 6 says of a command in a script is inside its words about the script.
_INNER = re.compile(r"-([A-Z]{3,}) ")

#: The server can't do anything for anybody just now, and did nothing: what to do about it, where there is something.
_UNABLE = {
    "BUSY": "A script has been running for long.",
    "BUSYKEY": "",
    "CLUSTERDOWN": "A part of the Cluster has no master.",
    "LOADING": "It is still reading its data.",
    "MASTERDOWN": "It is a replica, and has lost its master.",
    "MISCONF": "It can't write to its disk, and takes no writes until it can.",
    "NOREPLICAS": "It has fewer replicas than it was told to need (min-replicas-to-write).",
    "OOM": "Its memory is full: raise maxmemory, or shorten the retention.",
    "TRYAGAIN": "A slot is being moved.",
    "UNBLOCKED": "",
}

#: Who we are is the matter.
_LOGIN = {
    "NOAUTH": "It wants a password. Write it as redis://:password@host, or redis://user:password@host.",
    "WRONGPASS": "User name and password are not known there.",
    "NOPERM": "This user may not do all that the store needs. The page on Redis has the ACL rule.",
}


def code_of(error: Exception) -> str:
    """Return the word by which Redis tells errors apart."""
    text = str(error)
    word = text.partition(" ")[0]
    if word == "ERR" and (inner := _INNER.search(text)):
        return inner[1]
    return word


def translated(error: Exception, address: Address, *, was_sent: bool = False) -> StoreError:
    """Return what an error reply means. A command that was refused was not carried out; *was_sent* is of one before."""
    code = code_of(error)
    if code in _UNABLE:
        return StoreUnavailable(f"{address} can't serve now ({code}). {_UNABLE[code]}".rstrip(), was_sent=was_sent)
    if code in _LOGIN:
        return StoreUnavailable(f"{address} refuses us ({code}). {_LOGIN[code]}", was_sent=was_sent)
    if code == "READONLY":
        return read_only(address)
    # The words may quote what was sent.
    return StoreRefused(f"{address} refused a command ({code}).")


def read_only(address: Address) -> StoreReadOnly:
    """Say that this is the wrong server."""
    return StoreReadOnly(f"{address} is a read-only replica. Give the address of the primary.")


def lost(error: BaseException, address: Address, node: Node | None, *, was_sent: bool) -> StoreUnavailable:
    """Say that there is no connection, or that there was one."""
    where = f"{address}" if node is None or len(address.nodes) == 1 else f"{node} of {address}"
    # Some errors have no words, and a log wants one line.
    words = " ".join(str(error).split()) or type(error).__name__
    told = StoreUnavailable(f"{where} can't be reached: {words}", was_sent=was_sent)
    told.__cause__ = error
    return told

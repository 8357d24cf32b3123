"""What is said first on every connection, and what a server has to be so that records may be kept there.

A server that evicts would forget that an operation was done; a replica takes no writes. It is asked at every new
connection, since a server may have been set up anew meanwhile. It sends nothing by itself.
"""

from __future__ import annotations

import logging

from semel.errors import StoreError, StoreNotReady, StoreUnavailable
from semel.stores.redis.address import Address, Node
from semel.stores.redis.errors import code_of, read_only, translated
from semel.stores.redis.wire import Reply, ReplyError, packed

_logger = logging.getLogger("semel")

#: Who was warned already: once for each address is enough.
_warned: set[str] = set()

_REPLICAS = frozenset({"slave", "replica"})


def greeting(address: Address, node: Node) -> tuple[bytes, int]:
    """Return what to send first, and how many replies will come."""
    login = address.login_at(node)
    words = []
    if login.password is not None:
        words.append(packed("AUTH", *([login.user] if login.user else []), login.password))
    if not node.is_sentinel:
        if address.kind != "cluster":
            words.append(packed("SELECT", address.database))
        words += [packed("CLIENT", "SETNAME", "semel"), packed("INFO"), packed("CONFIG", "GET", "save")]
    return b"".join(words), len(words)


def check(replies: list[Reply], address: Address, node: Node) -> None:
    """Raise a ``StoreError`` where the server can't be used."""
    if node.is_sentinel:
        if replies and isinstance(replies[0], ReplyError):
            raise translated(replies[0], address)
        return
    *login, named, info, saving = replies
    for reply in login:
        if isinstance(reply, ReplyError):
            raise _refused(reply, address)
    if isinstance(info, ReplyError):
        if code_of(info) == "NOPERM":
            raise StoreNotReady(f"{address} does not let this user ask for INFO, by which we see whether it evicts.")
        raise translated(info, address)
    # A server may know no names for connections, or not let us give one: nothing depends on it.
    del named
    facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    _judge(facts, address, node)
    if address.is_durable:
        _warn_of_no_persistence(facts, saving, address)


def _refused(error: ReplyError, address: Address) -> StoreError:
    if "invalid password" in str(error) or "without any password" in str(error):
        # As servers before version 6 say it, and those without any user.
        return StoreUnavailable(f"{address} refuses us. Its password is another, or it has none.")
    if "DB index is out of range" in str(error):
        return StoreNotReady(f"{address}: there is no such database. Redis has 0 to 15 unless it is told otherwise.")
    return translated(error, address)


def _judge(facts: dict[str, str], address: Address, node: Node) -> None:
    # A replica in a Cluster knows the way as well as any other, and sends on whoever asks it for more.
    if facts.get("role") in _REPLICAS and address.kind != "cluster":
        if address.kind == "lone":
            raise read_only(address)
        raise StoreUnavailable(f"{address}: {node} was named as a master, and is a replica by now.")
    if facts.get("cluster_enabled") == "1" and address.kind != "cluster":
        raise StoreNotReady(f"{node} belongs to a Redis Cluster. Use redis+cluster://{node}")
    policy = facts.get("maxmemory_policy", "noeviction")
    if address.is_durable and policy != "noeviction":
        raise StoreNotReady(
            f"{address} has maxmemory-policy {policy}: when its memory is full it would forget that operations were "
            "done, and they would be done again. Set it to noeviction, or use a Redis of its own for Semel."
        )


def _warn_of_no_persistence(facts: dict[str, str], saving: Reply, address: Address) -> None:
    # Where CONFIG is not allowed, nobody knows whether there are snapshots: then there is nothing to say.
    has_snapshots = isinstance(saving, ReplyError) or not saving or bool(saving[1])
    if facts.get("aof_enabled") == "1" or has_snapshots or str(address) in _warned:
        return
    _warned.add(str(address))
    _logger.warning(
        "%s keeps nothing on disk: after a restart every key is new, and a retry runs again. "
        "Set appendonly yes (and appendfsync always, to lose nothing).",
        address,
    )

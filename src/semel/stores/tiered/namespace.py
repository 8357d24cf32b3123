"""Which durable store an answer in Redis belongs to. Two that share a Redis may have the same key in the same scope,
and neither must ever be given the other's answer.

By default it is where the durable store is, as far as that tells it from every other: what is on *this* machine, or in
this process, is no other machine's. Whoever knows better says so, and gives a namespace.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.stores.postgres.address import Address as PostgresAddress
from semel.stores.redis.address import Address as RedisAddress
from semel.stores.sqlite.file import Place

#: What of a PostgreSQL URL's parameters says where it leads; and what drivers read in the environment for those that it
#: leaves out.
_LEADING = frozenset({"dbname", "host", "hostaddr", "options", "port", "service", "user"})
_LEADING_HOSTS = frozenset({"host", "hostaddr"})
_AROUND = ("PGDATABASE", "PGHOST", "PGHOSTADDR", "PGOPTIONS", "PGPORT", "PGSERVICE", "PGUSER")

#: What sets machines apart that have one name: which start of the kernel it is; and, of containers, whose localhost and
#: whose files they see.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CONTAINER = ("/proc/self/ns/net", "/proc/self/ns/mnt")


def namespace_of(durable: Store | AsyncStore) -> str:
    """Return what tells the answers of *durable* from those of others."""
    if isinstance(durable, MemoryStore | AsyncMemoryStore):
        # Its records end with it.
        return f"memory {secrets.token_hex(8)}"
    match getattr(durable, "address", None) or getattr(durable, "place", None):
        case PostgresAddress(opener=opener) if opener is not None:
            raise ConfigurationError(
                "An engine or a pool does not say all of where it leads (connect_args, a creator), and other stores' "
                'answers may be in the same Redis. Give Tiered a namespace, such as namespace="shop-production".'
            )
        case PostgresAddress() as address:
            return _postgres(address)
        case RedisAddress() as address:
            return _redis(address)
        case Place() as place:
            return f"sqlite {_machine()} {place.path} {place.names.table}"
        case _:
            raise ConfigurationError(
                f"{type(durable).__name__} does not say where it is, and other stores' answers may be in the same "
                'Redis. Give Tiered a namespace, such as namespace="shop-production".'
            )


def _postgres(address: PostgresAddress) -> str:
    parts = urlsplit(address.url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    leading = sorted((name, value) for name, value in parse_qsl(parts.query) if name in _LEADING)
    places = [unquote(urlsplit(f"//{each}").hostname or "") for each in hosts.split(",")]
    places += [place for name, value in leading if name in _LEADING_HOSTS for place in value.split(",")]
    database = unquote(parts.path.removeprefix("/"))
    if not (database and address.names.schema):
        # The database is then called as the user is; and in whose schema the table is, depends on who asks.
        leading.append(("user", unquote(credentials.partition(":")[0])))
    leading += [(name, os.environ[name]) for name in _AROUND if name in os.environ]
    said: list[Any] = [hosts.lower(), database, leading, address.names.schema or "", address.names.table]
    if _is_here(places):
        said.insert(0, _machine())
    return f"postgresql {said}"


def _redis(address: RedisAddress) -> str:
    said: list[Any] = [list(map(str, address.nodes)), address.service, address.database, address.prefix]
    if _is_here([node.host for node in address.nodes]):
        said.insert(0, _machine())
    return f"redis {said}"


def _is_here(hosts: list[str]) -> bool:
    """Whether another machine may mean another server by one of these."""
    return any(_is_known_here(host) for host in hosts)


def _is_known_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name that begins with a slash is a socket's. One without a dot is looked up in the network's own domain, and
        # each network may have a "db".
        return host.startswith("/") or "." not in host or host.endswith(".localhost")


def _machine() -> str:
    said = [socket.gethostname()]
    with suppress(OSError):  # not on Linux
        said += [_BOOT.read_text("ascii").strip(), *map(os.readlink, _CONTAINER)]
    return " ".join(said)

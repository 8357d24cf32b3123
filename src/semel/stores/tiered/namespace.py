"""Which durable store an answer in Redis belongs to. Two that share a Redis may have the same key in the same scope,
and neither must ever be given the other's answer.

By default it is the location of the durable store, if that is unique: a store on *this* machine, or in this process,
gets the machine's own identity. An application that knows better gives a namespace.
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

#: The parameters of a PostgreSQL URL that are part of the location; and the environment variables that drivers read for
#: those that are left out.
_LEADING = frozenset({"dbname", "host", "hostaddr", "options", "port", "service", "user"})
_LEADING_HOSTS = frozenset({"host", "hostaddr"})
_AROUND = ("PGDATABASE", "PGHOST", "PGHOSTADDR", "PGOPTIONS", "PGPORT", "PGSERVICE", "PGUSER")

#: What distinguishes machines of the same name: the kernel's boot id; and, for containers, their network and file
#: system namespaces.
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CONTAINER = ("/proc/self/ns/net", "/proc/self/ns/mnt")


def namespace_of(durable: Store | AsyncStore) -> str:
    """Return a name that distinguishes the answers of *durable* from those of other stores."""
    if isinstance(durable, MemoryStore | AsyncMemoryStore):
        # Its records end with the process.
        return f"memory {secrets.token_hex(8)}"
    match getattr(durable, "address", None) or getattr(durable, "place", None):
        case PostgresAddress(opener=opener) if opener is not None:
            raise ConfigurationError(
                "An engine or a pool does not show its whole location (connect_args, a creator), and other stores' "
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
        # The default database is named after the user, and the schema depends on the user as well.
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
    """Whether one of these names may be another server on another machine."""
    return any(_is_known_here(host) for host in hosts)


def _is_known_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name that begins with a slash is a socket. One without a dot is looked up in the local domain, and
        # each network may have a "db".
        return host.startswith("/") or "." not in host or host.endswith(".localhost")


def _machine() -> str:
    said = [socket.gethostname()]
    with suppress(OSError):  # not on Linux
        said += [_BOOT.read_text("ascii").strip(), *map(os.readlink, _CONTAINER)]
    return " ".join(said)

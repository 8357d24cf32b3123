"""The address of a Redis server, a Cluster, or a master behind sentinels, from a URL. It connects to nothing."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, cast, get_args
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from semel.errors import ConfigurationError

#: How long a server may take to answer before the connection counts as lost. A half-open connection never answers.
CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 10.0

#: The prefix of all of Semel's names in the database, so that it can be shared.
PREFIX = "semel"

PORT = 6379
SENTINEL_PORT = 26379

Kind = Literal["standalone", "cluster", "sentinel"]
#: What the audit trail has: what the records don't tell, and, with ``all``, every change, and, with ``replays``, every
#: replay too.
Audit = Literal["on", "off", "all", "replays"]

_KINDS: dict[str, Kind] = {
    "redis": "standalone",
    "rediss": "standalone",
    "redis+cluster": "cluster",
    "redis+sentinel": "sentinel",
}

#: The settings after the question mark.
_SETTINGS = frozenset(
    {
        "audit",
        "connect_timeout",
        "prefix",
        "sentinel_password",
        "sentinel_username",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_keyfile",
        "timeout",
        "tls",
    }
)

# A brace in it would put every key of a Cluster into one slot.
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_ON = frozenset({"on", "1", "true", "yes"})


@dataclass(frozen=True, slots=True)
class Node:
    """One server."""

    host: str
    port: int

    def __str__(self) -> str:
        """Show host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a server. It is never shown."""

    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    """How a connection is encrypted."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    is_checked: bool = True

    def context(self) -> ssl.SSLContext:
        """Read the certificates."""
        try:
            made = ssl.create_default_context(cafile=self.ca_certs)
            if self.certfile:
                made.load_cert_chain(self.certfile, self.keyfile)
        except OSError as error:
            raise ConfigurationError(f"The TLS certificates of the Redis store can't be read: {error}") from error
        if not self.is_checked:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        return made


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and the prefix of the keys."""

    kind: Kind
    #: The server; or the first servers of the Cluster to ask; or the sentinels.
    nodes: tuple[Node, ...]
    database: int = 0
    #: The sentinels' name of the master.
    service: str = ""
    login: Login = Login()
    sentinel_login: Login = Login()
    tls: Tls | None = None
    prefix: str = PREFIX
    audit: Audit = "off"
    connect_seconds: float = CONNECT_SECONDS
    command_seconds: float = COMMAND_SECONDS
    #: Whether a server that may evict records is refused. A cache may evict.
    is_durable: bool = True

    @classmethod
    def of(cls, url: str) -> Self:
        """Read a URL; the settings after the question mark are Semel's."""
        parts = urlsplit(url)
        settings = dict(parse_qsl(parts.query, keep_blank_values=True))
        strange = sorted(settings.keys() - _SETTINGS)
        if "@" in parts.path + parts.fragment or (strange and "@" in parts.query):
            # The text before it is most likely a password, so none of it is quoted.
            raise ConfigurationError(
                "The URL of a Redis store has an @ after its host. In a password, write / ? # @ as %2F %3F %23 %40."
            )
        if strange:
            raise ConfigurationError(
                f"?{strange[0]}= is not known in the URL of a Redis store. There are: {', '.join(sorted(_SETTINGS))}."
            )
        kind = _KINDS[parts.scheme]
        service, database = _path(parts, kind)
        return cls(
            kind=kind,
            nodes=_nodes(parts, kind),
            database=database,
            service=service,
            login=_login(parts),
            sentinel_login=Login(settings.get("sentinel_username"), settings.get("sentinel_password")),
            tls=_tls(settings) if parts.scheme == "rediss" or settings.get("tls") in _ON else None,
            prefix=_prefix(settings.get("prefix", PREFIX)),
            audit=_audit(settings.get("audit", "off")),
            connect_seconds=_seconds(settings, "connect_timeout", CONNECT_SECONDS),
            command_seconds=_seconds(settings, "timeout", COMMAND_SECONDS),
        )

    def __str__(self) -> str:
        """Show the address, without the password and the settings."""
        scheme = {"standalone": "rediss" if self.tls else "redis"}.get(self.kind, f"redis+{self.kind}")
        user = f"{self.login.user}@" if self.login.user else ""
        path = {"standalone": f"/{self.database}", "sentinel": f"/{self.service}/{self.database}"}.get(self.kind, "")
        said = f"?prefix={self.prefix}" if self.prefix != PREFIX else ""
        return f"{scheme}://{user}{','.join(map(str, self.nodes))}{path}{said}"

    __repr__ = __str__


def _nodes(parts: SplitResult, kind: Kind) -> tuple[Node, ...]:
    usual = SENTINEL_PORT if kind == "sentinel" else PORT
    said = parts.netloc.rpartition("@")[2] or "localhost"
    nodes = tuple(_node(each, usual) for each in said.split(","))
    if kind == "standalone" and len(nodes) > 1:
        raise ConfigurationError("redis:// names one server. Several are redis+cluster:// or redis+sentinel://.")
    return nodes


def _node(said: str, usual: int) -> Node:
    # Of [::1]:6379 the host is what is in the brackets.
    one = urlsplit(f"//{said}")
    try:
        port = one.port
    except ValueError:
        raise ConfigurationError(f"The port in {said!r} is not a number between 0 and 65535.") from None
    return Node(one.hostname or "localhost", usual if port is None else port)


def _login(parts: SplitResult) -> Login:
    credentials, at, _ = parts.netloc.rpartition("@")
    if not at:
        return Login()
    user, colon, password = credentials.partition(":")
    return Login(unquote(user) or None, unquote(password) if colon else None)


def _path(parts: SplitResult, kind: Kind) -> tuple[str, int]:
    names = [unquote(name) for name in parts.path.split("/") if name]
    if kind == "sentinel":
        if not names:
            raise ConfigurationError("redis+sentinel://host:26379/NAME/0 must have the sentinels' name of the master.")
        return names[0], _database(names[1:])
    database = _database(names)
    if kind == "cluster" and database:
        raise ConfigurationError("A Redis Cluster has database 0 only. Leave the number out.")
    return "", database


def _database(names: list[str]) -> int:
    if not names:
        return 0
    if len(names) > 1 or not names[0].isdecimal():
        raise ConfigurationError(f"The database of a Redis store is a number, as in redis://host/0, not {names[-1]!r}.")
    return int(names[0])


def _tls(settings: dict[str, str]) -> Tls:
    checks = settings.get("ssl_cert_reqs", "required")
    if checks not in {"required", "none"}:
        raise ConfigurationError(f"?ssl_cert_reqs={checks} is not known. Use required or none.")
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in settings and not Path(settings[name]).is_file():
            raise ConfigurationError(f"?{name}={settings[name]} is not a file.")
    return Tls(
        settings.get("ssl_ca_certs"), settings.get("ssl_certfile"), settings.get("ssl_keyfile"), checks == "required"
    )


def _prefix(value: str) -> str:
    if not _PREFIX.fullmatch(value):
        raise ConfigurationError(f"?prefix={value} must be 1 to 64 letters, digits and _ . : -")
    return value


def _audit(value: str) -> Audit:
    if value not in get_args(Audit):
        raise ConfigurationError(f"?audit={value} is not known. Use on, off, all or replays.")
    return cast("Audit", value)


def _seconds(settings: dict[str, str], name: str, usual: float) -> float:
    if name not in settings:
        return usual
    try:
        seconds = float(settings[name])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"?{name}={settings[name]} must be a number of seconds, as in 2.5.")
    return seconds

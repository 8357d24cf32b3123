"""The address of a PostgreSQL server and of Semel's table in it, read off a URL. It connects to nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from semel.core.trail import Audit
from semel.errors import ConfigurationError
from semel.stores.postgres.encoding import ENCODING
from semel.stores.statement import DEFAULT_TABLE, Names

#: How long a server may take to answer before it counts as gone. A half-open connection never answers.
CONNECT_SECONDS = 5
STATEMENT_SECONDS = 10
#: How long to wait for a row that is locked: by an operator with an open transaction, most likely. With all
#: tries together it must stay well below a lease.
LOCK_SECONDS = 2
#: How many transactions of the application's may be open at once, unless ``?pool=`` says otherwise.
POOL_SIZE = 16
#: How many connections the store has for its own statements at most, unless ``?connections=`` says otherwise: one for
#: each kind of statement, so that none waits behind another. Beside them one renews leases.
MAX_CONNECTIONS = 5
#: How long a number may be that is read off a URL. Python refuses to read one of thousands of digits.
_MAX_DIGITS = 9
#: Settings of libpq's that no message may show.
_SECRET = frozenset({"password", "sslpassword", "oauth_client_secret"})

#: When a key in progress may be taken over: when its lease is over; or, *instant*, when its worker's process is dead.
Takeover = Literal["lease", "instant"]

#: What our sessions ask of the server. They send nothing but the statements of ``queries.sql``, each of which is a
#: handful of look-ups by primary key, or a walk along an index. A table that was never analysed makes the planner cache
#: a sequential scan for that, or sort all that is due to reap some of it, and keep to it while the table grows.
#: The plan is made once for all values: left to itself, the server takes a statement for one key to be so much cheaper
#: than one for many that it plans it anew each time, which takes several times as long as to run it.
SESSION = {
    "application_name": "semel",
    "client_encoding": ENCODING,
    "default_transaction_isolation": "read committed",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_sort": "off",
    "jit": "off",
    # To start workers takes longer than any of these statements does.
    "max_parallel_workers_per_gather": "0",
    "plan_cache_mode": "force_generic_plan",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "statement_timeout": f"{STATEMENT_SECONDS}s",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and what the table is called."""

    #: For a driver: without the parameters that are ours.
    url: str
    names: Names
    audit: Audit = "on"
    #: How many transactions of the application's may be open at once.
    pool: int = POOL_SIZE
    takeover: Takeover = "lease"
    #: How many connections there are for the store's own statements, beside the one that renews leases.
    connections: int = MAX_CONNECTIONS
    #: Makes a connection as the application makes its own, where an engine or a pool was given and no URL. Then *url*
    #: only names the server in messages: what it leaves out, such as certificates, must not be left out.
    opener: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, url: str, opener: Any = None) -> Self:
        """Read a ``postgresql://`` URL; ``table``, ``schema``, ``audit``, ``pool``, ``connections`` and
        ``takeover`` in it are ours.
        """
        parts = urlsplit(url)
        try:
            for host in parts.netloc.rpartition("@")[2].split(","):  # a primary and its standbys, each with its port
                urlsplit(f"//{host}").port  # noqa: B018 - it is parsed when it is read
        except ValueError:
            # What stands there may be a password that was not escaped, so it is not quoted.
            raise ConfigurationError(
                "The port in the URL of a PostgreSQL store is no number between 0 and 65535. "
                "In a password, write / ? # @ as %2F %3F %23 %40."
            ) from None
        ours = {
            "table": DEFAULT_TABLE,
            "schema": None,
            "audit": "on",
            "pool": str(POOL_SIZE),
            "connections": str(MAX_CONNECTIONS),
            "takeover": "lease",
        }
        theirs = []
        # To libpq a plus is a plus, in a password above all, and no space.
        for name, value in parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True):
            if name in ours:
                ours[name] = value
            else:
                theirs.append((name, value))
        return cls(
            _joined(url, parts.netloc, parts.path) + _query(theirs),
            Names(ours["table"] or "", ours["schema"]),
            _audit(ours["audit"]),
            _pool(ours["pool"]),
            _takeover(ours["takeover"]),
            _connections(ours["connections"]),
            opener,
        )

    def __str__(self) -> str:
        """Show the address to people: without the password, and without what only a driver cares about."""
        return _safe(self.url) + _query(self._ours)

    __repr__ = __str__

    @property
    def typed(self) -> str:
        """Return what stands for the whole address in a command: a variable, where it has what must not be shown, or
        is an engine's.
        """
        parts = urlsplit(self.url)
        theirs = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
        if self.opener is not None or parts.password or any(name in _SECRET for name, _ in theirs):
            return '"$SEMEL_STORE"'
        return shlex.quote(_joined(self.url, parts.netloc, parts.path) + _query([*theirs, *self._ours]))

    @property
    def _ours(self) -> list[tuple[str, str | None]]:
        ours = {"schema": self.names.schema, "table": self.names.table}
        return [(name, value) for name, value in ours.items() if value not in {None, DEFAULT_TABLE}]


def _audit(value: str | None) -> Audit:
    if value not in get_args(Audit):
        raise ConfigurationError(f"?audit={value} is not known: on, all, replays and off are.")
    return cast("Audit", value)


def _takeover(value: str | None) -> Takeover:
    if value not in get_args(Takeover):
        raise ConfigurationError(f"?takeover={value} is not known: lease and instant are.")
    return cast("Takeover", value)


def _pool(value: str | None) -> int:
    if (number := _number(value)) < 1:
        raise ConfigurationError(
            f"?pool={value} must be a number, 1 or more, of up to {_MAX_DIGITS} digits: of transactions open at once."
        )
    return number


def _connections(value: str | None) -> int:
    if not 1 <= (number := _number(value)) <= MAX_CONNECTIONS:
        raise ConfigurationError(f"?connections={value} must be a number from 1 to {MAX_CONNECTIONS}.")
    return number


def _number(value: str | None) -> int:
    """Read a number; 0 where it is none, or too long to be meant."""
    return int(value) if value and value.isdecimal() and len(value) <= _MAX_DIGITS else 0


def _safe(url: str) -> str:
    parts = urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    return _joined(url, f"{user}{at}{host}", parts.path)


def _joined(url: str, netloc: str, path: str) -> str:
    """Put together what *url* was taken apart into. ``urlunsplit`` leaves the slashes out where there is no host."""
    slashes = "//" if url.partition(":")[2].startswith("//") else ""
    return f"postgresql:{slashes}{netloc}{path}"


def _query(pairs: Sequence[tuple[str, str | None]]) -> str:
    # To libpq a space is %20 only.
    return f"?{urlencode(pairs, quote_via=quote)}" if pairs else ""

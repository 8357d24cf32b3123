"""Whether the server can be a store at all: reached, PostgreSQL itself, writable, with room for connections. What is in
its tables is checked elsewhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.network import Skew, is_local, judge_skew

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

GROUP = Group(Kind.POSTGRES, "PostgreSQL: server", "how-to/postgresql.md", ("postgres-reachable", "postgres-genuine"))

#: The oldest version that the project still makes corrections for. Semel is tested on 15 and 18.
OLDEST = 140000

#: What servers that speak PostgreSQL's protocol say of themselves in version().
LOOK_ALIKES = {
    "CockroachDB": "CockroachDB",
    "Redshift": "Amazon Redshift",
    "-YB-": "YugabyteDB",
    "Yugabyte": "YugabyteDB",
    "Greenplum": "Greenplum",
    "Materialize": "Materialize",
    "CrateDB": "CrateDB",
    "QuestDB": "QuestDB",
    "Yellowbrick": "Yellowbrick",
    "Vertica": "Vertica",
    "RisingWave": "RisingWave",
    "DuckDB": "DuckDB",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a server takes writes."""

    is_replica: bool
    #: The value of default_transaction_read_only, and where it was set.
    read_only: str = "off"
    source: str = "default"


@dataclass(frozen=True, slots=True)
class Used:
    """How many connections there are."""

    used: int
    allowed: int
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Wire:
    """How the server is reached."""

    host: str
    is_encrypted: bool


@dataclass(frozen=True, slots=True)
class Pooled:
    """Whether there is a pooler between, and what the URL asks for."""

    is_direct: bool
    takeover: str = "lease"


def _reach(session: Postgres) -> tuple[float, str | None]:
    return session.reach()


@GROUP.check(
    "reachable",
    Severity.ERROR,
    title="The server answers",
    why="A store that can't be reached refuses every guarded request with 503.",
    mend="psql URL   # correct host, port, user or password until this connects",
    look=_reach,
    after=(),
)
def reachable(seen: tuple[float, str | None], _limits: Limits) -> Judgement:
    """Judge whether an answer came."""
    took, trouble = seen
    return wrong(trouble) if trouble else ok(f"It answered in {took * 1000:.0f} ms.")


def version(session: Postgres) -> str:
    """Return what the server says it is."""
    return str(session.value("SELECT version()"))


@GROUP.check(
    "genuine",
    Severity.ERROR,
    title="It is PostgreSQL, and no server that only speaks its protocol",
    why="Look-alikes differ where it matters: advisory locks that lock nothing, other isolation, no LISTEN. Two "
    "workers "
    "could run one operation.",
    mend="Give Semel a PostgreSQL of its own: store=postgresql://…",
    look=version,
    after=("postgres-reachable",),
    page="explanation/choosing-a-store.md",
)
def genuine(seen: str, _limits: Limits) -> Judgement:
    """Judge what version() said."""
    for mark, name in LOOK_ALIKES.items():
        if mark.lower() in seen.lower():
            return wrong(f"It is {name}: {_short(seen)}")
    if not seen.startswith(("PostgreSQL", "EnterpriseDB")):
        return cannot_tell(f"version() is {_short(seen)}")
    return ok(_short(seen))


def _version_number(session: Postgres) -> int:
    return int(session.value("SHOW server_version_num"))


@GROUP.check(
    "version",
    Severity.WARNING,
    title="The server's version still gets corrections",
    why="Semel is tested on PostgreSQL 15 and 18. A version past its end gets no corrections of bugs that lose data.",
    mend="Upgrade the server with pg_upgrade.",
    look=_version_number,
)
def supported(seen: int, _limits: Limits) -> Judgement:
    """Judge the version."""
    said = f"server_version_num = {seen}"
    return ok(said) if seen >= OLDEST else wrong(f"{said}; the oldest that gets corrections is {OLDEST // 10000}.")


def _standing(session: Postgres) -> Standing:
    rows = session.rows(
        "SELECT pg_is_in_recovery(), reset_val, source FROM pg_settings WHERE name = 'default_transaction_read_only'"
    )
    return Standing(*rows[0])


@GROUP.check(
    "writable",
    Severity.ERROR,
    title="The server takes writes",
    why="A replica can't claim a key, so every guarded request is refused with 503.",
    mend="Give the address of the primary, or add target_session_attrs=read-write and all hosts to the store's "
    "address.",
    look=_standing,
)
def writable(seen: Standing, _limits: Limits) -> Judgement:
    """Judge whether it may be written."""
    if seen.is_replica:
        return wrong("pg_is_in_recovery() is true: it is a replica.")
    if seen.read_only == "on":
        where = {"user": "ROLE", "database": "DATABASE"}.get(seen.source, "SYSTEM")
        command = "ALTER SYSTEM RESET default_transaction_read_only; SELECT pg_reload_conf();"
        if where != "SYSTEM":
            command = f"ALTER {where} {where}_NAME SET default_transaction_read_only = off;"
        return wrong(f"default_transaction_read_only = on, set by: {seen.source}.", command)
    return ok("It is a primary, and default_transaction_read_only = off.")


def _used(session: Postgres) -> Used:
    rows = session.rows(
        "SELECT (SELECT sum(numbackends)::int FROM pg_stat_database), current_setting('max_connections')::int,"
        " (SELECT sum(setting::int)::int FROM pg_settings"
        "   WHERE name IN ('superuser_reserved_connections', 'reserved_connections'))"
    )
    return Used(*rows[0])


@GROUP.check(
    "connections",
    Severity.WARNING,
    title="There is room for more connections",
    why="A process of Semel's takes up to eight connections, and atomic mode one for each request that runs. Where "
    "none "
    "is left, requests are refused with 503.",
    mend="ALTER SYSTEM SET max_connections = 200;   # then restart; or put PgBouncer in between",
    look=_used,
    page="how-to/production.md#connections",
)
def connections(seen: Used, limits: Limits) -> Judgement:
    """Judge how many are used."""
    free = seen.allowed - seen.reserved
    said = f"{seen.used} of {free} connections are in use (max_connections = {seen.allowed}, {seen.reserved} reserved)."
    return wrong(said) if seen.used >= limits.connections * free else ok(said)


def _wire(session: Postgres) -> Wire:
    connection = session.connection
    return Wire(connection.info.host, connection.pgconn.ssl_in_use)


@GROUP.check(
    "tls",
    Severity.WARNING,
    title="A server on another machine is reached through TLS",
    why="Stored answers and the password pass every machine in between, to be read and changed.",
    mend="Add ?sslmode=verify-full&sslrootcert=system to the store's address.",
    look=_wire,
)
def encrypted(seen: Wire, _limits: Limits) -> Judgement:
    """Judge whether others can read along."""
    if seen.is_encrypted:
        return ok(f"The connection to {seen.host} is encrypted.")
    if is_local(seen.host):
        return ok(f"{seen.host or 'a local socket'} is this machine.")
    return wrong(f"The connection to {seen.host} is not encrypted.")


def _skew(session: Postgres) -> Skew:
    begun, mark = time.time(), time.monotonic()
    server = float(session.value("SELECT date_part('epoch', clock_timestamp())"))
    took = time.monotonic() - mark
    return Skew(server - (begun + took / 2), took)


@GROUP.check(
    "clock",
    Severity.WARNING,
    title="The server's clock and this machine's agree",
    why="Leases and retention go by the server's clock alone, so no operation is harmed; but logs of both are hard to "
    "read together, and signatures of webhooks are refused as too old.",
    mend="timedatectl set-ntp true   # on the machine that is wrong",
    look=_skew,
)
def clock(seen: Skew, limits: Limits) -> Judgement:
    """Judge how far they are apart."""
    return judge_skew(seen, limits)


def _pooled(session: Postgres) -> Pooled:
    connection = session.connection
    served = session.value("SELECT pg_backend_pid()")
    return Pooled(served == connection.info.backend_pid, session.address.takeover)


@GROUP.check(
    "pooler",
    Severity.WARNING,
    title="Nothing is asked for that a pooler takes away",
    why="A pooler lends a session for one transaction. ?takeover=instant needs a lock that outlives one, so keys of a "
    "dead process are taken over only when their leases end.",
    mend="Leave ?takeover=instant out, or give the server's own port instead of the pooler's.",
    look=_pooled,
    page="how-to/pgbouncer.md",
)
def pooler(seen: Pooled, _limits: Limits) -> Judgement:
    """Judge what the URL asks for."""
    if seen.is_direct:
        return ok("The connection is to the server itself.")
    if seen.takeover == "instant":
        return wrong("There is a pooler between, and the URL has takeover=instant.")
    return ok(
        "There is a pooler between. Hints (LISTEN) do not come through: what waits is asked about every second instead."
    )


def _encoding(session: Postgres) -> str:
    return str(session.value("SHOW server_encoding"))


@GROUP.check(
    "encoding",
    Severity.ERROR,
    title="The database's encoding is UTF-8",
    why="The result of an effect may have any character. One that can't be written is an outcome that can't be "
    "recorded, so Semel refuses such a database: nothing is guarded, and nothing runs.",
    mend="CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0;   # and move the tables",
    look=_encoding,
)
def encoding(seen: str, _limits: Limits) -> Judgement:
    """Judge the encoding."""
    said = f"server_encoding = {seen}"
    return ok(said) if seen in {"UTF8", "UTF-8"} else wrong(said)


def _short(text: str) -> str:
    return text.partition(", compiled by")[0] if "Redshift" not in text else text[:120]

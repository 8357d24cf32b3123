"""What keeps PostgreSQL from cleaning up behind Semel, and how much is left lying. It cleans nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from semel.doctor.model import MEBIBYTE, Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong
from semel.doctor.postgres.durability import Settings, settings
from semel.doctor.postgres.tables import Tables, tables

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

_SERVED = ("postgres-reachable", "postgres-genuine")
GROUP = Group(Kind.POSTGRES, "PostgreSQL: upkeep", "how-to/postgresql.md", _SERVED)

_OFF = frozenset({"off", "false", "0", "no"})


@dataclass(frozen=True, slots=True)
class Vacuuming:
    """Whether the server cleans up by itself."""

    settings: Settings
    tables: Tables


def _vacuuming(session: Postgres) -> Vacuuming:
    return Vacuuming(settings(session), tables(session))


@GROUP.check(
    "autovacuum",
    Severity.ERROR,
    title="Autovacuum is on",
    why="Every operation leaves a dead row behind. Without vacuum tables grow without an end, and the server stops "
    "taking "
    "writes when its transaction numbers run out.",
    mend="ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf();",
    look=_vacuuming,
)
def autovacuum(seen: Vacuuming, _limits: Limits) -> Judgement:
    """Judge the server's settings, and each table's own."""
    bad = [f"{name} = {seen.settings[name]}" for name in ("autovacuum", "track_counts") if _is_off(seen.settings, name)]
    if bad:
        return wrong("; ".join(bad) + ".")
    stopped = [each.name for each in seen.tables.there if any(_stops(option) for option in each.options)]
    if stopped:
        commands = " ".join(f"ALTER TABLE {name} RESET (autovacuum_enabled);" for name in stopped)
        return wrong(f"It is off for {', '.join(stopped)}.", commands)
    return ok("autovacuum and track_counts are on.")


def _is_off(seen: Settings, name: str) -> bool:
    return name in seen and seen[name].value in _OFF


def _stops(option: str) -> bool:
    name, _, value = option.partition("=")
    return name == "autovacuum_enabled" and value in _OFF


@dataclass(frozen=True, slots=True)
class Dead:
    """Dead rows of a table, and those at which autovacuum begins."""

    table: str
    dead: int
    begins_at: float
    vacuumed: str = "never"


def _dead(session: Postgres) -> list[Dead]:
    rows = session.rows(
        "SELECT stat.relname, n_dead_tup,"
        "       current_setting('autovacuum_vacuum_threshold')::float8"
        "       + current_setting('autovacuum_vacuum_scale_factor')::float8 * greatest(reltuples, 0),"
        "       coalesce(to_char(greatest(last_vacuum, last_autovacuum), 'YYYY-MM-DD HH24:MI'), 'never')"
        "  FROM pg_stat_all_tables AS stat JOIN pg_class ON pg_class.oid = relid"
        " WHERE stat.relname = ANY (%(names)s)"
        "   AND CASE WHEN %(schema)s::text IS NULL THEN pg_table_is_visible(relid) ELSE schemaname = %(schema)s END",
        {"names": sorted(session.names.tables), "schema": session.names.schema},
    )
    return [Dead(*row) for row in rows]


@GROUP.check(
    "dead-rows",
    Severity.WARNING,
    title="Vacuum keeps up with Semel's tables",
    why="Dead rows are read and skipped. Far more of them than vacuum should leave means that it is held back, or too "
    "slow.",
    mend="VACUUM (ANALYZE) semel_keys;   # then find out what holds it back: postgres-oldest-transaction",
    look=_dead,
    after=("postgres-tables",),
)
def dead_rows(seen: list[Dead], limits: Limits) -> Judgement:
    """Judge how many dead rows there are."""
    bad = [each for each in seen if each.dead > max(limits.dead_rows, limits.dead_rows_factor * each.begins_at)]
    if bad:
        said = "; ".join(f"{each.table} has {each.dead} dead rows, vacuumed {each.vacuumed}" for each in bad)
        return wrong(f"{said}.", " ".join(f"VACUUM (ANALYZE) {each.table};" for each in bad))
    most = max(seen, key=lambda each: each.dead, default=None)
    return ok(f"At most {most.dead} dead rows, in {most.table}." if most else "No table.")


@dataclass(frozen=True, slots=True)
class Size:
    """How large a table is, and what its rows would need."""

    table: str
    bytes: int
    #: None: it was never analysed.
    needed: float | None


def _sizes(session: Postgres) -> list[Size]:
    # 28 bytes: a row's header, and its pointer. pg_stats shows what this role may read; what is stored out of line
    # (TOAST) is in neither figure.
    rows = session.rows(
        "SELECT relname, pg_relation_size(it.oid),"
        "       CASE WHEN reltuples > 0 AND width IS NOT NULL"
        "            THEN reltuples * (28 + width)"
        "                 / (coalesce((SELECT substr(option, 12)::float8 FROM unnest(reloptions) AS option"
        "                               WHERE option LIKE 'fillfactor=%%'), 100) / 100)"
        "            WHEN reltuples = 0 THEN 0 END"
        "  FROM pg_class AS it JOIN pg_namespace AS space ON space.oid = relnamespace"
        "  LEFT JOIN LATERAL (SELECT sum((1 - null_frac) * least(avg_width, 2000)) AS width FROM pg_stats"
        "                      WHERE tablename = relname AND schemaname = nspname) AS stats ON true"
        " WHERE relname = ANY (%(names)s) AND relkind = 'r'"
        "   AND CASE WHEN %(schema)s::text IS NULL THEN pg_table_is_visible(it.oid) ELSE nspname = %(schema)s END",
        {"names": sorted(session.names.tables), "schema": session.names.schema},
    )
    return [Size(*row) for row in rows]


@GROUP.check(
    "bloat",
    Severity.WARNING,
    title="Semel's tables are about as large as their rows need",
    why="Room that is left of old rows is read by every walk along the table, and kept in memory.",
    mend="VACUUM FULL semel_keys;   # it locks the table while it runs; pg_repack does not",
    look=_sizes,
    after=("postgres-tables",),
)
def bloat(seen: list[Size], limits: Limits) -> Judgement:
    """Judge the sizes, by an estimate."""
    large = [each for each in seen if each.bytes > limits.bloat_bytes]
    bad = [each for each in large if each.needed is not None and each.bytes > limits.bloat_factor * each.needed]
    if bad:
        said = "; ".join(
            f"{each.table} has {_size(each.bytes)}, and its rows need about {_size(each.needed or 0)}" for each in bad
        )
        return wrong(f"{said}.")
    unknown = [each.table for each in large if each.needed is None]
    if unknown:
        return cannot_tell(f"{', '.join(unknown)}: no statistics that this role may read. Run: ANALYZE {unknown[0]}")
    largest = max(seen, key=lambda each: each.bytes, default=None)
    return ok(f"The largest is {largest.table}, {_size(largest.bytes)}." if largest else "No table.")


def _size(size: float) -> str:
    return f"{size / MEBIBYTE:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Open:
    """A transaction that is open, and for how long."""

    who: str
    age: timedelta
    state: str = ""


@dataclass(frozen=True, slots=True)
class Transactions:
    """The oldest transactions, and how many sessions this role may not look into."""

    oldest: tuple[Open, ...]
    hidden: int = 0


def _transactions(session: Postgres) -> Transactions:
    rows = session.rows(
        "SELECT coalesce(nullif(application_name, ''), backend_type) || ' (pid ' || pid || ', ' || "
        "coalesce(usename, '?')"
        "       || ')', clock_timestamp() - xact_start, coalesce(state, '')"
        "  FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()"
        "   AND backend_type = 'client backend' ORDER BY xact_start LIMIT 3"
    )
    # To a role without pg_read_all_stats, a session of another has a user, and nothing else.
    hidden = session.value(
        "SELECT count(*)::int FROM pg_stat_activity WHERE usesysid IS NOT NULL AND backend_type IS NULL"
    )
    return Transactions(tuple(Open(*row) for row in rows), hidden)


@GROUP.check(
    "oldest-transaction",
    Severity.WARNING,
    title="No transaction is open for long",
    why="Vacuum removes no row that the oldest open transaction could see. One that was forgotten makes every "
    "table grow.",
    mend="SELECT pg_terminate_backend(PID);   # and set idle_in_transaction_session_timeout for its role",
    look=_transactions,
)
def oldest_transaction(seen: Transactions, limits: Limits) -> Judgement:
    """Judge how long the oldest is open."""
    old = [each for each in seen.oldest if each.age > limits.oldest_transaction]
    if old:
        return wrong("; ".join(f"{each.who} has one open for {_age(each.age)}, {each.state}" for each in old) + ".")
    if seen.hidden:
        return cannot_tell(f"{seen.hidden} sessions are hidden from this role: GRANT pg_read_all_stats TO it.")
    return ok(f"The oldest is {_age(seen.oldest[0].age)} old." if seen.oldest else "None is open.")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transaction that waits for its second phase."""

    gid: str
    age: timedelta
    database: str = ""


def _prepared(session: Postgres) -> list[Prepared]:
    rows = session.rows(
        "SELECT gid, clock_timestamp() - prepared, database FROM pg_prepared_xacts ORDER BY prepared LIMIT 3"
    )
    return [Prepared(*row) for row in rows]


@GROUP.check(
    "prepared-transactions",
    Severity.WARNING,
    title="No prepared transaction is forgotten",
    why="A prepared transaction holds its locks, and keeps vacuum back, even over a restart, until it is ended by "
    "name.",
    mend="ROLLBACK PREPARED '…';   # or COMMIT PREPARED, if the other databases have committed",
    look=_prepared,
)
def prepared_transactions(seen: list[Prepared], limits: Limits) -> Judgement:
    """Judge how long they wait."""
    old = [each for each in seen if each.age > limits.prepared_transaction]
    if old:
        said = "; ".join(f"{each.gid!r} in {each.database}, for {_age(each.age)}" for each in old)
        return wrong(f"Prepared and not ended: {said}.")
    return ok(f"{len(seen)} are prepared." if seen else "None is prepared.")


@dataclass(frozen=True, slots=True)
class Slot:
    """A replication slot without a reader, and what it keeps."""

    name: str
    bytes: int | None
    holds_rows: bool = False


def _slots(session: Postgres) -> list[Slot]:
    rows = session.rows(
        "SELECT slot_name, CASE WHEN pg_is_in_recovery() THEN NULL"
        "       ELSE pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint END,"
        "       coalesce(xmin, catalog_xmin) IS NOT NULL FROM pg_replication_slots WHERE NOT active"
    )
    return [Slot(*row) for row in rows]


@GROUP.check(
    "replication-slots",
    Severity.WARNING,
    title="No replication slot without a reader holds the server back",
    why="A slot keeps all WAL, and all rows, that its reader has not seen. Without a reader the disk fills up.",
    mend="SELECT pg_drop_replication_slot('…');   # if its reader does not come back",
    look=_slots,
)
def replication_slots(seen: list[Slot], limits: Limits) -> Judgement:
    """Judge what slots without a reader keep."""
    bad = [each for each in seen if each.holds_rows or (each.bytes or 0) > limits.slot_bytes]
    if not bad:
        return ok(f"{len(seen)} slots are without a reader, and keep little." if seen else "None is without a reader.")
    said = "; ".join(
        f"{each.name} keeps {_size(each.bytes or 0)} of WAL" + (" and holds vacuum back" if each.holds_rows else "")
        for each in bad
    )
    return wrong(f"{said}.", " ".join(f"SELECT pg_drop_replication_slot('{each.name}');" for each in bad))


def _frozen(session: Postgres) -> int:
    return int(session.value("SELECT age(datfrozenxid) FROM pg_database WHERE datname = current_database()"))


@GROUP.check(
    "wraparound",
    Severity.ERROR,
    title="Transaction numbers do not run out",
    why="At two thousand million the server takes no more writes, and every guarded request is refused with 503.",
    mend="VACUUM (FREEZE);   # after ending old transactions, prepared ones and slots",
    look=_frozen,
)
def wraparound(seen: int, limits: Limits) -> Judgement:
    """Judge the age of the oldest transaction number."""
    said = f"age(datfrozenxid) = {seen:,} of 2,000,000,000."
    return wrong(said) if seen > limits.wraparound else ok(said)


def _age(age: timedelta) -> str:
    return str(timedelta(seconds=round(age.total_seconds())))

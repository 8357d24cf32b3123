"""Whether a COMMIT that was answered survives a crash. It reads settings, and no table of Semel's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, cannot_tell, ok, wrong

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

GROUP = Group(
    Kind.POSTGRES, "PostgreSQL: durability", "how-to/postgresql.md", ("postgres-reachable", "postgres-genuine")
)

_NAMES = (
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "synchronous_standby_names",
    "default_transaction_isolation",
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "transaction_timeout",
    "autovacuum",
    "track_counts",
    "autovacuum_vacuum_threshold",
    "autovacuum_vacuum_scale_factor",
    "max_prepared_transactions",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a new session of this role has, and where that was set."""

    value: str
    source: str = "default"

    def __str__(self) -> str:
        """Show both."""
        return f"{self.value or chr(39) * 2}, set by: {self.source}"


Settings = Mapping[str, Setting]


def settings(session: Postgres) -> Settings:
    """Read settings as a new session would have them, not as this one has set them for itself."""
    return {name: Setting(value or "", source) for name, value, source in session.settings(_NAMES)}


@GROUP.check(
    "fsync",
    Severity.ERROR,
    title="Commits reach the disk",
    why="After a crash of the machine the database may be damaged beyond repair, and with it every record.",
    mend="ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();",
    look=settings,
)
def fsync(seen: Settings, _limits: Limits) -> Judgement:
    """Judge fsync."""
    return _must_be_on("fsync", seen)


@GROUP.check(
    "full-page-writes",
    Severity.ERROR,
    title="Pages are whole after a crash",
    why="A page that was half written when the power failed is damaged, and is not repaired.",
    mend="ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf();",
    look=settings,
)
def full_page_writes(seen: Settings, _limits: Limits) -> Judgement:
    """Judge full_page_writes."""
    return _must_be_on("full_page_writes", seen)


@dataclass(frozen=True, slots=True)
class Commits:
    """What synchronous_commit is for new sessions of this role, and where else it is off."""

    mine: Setting
    #: Where else it is off: for which role, or for all of them, in which database, or in all of them.
    others: tuple[tuple[str | None, str | None], ...] = ()


def _commits(session: Postgres) -> Commits:
    rows = session.rows(
        "SELECT role.rolname, base.datname"
        "  FROM pg_db_role_setting AS said"
        "  LEFT JOIN pg_roles AS role ON role.oid = said.setrole"
        "  LEFT JOIN pg_database AS base ON base.oid = said.setdatabase"
        " WHERE 'synchronous_commit=off' = ANY (said.setconfig)"
        "   AND said.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))"
        " ORDER BY 1, 2"
    )
    return Commits(settings(session)["synchronous_commit"], tuple((role, database) for role, database in rows))


@GROUP.check(
    "synchronous-commit",
    Severity.ERROR,
    title="A COMMIT is answered when it is on the disk",
    why="Semel's own sessions turn it on. A handler's transaction in atomic mode or a phase has what its role has: "
    "after "
    "a crash of the server, an operation that was answered may never have happened.",
    mend="ALTER ROLE ROLE_NAME SET synchronous_commit = on;",
    look=_commits,
    page="how-to/atomic.md",
)
def synchronous_commit(seen: Commits, _limits: Limits) -> Judgement:
    """Judge synchronous_commit, of this role and of others in this database."""
    if seen.mine.value == "off":
        return wrong(f"synchronous_commit = {seen.mine}.")
    if seen.others:
        said = "; ".join(f"{role or 'all roles'} in {database or 'all databases'}" for role, database in seen.others)
        return wrong(
            f"synchronous_commit = {seen.mine.value} here, and off for {said}.",
            " ".join(_resetting(role, database) for role, database in seen.others),
        )
    return ok(f"synchronous_commit = {seen.mine}.")


def _resetting(role: str | None, database: str | None) -> str:
    if role is None:
        return f'ALTER DATABASE "{database}" RESET synchronous_commit;'
    where = f' IN DATABASE "{database}"' if database else ""
    return f'ALTER ROLE "{role}"{where} RESET synchronous_commit;'


@dataclass(frozen=True, slots=True)
class Standbys:
    """Which standbys a COMMIT waits for, and which are there."""

    names: str
    #: For each standby: its name and its sync_state; None where this role may not see it.
    there: tuple[tuple[str | None, str | None], ...] = ()


def _standbys(session: Postgres) -> Standbys:
    rows = session.rows("SELECT application_name, sync_state FROM pg_stat_replication")
    return Standbys(settings(session)["synchronous_standby_names"].value, tuple((name, state) for name, state in rows))


@GROUP.check(
    "synchronous-standbys",
    Severity.ERROR,
    title="The standbys that a COMMIT waits for are there",
    why="Where too few are connected, every COMMIT waits without an end, and every guarded request with it.",
    mend="Start the standby that is missing, or: ALTER SYSTEM SET synchronous_standby_names = ''; SELECT "
    "pg_reload_conf();",
    look=_standbys,
)
def synchronous_standbys(seen: Standbys, _limits: Limits) -> Judgement:
    """Judge whether there are as many as are waited for."""
    if not seen.names:
        return ok(f"synchronous_standby_names is empty; {len(seen.there)} standbys are connected.")
    needed = _needed(seen.names)
    if seen.there and all(state is None for _, state in seen.there):
        return cannot_tell(
            f"synchronous_standby_names = {seen.names!r}, and this role may not see the standbys: "
            "GRANT pg_read_all_stats TO it."
        )
    synchronous = [name for name, state in seen.there if state in {"sync", "quorum"}]
    said = f"synchronous_standby_names = {seen.names!r}; synchronous now: {', '.join(map(str, synchronous)) or 'none'}."
    return ok(said) if len(synchronous) >= needed else wrong(said)


def _needed(names: str) -> int:
    """How many a COMMIT waits for: ``2 (a, b, c)``, ``ANY 2 (…)``, or the first of a list."""
    head = names.partition("(")[0].split() if "(" in names else []
    return int(head[-1]) if head and head[-1].isdigit() else 1


def _must_be_on(name: str, seen: Settings) -> Judgement:
    said = f"{name} = {seen[name]}."
    return ok(said) if seen[name].value == "on" else wrong(said)

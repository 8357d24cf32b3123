"""Semel's tables in a PostgreSQL database: whether they are there, of the right version, logged, and this role's to
use. How statements use them is checked in ``plans.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from semel.doctor.migrations import Applied, judge_newer, judge_older, known_migrations
from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, ok, wrong
from semel.doctor.session import Unavailable
from semel.stores.postgres.statements import PACKAGE
from semel.stores.statement import DEFAULT_TABLE, Names

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

_SERVED = ("postgres-reachable", "postgres-genuine")
GROUP = Group(Kind.POSTGRES, "PostgreSQL: tables", "how-to/postgresql.md", ("postgres-tables",))

_MIGRATE = "semel migrate URL"
_INDEX = re.compile(r"^CREATE INDEX (\w+) ON", re.MULTILINE)
_TABLE = re.compile(r"^CREATE TABLE (\w+) \((.*?)^\)", re.MULTILINE | re.DOTALL)
_COLUMN = re.compile(r"^ {4}([a-z_]+) ", re.MULTILINE)
_PRIMARY = re.compile(r"^CREATE TABLE (\w+) \((?:(?!\n\)).)*?PRIMARY KEY", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Table:
    """A relation, as the catalogue has it."""

    name: str
    kind: str = "r"
    persistence: str = "p"
    has_row_security: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tables:
    """What was found under the names of Semel's tables."""

    wanted: tuple[str, ...]
    there: tuple[Table, ...]
    #: Every schema that has the table of the keys, the searched one first; and the one in the URL.
    schemas: tuple[str, ...] = ()
    asked: str | None = None

    @property
    def missing(self) -> list[str]:
        """Tables that are not there."""
        names = {each.name for each in self.there}
        return [name for name in self.wanted if name not in names]


def tables(session: Postgres) -> Tables:
    """Find Semel's tables as a statement would: in the schema of the URL, or along the search path."""
    names = session.names
    rows = session.rows(
        "SELECT relname, relkind::text, relpersistence::text, relrowsecurity, coalesce(reloptions, '{}')"
        "  FROM pg_class AS it JOIN pg_namespace AS space ON space.oid = relnamespace"
        " WHERE relname = ANY (%(names)s) AND relkind IN ('r', 'p', 'v', 'm', 'f')"
        "   AND CASE WHEN %(schema)s::text IS NULL THEN pg_table_is_visible(it.oid) ELSE nspname = %(schema)s END",
        {"names": sorted(names.tables), "schema": names.schema},
    )
    spaces = session.rows(
        "SELECT nspname FROM pg_class AS it JOIN pg_namespace AS space ON space.oid = relnamespace"
        " WHERE relname = %(name)s AND relkind IN ('r', 'p') ORDER BY pg_table_is_visible(it.oid) DESC, nspname",
        {"name": names.table},
    )
    found = tuple(Table(name, kind, how, rls, tuple(options)) for name, kind, how, rls, options in rows)
    return Tables(tuple(sorted(names.tables)), found, tuple(space for (space,) in spaces), names.schema)


@GROUP.check(
    "tables",
    Severity.ERROR,
    title="Every table of Semel's is there",
    why="Without its tables a store refuses every guarded request with 503.",
    mend=_MIGRATE,
    look=tables,
    after=_SERVED,
)
def all_there(seen: Tables, _limits: Limits) -> Judgement:
    """Judge whether all are there."""
    strange = [f"{each.name} is no table" for each in seen.there if each.kind not in {"r", "p"}]
    if not seen.missing and not strange:
        return ok(f"{len(seen.there)} tables, in schema {seen.schemas[0] if seen.schemas else '?'}.")
    said = [f"missing: {', '.join(seen.missing)}"] if seen.missing else []
    if seen.missing and seen.schemas:
        said.append(f"the table of the keys is in {', '.join(seen.schemas)}")
    return wrong("; ".join([*said, *strange]) + ".")


@GROUP.check(
    "one-table",
    Severity.WARNING,
    title="There is one table of keys",
    why="Processes with different search paths then keep their keys apart: a retry that reaches the other one runs "
    "again.",
    mend="Add ?schema=… to the address of every store, and drop the table that is not used.",
    look=tables,
)
def one_table(seen: Tables, _limits: Limits) -> Judgement:
    """Judge whether the search path decides which table is used."""
    said = f"The table of the keys is in schema {', '.join(seen.schemas)}."
    return wrong(said) if len(seen.schemas) > 1 and seen.asked is None else ok(said)


@GROUP.check(
    "logged",
    Severity.ERROR,
    title="No table of Semel's is UNLOGGED",
    why="An unlogged table is empty after a crash of the server: every operation that was done would run again.",
    mend="ALTER TABLE … SET LOGGED;",
    look=tables,
)
def logged(seen: Tables, _limits: Limits) -> Judgement:
    """Judge whether a crash leaves them as they are."""
    bad = [each.name for each in seen.there if each.persistence != "p"]
    if bad:
        return wrong(f"Not logged: {', '.join(bad)}.", " ".join(f"ALTER TABLE {each} SET LOGGED;" for each in bad))
    return ok(f"{len(seen.there)} tables are logged.")


@GROUP.check(
    "row-security",
    Severity.ERROR,
    title="No row of Semel's is hidden by row security",
    why="A record that a session may not see looks like a free key, or like an error: an operation may run twice.",
    mend="ALTER TABLE … DISABLE ROW LEVEL SECURITY;",
    look=tables,
)
def row_security(seen: Tables, _limits: Limits) -> Judgement:
    """Judge whether policies may hide rows."""
    bad = [each.name for each in seen.there if each.has_row_security]
    if bad:
        commands = " ".join(f"ALTER TABLE {each} DISABLE ROW LEVEL SECURITY;" for each in bad)
        return wrong(f"Row security is on for {', '.join(bad)}.", commands)
    return ok("Row security is off.")


def _applied(session: Postgres) -> Applied:
    book = session.names.put_into(DEFAULT_TABLE) + "_migrations"
    rows = session.rows(f"SELECT name FROM {book} ORDER BY name")  # noqa: S608 - see Names
    return Applied(tuple(name for (name,) in rows), known_migrations(PACKAGE, session.names))


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that should be there and are not. Any role may see them."""

    missing: tuple[str, ...]
    #: Why the migrations themselves could not be read.
    reason: str = ""


def _version(session: Postgres) -> Applied | Columns:
    try:
        return _applied(session)
    except Unavailable as reason:
        return Columns(_missing_columns(session), str(reason))


def _missing_columns(session: Postgres) -> tuple[str, ...]:
    names = session.names
    rows = session.rows(
        "SELECT relname || '.' || attname FROM pg_attribute JOIN pg_class AS it ON it.oid = attrelid"
        "  JOIN pg_namespace AS space ON space.oid = relnamespace"
        " WHERE relname = ANY (%(names)s) AND relkind IN ('r', 'p') AND attnum > 0 AND NOT attisdropped"
        "   AND CASE WHEN %(schema)s::text IS NULL THEN pg_table_is_visible(it.oid) ELSE nspname = %(schema)s END",
        {"names": sorted(names.tables), "schema": names.schema},
    )
    there = {name for (name,) in rows}
    return tuple(name for name in wanted_columns(names) if name not in there)


@cache
def wanted_columns(names: Names) -> tuple[str, ...]:
    """Return the columns in ``schema.sql``, each behind its table's name."""
    tables = _TABLE.findall(Names(names.table).put_into((files(PACKAGE) / "schema.sql").read_text("utf-8")))
    return tuple(f"{table}.{column}" for table, inside in tables for column in _COLUMN.findall(inside))


@GROUP.check(
    "schema",
    Severity.ERROR,
    title="The tables are as this version of Semel needs them",
    why="Statements name columns that an older schema lacks, and fail: every guarded request is refused with 503.",
    mend=_MIGRATE,
    look=_version,
    page="how-to/upgrade.md",
)
def schema(seen: Applied | Columns, _limits: Limits) -> Judgement:
    """Judge whether a migration is missing; or, where this role may not read which there are, whether a column is."""
    if isinstance(seen, Applied):
        return judge_older(seen)
    if seen.missing:
        return wrong(f"Columns are missing: {', '.join(seen.missing)}.")
    return ok(f"Every column is there. {seen.reason}")


@GROUP.check(
    "schema-newer",
    Severity.WARNING,
    title="No newer version of Semel has changed the tables",
    why="A newer version has been here, and may rely on what this one does not write.",
    mend="pip install --upgrade semel",
    look=_applied,
    page="how-to/upgrade.md",
)
def schema_newer(seen: Applied, _limits: Limits) -> Judgement:
    """Judge whether there is a migration that is not known."""
    return judge_newer(seen)


@dataclass(frozen=True, slots=True)
class Indexes:
    """The indexes that should be there, and whether each that is there is valid."""

    wanted: tuple[str, ...]
    there: dict[str, bool]


@cache
def wanted_indexes(names: Names) -> tuple[str, ...]:
    """Return the names of the indexes in ``schema.sql``, those of primary keys among them."""
    text = (files(PACKAGE) / "schema.sql").read_text("utf-8")
    plain = Names(names.table).put_into(text)
    return (*_INDEX.findall(plain), *(f"{table}_pkey" for table in _PRIMARY.findall(plain)))


def _indexes(session: Postgres) -> Indexes:
    names = session.names
    rows = session.rows(
        "SELECT it.relname, indisvalid AND indisready FROM pg_index JOIN pg_class AS it ON it.oid = indexrelid"
        "  JOIN pg_class AS owner ON owner.oid = indrelid JOIN pg_namespace AS space ON space.oid = owner.relnamespace"
        " WHERE owner.relname = ANY (%(names)s)"
        "   AND CASE WHEN %(schema)s::text IS NULL THEN pg_table_is_visible(owner.oid) ELSE nspname = %(schema)s END",
        {"names": sorted(names.tables), "schema": names.schema},
    )
    return Indexes(wanted_indexes(names), dict(rows))


@GROUP.check(
    "indexes",
    Severity.ERROR,
    title="Every index is there and valid",
    why="The primary key lets one worker win a key. Without the others, services read whole tables, and get slower "
    "with "
    "every request.",
    mend="REINDEX INDEX CONCURRENTLY …;   # an invalid one; of a missing one, the statement is in the schema",
    look=_indexes,
    page="reference/stores.md",
)
def indexes(seen: Indexes, _limits: Limits) -> Judgement:
    """Judge whether one is missing or invalid."""
    missing = [name for name in seen.wanted if name not in seen.there]
    invalid = [name for name in seen.wanted if seen.there.get(name) is False]
    if not missing and not invalid:
        return ok(f"{len(seen.wanted)} indexes are there and valid.")
    said = [f"missing: {', '.join(missing)}"] if missing else []
    said += [f"invalid: {', '.join(invalid)}"] if invalid else []
    command = "; ".join(f"REINDEX INDEX CONCURRENTLY {name}" for name in invalid) if not missing else None
    return wrong("; ".join(said) + ".", command)


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a role lacks, by table."""

    role: str
    privileges: tuple[tuple[str, str], ...] = ()


#: By table: what requests need (large answers have a table in one layout only); what the outbox, the inbox and the
#: sweeper need beside; and what workers alone need.
_TO_SERVE = (
    ("semel_keys", "SELECT INSERT UPDATE DELETE"),
    ("semel_audit", "INSERT"),
    ("semel_answers", "SELECT INSERT"),
)
_BESIDE = (
    ("semel_keys_watermark", "SELECT INSERT UPDATE"),
    ("semel_audit", "SELECT"),
    ("semel_outbox", "SELECT INSERT"),
    ("semel_inbox", "SELECT INSERT UPDATE"),
    ("semel_webhooks", "SELECT"),
)
_TO_WORK = (("semel_audit", "UPDATE DELETE"), ("semel_outbox", "UPDATE DELETE"), ("semel_inbox", "DELETE"))


def _lacking(session: Postgres, wanted: Sequence[tuple[str, str]]) -> Lacking:
    names = session.names
    pairs = [(names.put_into(table), privilege) for table, several in wanted for privilege in several.split()]
    rows = session.rows(
        "SELECT current_user, wanted.name, wanted.privilege"
        "  FROM unnest(%(tables)s::text[], %(privileges)s::text[]) WITH ORDINALITY AS wanted (name, privilege, place)"
        " WHERE NOT CASE WHEN wanted.privilege = 'DELETE'"
        "                THEN has_table_privilege(to_regclass(wanted.name), wanted.privilege)"
        "                ELSE has_any_column_privilege(to_regclass(wanted.name), wanted.privilege) END"
        " ORDER BY place",
        {"tables": [table for table, _ in pairs], "privileges": [privilege for _, privilege in pairs]},
    )
    role = str(session.value("SELECT current_user"))
    return Lacking(role, tuple((table, privilege) for _, table, privilege in rows))


def _to_serve(session: Postgres) -> Lacking:
    return _lacking(session, _TO_SERVE)


def _to_work(session: Postgres) -> tuple[Lacking, Lacking]:
    return _lacking(session, _BESIDE), _lacking(session, _TO_WORK)


@GROUP.check(
    "grants",
    Severity.ERROR,
    title="This role may serve requests",
    why="A role that may claim and not complete would run a handler and lose its answer; so the first claim refuses.",
    mend="GRANT SELECT, INSERT, UPDATE, DELETE ON semel_keys TO ROLE_NAME; GRANT INSERT ON semel_audit TO ROLE_NAME;",
    look=_to_serve,
    page="how-to/postgresql.md#roles",
)
def grants(seen: Lacking, _limits: Limits) -> Judgement:
    """Judge what requests need."""
    return _judge_grants(seen, "serve requests")


@GROUP.check(
    "service-grants",
    Severity.WARNING,
    title="This role may sweep, add messages and receive them",
    why="The outbox, the inbox and the sweeper have tables of their own, which a role that was made long ago may lack.",
    mend="GRANT … ON semel_keys_watermark, semel_audit, semel_outbox, semel_inbox TO ROLE_NAME;",
    look=_to_work,
    page="how-to/postgresql.md#roles",
)
def service_grants(seen: tuple[Lacking, Lacking], _limits: Limits) -> Judgement:
    """Judge what goes on beside requests. To reap and to relay is for another role, where there are two."""
    beside, working = seen
    if beside.privileges:
        return _judge_grants(beside, "")
    if working.privileges:
        return ok(f"The role {beside.role} may; it may not reap or relay, which takes the role of a worker.")
    return ok(f"The role {beside.role} may, and it may reap and relay.")


def _judge_grants(seen: Lacking, what: str) -> Judgement:
    if not seen.privileges:
        return ok(f"The role {seen.role} may {what}.")
    by_table: dict[str, list[str]] = {}
    for table, privilege in seen.privileges:
        by_table.setdefault(table, []).append(privilege)
    said = "; ".join(f"{', '.join(several)} on {table}" for table, several in by_table.items())
    who = '"' + seen.role.replace('"', '""') + '"'
    command = " ".join(f"GRANT {', '.join(several)} ON {table} TO {who};" for table, several in by_table.items())
    return wrong(f"The role {seen.role} lacks {said}.", command)

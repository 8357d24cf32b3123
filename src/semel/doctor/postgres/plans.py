"""Which way the server would go for a claim, for an answer and for the reaper, by EXPLAIN. Nothing is carried out.

Each statement is planned as a session of Semel's plans it: once for all values, with its settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, ok, wrong
from semel.stores.postgres.address import SESSION
from semel.stores.postgres.builder import queries_of

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

GROUP = Group(Kind.POSTGRES, "PostgreSQL: plans", "reference/stores.md", ("postgres-tables", "postgres-schema"))

#: Not this session's to have: a name, and what would hide the read-only transaction's own limit.
_OTHERS = frozenset({"application_name", "default_transaction_isolation", "statement_timeout", "lock_timeout"})


@dataclass(frozen=True, slots=True)
class Plan:
    """How the server goes about a statement: the indexes, and the tables that are read from end to end."""

    indexes: tuple[str, ...] = ()
    scans: tuple[str, ...] = ()
    #: The indexes that tell whether a row is there already.
    arbiters: tuple[str, ...] = ()
    #: The server can't plan it, and says why.
    error: str | None = None
    #: The index that it should use.
    wanted: str = ""


def plan_of(tree: dict[str, Any], wanted: str = "") -> Plan:
    """Read what EXPLAIN (FORMAT JSON) says."""
    nodes = list(_nodes(tree))
    return Plan(
        tuple(dict.fromkeys(node["Index Name"] for node in nodes if "Index Name" in node)),
        tuple(dict.fromkeys(node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan")),
        tuple(name for node in nodes for name in node.get("Conflict Arbiter Indexes", ())),
        wanted=wanted,
    )


def _nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for each in tree.get("Plans", ()):
        yield from _nodes(each)


def _explained(session: Postgres, name: str, index: str) -> Plan:
    import psycopg  # noqa: PLC0415 - the checks are listed where no driver is installed

    query = queries_of(session.names, session.address.audit)[name]
    wanted = session.names.table + index
    settings = {key: value for key, value in SESSION.items() if key not in _OTHERS}
    try:
        return plan_of(session.explain(query, settings), wanted)
    except psycopg.errors.InvalidColumnReference as error:
        return Plan(error=" ".join(str(error).split()), wanted=wanted)


def _claim(session: Postgres) -> Plan:
    return _explained(session, "claim_one", "_pkey")


def _complete(session: Postgres) -> Plan:
    return _explained(session, "complete_one", "_pkey")


def _reap(session: Postgres) -> Plan:
    return _explained(session, "reap", "_expiry")


@GROUP.check(
    "claim-plan",
    Severity.ERROR,
    title="A claim is decided by the unique index",
    why="The index lets one of several workers win a key. Without it two may win, or each claim reads the whole table.",
    mend="ALTER TABLE semel_keys ADD PRIMARY KEY (scope, key);",
    look=_claim,
)
def claim_plan(seen: Plan, _limits: Limits) -> Judgement:
    """Judge the way of a claim."""
    if not seen.error and seen.wanted not in seen.arbiters:
        return wrong(f"The claim is decided by {', '.join(seen.arbiters) or 'no index'}, and not by {seen.wanted}.")
    return _judge(seen)


@GROUP.check(
    "completion-plan",
    Severity.ERROR,
    title="An answer is stored along the unique index",
    why="Without the index each answer reads the whole table: every request gets slower as the table grows.",
    mend="ALTER TABLE semel_keys ADD PRIMARY KEY (scope, key);",
    look=_complete,
)
def completion_plan(seen: Plan, _limits: Limits) -> Judgement:
    """Judge the way of an answer."""
    return _judge(seen)


@GROUP.check(
    "reap-plan",
    Severity.WARNING,
    title="The reaper walks along its index",
    why="Without the index each look of the reaper reads the whole table.",
    mend="CREATE INDEX CONCURRENTLY semel_keys_expiry ON semel_keys (expires_at) "
    "WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked';",
    look=_reap,
)
def reap_plan(seen: Plan, _limits: Limits) -> Judgement:
    """Judge the way of the reaper."""
    return _judge(seen)


def _judge(seen: Plan) -> Judgement:
    if seen.error:
        return wrong(f"It can't be planned: {seen.error}.")
    if seen.wanted not in seen.indexes:
        instead = f"reads {', '.join(seen.scans)} from end to end" if seen.scans else "goes another way"
        return wrong(f"The plan does not use {seen.wanted}; it {instead}.")
    return ok(f"The plan uses {', '.join(seen.indexes)}.")

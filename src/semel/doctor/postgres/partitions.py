"""The partitioned layout: whether its trigger works, and whether the reaper keeps up with its partitions. In the plain
layout there is nothing to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from semel.doctor.model import Group, Judgement, Kind, Limits, Severity, ok, wrong

if TYPE_CHECKING:
    from semel.doctor.postgres.session import Postgres

GROUP = Group(
    Kind.POSTGRES,
    "PostgreSQL: partitions",
    "explanation/scale.md#the-partitioned-layout",
    ("postgres-tables", "postgres-schema"),
)

#: Of how many answers in the default partition the first are looked at.
MAX_COUNTED = 1000


@dataclass(frozen=True, slots=True)
class Layout:
    """What there is of the partitioned layout."""

    has_table: bool = False
    #: The trigger's state: O and A fire, D and R don't; None: there is none.
    trigger: str | None = None
    #: Days from today to the furthest on which a record expires, of which there is no partition.
    missing: tuple[str, ...] = ()
    #: Days that have been over for a day and have one still.
    left: tuple[str, ...] = ()
    #: How many answers are in the default partition, at most a thousand, and those of which days.
    strays: int = 0
    days: tuple[str, ...] = ()

    @property
    def is_partitioned(self) -> bool:
        """Whether new answers go to partitions."""
        return self.has_table and self.trigger is not None


def layout(session: Postgres) -> Layout:
    """Find the table of large answers, its trigger and its partitions."""
    names = session.names
    [(has_table, trigger)] = session.rows(
        "SELECT to_regclass('semel_answers') IS NOT NULL, (SELECT tgenabled::text FROM pg_trigger"
        " WHERE tgrelid = to_regclass('semel_keys') AND tgname = 'semel_keys_answer')"
    )
    if not has_table:
        return Layout(trigger=trigger)
    [(missing, left)] = session.rows(
        "WITH there AS (SELECT to_date(right(relname, 6), 'YYMMDD') AS day FROM pg_inherits"
        "  JOIN pg_class ON oid = inhrelid WHERE inhparent = to_regclass('semel_answers') AND relname ~ '_[0-9]{6}$'),"
        " clock AS (SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date AS today), last AS ("
        "  SELECT (expires_at AT TIME ZONE 'UTC')::date AS day FROM semel_keys"
        "   WHERE after_retention <> 'keep' AND upkeep IS DISTINCT FROM 'parked' ORDER BY expires_at DESC LIMIT 1)"
        " SELECT ARRAY(SELECT day::date::text FROM generate_series(today::timestamp,"
        "                least(today + 400, greatest(today, (SELECT day FROM last))), interval '1 day') AS day"
        "               WHERE day::date NOT IN (SELECT day FROM there)),"
        "        ARRAY(SELECT day::text FROM there WHERE day < today - 1 ORDER BY day) FROM clock"
    )
    rest = f"{names.schema}.{names.answers}_rest" if names.schema else f"{names.answers}_rest"
    [(strays, days)] = session.rows(
        f"SELECT count(*), array_agg(DISTINCT day::text) FROM (SELECT day FROM {rest} LIMIT {MAX_COUNTED}) AS stray"  # noqa: S608 - see Names
    )
    return Layout(has_table, trigger, tuple(missing), tuple(left), strays, tuple(days or ()))


@GROUP.check(
    "answer-trigger",
    Severity.WARNING,
    title="Large answers go where the layout says",
    why="Without its trigger the partitioned layout is a plain one: answers stay in their rows, and are deleted with "
    "them.",
    mend="semel migrate URL --layout partitioned",
    look=layout,
)
def answer_trigger(seen: Layout, _limits: Limits) -> Judgement:
    """Judge whether the trigger and its table are both there, and it fires."""
    if seen.trigger is None:
        return ok("The layout is plain" + (", and older answers are in partitions." if seen.has_table else "."))
    if not seen.has_table:
        return wrong("The trigger is there, and the table of large answers is not.")
    if seen.trigger not in {"O", "A"}:
        return wrong("The trigger is disabled.", "ALTER TABLE semel_keys ENABLE TRIGGER semel_keys_answer;")
    return ok("The layout is partitioned.")


@GROUP.check(
    "partitions-ahead",
    Severity.WARNING,
    title="Partitions are made ahead, and old ones are dropped",
    why="An answer without a partition of its day goes to the default one, and is deleted row by row. Old partitions "
    "take room.",
    mend="semel reap --store URL   # as the owner of the tables; and run semel work as that role, or as a member of it",
    look=layout,
)
def partitions_ahead(seen: Layout, _limits: Limits) -> Judgement:
    """Judge whether the reaper keeps up. Days that are in the default partition stay there."""
    missing = [day for day in seen.missing if day not in seen.days] if seen.is_partitioned else []
    if not missing and not seen.left:
        return ok("Every day has its partition." if seen.is_partitioned else "No partition is needed.")
    said = [f"no partition of {', '.join(missing[:5])}"] if missing else []
    said += [f"long over and still there: {', '.join(seen.left[:5])}"] if seen.left else []
    return wrong("; ".join(said) + ".")


@GROUP.check(
    "default-partition",
    Severity.WARNING,
    title="The default partition is empty",
    why="Answers are there because no reaper made a partition in time. They are deleted row by row, and each new "
    "partition has to read through them, while requests for them wait.",
    mend="semel reap --store URL   # as the owner of the tables; it empties the partition as its answers expire",
    look=layout,
)
def default_partition(seen: Layout, _limits: Limits) -> Judgement:
    """Judge whether there are answers in no partition of their own."""
    if not seen.strays:
        return ok("It is empty." if seen.has_table else "There is none: the layout is plain.")
    count = f"{seen.strays} or more" if seen.strays == MAX_COUNTED else str(seen.strays)
    return wrong(f"It has {count} answers, of {', '.join(sorted(seen.days)[:5])}.")

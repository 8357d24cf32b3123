"""``semel migrate``: brings a store's tables up to date, or shows what that would do. The schema itself, and what a
statement locks, are in ``stores/``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from semel.cli import address
from semel.cli.address import VARIABLE, checked, required
from semel.cli.output import JsonOption
from semel.errors import ConfigurationError
from semel.stores import store
from semel.stores.migration import Layout, Phase, PlannedMigration, PlannedStatement, phase_of

#: Printed when tables were made or changed in a database with other tables; not on every deploy.
NEIGHBOURS = (
    "Other tables are in this database. A tool that compares it with your models would drop Semel's: have it leave out "
    "semel_*, or on PostgreSQL give them a schema of their own by ?schema=NAME in the URL. In Alembic's env.py, give "
    "context.configure() include_name=semel.stores.alembic.include_name. Django needs nothing."
)

UrlArgument = Annotated[str | None, typer.Argument(metavar="[URL]", help=f"The store; else {VARIABLE}.")]
UrlOption = Annotated[str | None, typer.Option("--store", metavar="URL", help="The same as URL.")]


PlanOption = Annotated[
    bool, typer.Option("--plan", help="Change nothing: show each statement, what it locks, and what has to wait.")
]
PostOption = Annotated[
    bool, typer.Option("--post", help="Also what older versions of Semel can't serve on: once no process runs one.")
]

LayoutOption = Annotated[
    Layout | None,
    typer.Option(
        "--layout",
        help="Where PostgreSQL keeps large answers: in their rows, or in partitions that are dropped when they expire.",
    ),
]

NOTHING = "nothing to do"
#: When each phase is run.
PHASES = {"pre": "before the new code is started", "post": "when no process runs the old code any more"}
WORK = {"nothing": "no row is read", "reads": "all rows are read", "rewrites": "all rows are written anew"}


def migrate(
    url: UrlArgument = None,
    also: UrlOption = None,
    *,
    plan: PlanOption = False,
    post: PostOption = False,
    layout: LayoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make or update the tables of a store. Safe to repeat, to interrupt, and to run from several places at once."""
    if url and also and url != also:
        raise ConfigurationError("Two stores were given. Migrate one at a time.")
    if address.project is not None and not (url or also) and address.project.opened().is_callers:
        raise ConfigurationError("In Django, Semel's migrations are Django's. Run: python manage.py migrate semel")
    which = required(url or also)
    if not plan:
        done = migrated(which, with_post=post, layout=layout)
        print(json.dumps(asdict(done)) if as_json else done)
        return
    missing = planned(which, with_post=post, layout=layout)
    if as_json:
        print(json.dumps([{"phase": _phase(each), **asdict(each)} for each in missing], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for each in missing:
        console.print(*_described(each), sep="\n")
    if not missing:
        print(NOTHING)


@dataclass(frozen=True)
class Migrated:
    """What was done, and what else there is to know."""

    applied: tuple[str, ...]
    #: Is done once no old code runs.
    left: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Say it, a line for each."""
        lines = [f"{name} applied" for name in self.applied]
        lines += [*self.notes, *(f"{name} is left, for later: semel migrate --post" for name in self.left)]
        return "\n".join(lines) or NOTHING


def migrated(url: str, *, with_post: bool = False, layout: Layout | None = None) -> Migrated:
    """Bring the store at *url* up to date."""
    keys = store(checked(url))
    keys.migrates_post = with_post
    try:
        if layout is not None:
            keys.plan_layout(layout)  # A store that has none refuses before anything is changed.
        applied = keys.migrate()
        notes = [NEIGHBOURS] if applied and keys.has_neighbours() else []
        keys.migrates_post = True
        notes += [] if layout is None else keys.lay_out(layout)
        return Migrated(tuple(applied), tuple(left.name for left in keys.plan()), tuple(notes))
    finally:
        keys.close()


def planned(url: str, *, with_post: bool = False, layout: Layout | None = None) -> tuple[PlannedMigration, ...]:
    """Return what ``migrated`` would do."""
    keys = store(checked(url))
    keys.migrates_post = with_post
    try:
        return keys.plan() + (() if layout is None else keys.plan_layout(layout))
    finally:
        keys.close()


def _phase(planned: PlannedMigration) -> Phase:
    # What old code does not find is a large answer, so the layout is changed as late as what it does not survive.
    return "post" if planned.name.endswith(" layout") else phase_of(planned.name)


def _described(migration: PlannedMigration) -> list[Text]:
    phase = _phase(migration)
    lines = [Text.assemble((migration.name, "bold"), f": {phase}, {PHASES[phase]}")]
    if migration.done:
        lines.append(Text(f"  an earlier run stopped after {migration.done} of its statements; these are left"))
    for number, statement in enumerate(migration.statements, migration.done + 1):
        lines += [Text(), *_of_statement(number, statement)]
    return [*lines, Text()]


def _of_statement(number: int, statement: PlannedStatement) -> list[Text]:
    first, *others = statement.sql.splitlines()
    is_harmless = statement.blocks.startswith("nothing")
    return [
        Text(f"  {number}. {first}"),
        *(Text(f"     {line}") for line in others),
        Text.assemble("     locks:  ", (statement.lock, "cyan"), f" on {statement.table}"),
        Text(f"     rows:   {WORK[statement.work]}"),
        Text.assemble("     blocks: ", (statement.blocks, "green" if is_harmless else "yellow")),
    ]

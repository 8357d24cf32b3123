"""``semel migrate``: brings a store's tables up to date. The schema itself is in ``stores/``."""

from __future__ import annotations

from typing import Annotated

import typer

from semel.cli.address import VARIABLE, checked, required
from semel.errors import ConfigurationError
from semel.stores import store

#: Printed when tables were made or changed in a database with other tables; not on every deploy.
NEIGHBOURS = (
    "Other tables are in this database. A tool that compares it with your models would drop Semel's: in Alembic's "
    "env.py, give context.configure() include_name=semel.stores.alembic.include_name. Django needs nothing."
)

UrlArgument = Annotated[str | None, typer.Argument(metavar="[URL]", help=f"The store; else {VARIABLE}.")]
UrlOption = Annotated[str | None, typer.Option("--store", metavar="URL", help="The same as URL.")]


def migrate(url: UrlArgument = None, also: UrlOption = None) -> None:
    """Make or update the tables of a store. Safe to repeat, and to run from several places at once."""
    if url and also and url != also:
        raise ConfigurationError("Two stores were given. Migrate one at a time.")
    for name in migrated(required(url or also)) or ["nothing to do"]:
        print(name)


def migrated(url: str) -> list[str]:
    """Bring the store at *url* up to date; return a line for each migration, and a warning if there is one."""
    keys = store(checked(url))
    try:
        applied = [f"{name} applied" for name in keys.migrate()]
        return [*applied, NEIGHBOURS] if applied and keys.has_neighbours() else applied
    finally:
        keys.close()

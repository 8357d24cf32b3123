"""For Alembic: which tables of a database are Semel's, so that autogenerate leaves them alone. It imports no Alembic.

In ``env.py``::

    context.configure(..., include_name=include_name)
"""

from __future__ import annotations

from typing import Any

from semel.stores.statement import DEFAULT_TABLE, Names


def include_name(name: str | None, type_: str, parent_names: Any, *, table: str = DEFAULT_TABLE) -> bool:  # noqa: ARG001 - Alembic's own signature
    """Say of a *name* in the database whether Alembic is to compare it with your models: Semel's tables are not.

    Where the store's URL says ``?table=…``, so does ``functools.partial(include_name, table="…")``.
    """
    return not (type_ == "table" and name in Names(table).tables)

"""For Alembic: which tables of a database are Semel's, so that autogenerate ignores them. It does not import Alembic.

In ``env.py``::

    context.configure(..., include_name=include_name)
"""

from __future__ import annotations

from typing import Any

from semel.stores.statement import DEFAULT_TABLE, Names


def include_name(name: str | None, type_: str, parent_names: Any, *, table: str = DEFAULT_TABLE) -> bool:  # noqa: ARG001 - Alembic's own signature
    """Return whether Alembic should compare *name* with your models: False for Semel's tables.

    If the store's URL has ``?table=…``, use ``functools.partial(include_name, table="…")``.
    """
    return not (type_ == "table" and name is not None and Names(table).has(name))

"""The arguments of a call: a row, and which of its columns are its key. They are checked here, before anything is sent.
What only the database knows (whether there is such a column, and such a constraint) is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from semel.core.value import value
from semel.errors import ConfigurationError


@value
class Asked:
    """One row to insert, or to get."""

    #: The table or the model, as messages name it.
    into: str
    values: Mapping[str, Any]
    #: The columns of the unique constraint.
    unique: tuple[str, ...]
    #: The columns in which a stored row must not differ.
    same: tuple[str, ...]
    #: The predicate of a partial index, in SQL or in the toolkit's own terms.
    where: Any = None

    @classmethod
    def of(
        cls,
        into: str,
        values: Any,
        *,
        unique: str | Iterable[str],
        same: str | Iterable[str] | None = None,
        where: Any = None,
    ) -> Asked:
        """Check the arguments. Without *same*, every given column must be the same in a stored row."""
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ConfigurationError(f"{into}: values must be a mapping from the names of columns to their values.")
        given = dict(values)
        key = _names(unique)
        if not key:
            raise ConfigurationError(f"{into}: unique= names no column. Name those of the unique constraint.")
        for name in key:
            if name not in given:
                raise ConfigurationError(f"{into}: unique= names {name!r}, and values has no such column. Give it.")
            if given[name] is None:
                raise ConfigurationError(
                    f"{into}: {name!r} is None. In a unique constraint NULL equals nothing, so every retry would "
                    "insert another row. Give a value."
                )
        must_be = tuple(given) if same is None else _names(same)
        for name in must_be:
            if name not in given:
                raise ConfigurationError(f"{into}: same= names {name!r}, and values has no such column.")
        return cls(into, given, key, must_be, where)

    @property
    def compared(self) -> tuple[str, ...]:
        """The columns that are compared: not those of the key, which can't differ."""
        return tuple(name for name in self.values if name not in self.unique)

    @property
    def key(self) -> str:
        """The names of the key's columns, for messages."""
        return ", ".join(self.unique)


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    # ("number") is a string; as a sequence, it would name columns n, u, m, b, e and r.
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))

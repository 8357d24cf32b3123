"""Several statements as one text, which a driver sends in one round trip. It sends nothing.

A text takes no parameters, so the values are written into it: in letters that mean the same whatever encoding the
session has and whether or not it takes a backslash in a string for an escape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.stores.statement import Joined, Query

#: How large a text may be. Bytes take two letters each in it, and the server reads it letter by letter.
MAX_SCRIPT_BYTES = 64 * 1024

#: What ends a string, or may escape something in it.
_SPECIAL = frozenset("'\\")


_WORDS = {None: "NULL", True: "true", False: "false"}


def literal(value: Any) -> str:
    """Write *value* as SQL does. Raises ``UnicodeEncodeError`` for text that can't be sent, as drivers do."""
    match value:
        case None | bool():
            return _WORDS[value]
        case int():
            return int.__repr__(value)  # not that of an enumeration
        case float():
            return repr(value)
        case str():
            text = str.__str__(value)
            if text.isascii() and text.isprintable() and not _SPECIAL.intersection(text):
                return f"'{text}'"
            return f"convert_from(decode('{text.encode().hex()}', 'hex'), 'UTF8')"
        case bytes() | bytearray() | memoryview():
            return f"decode('{value.hex()}', 'hex')"
        case _:
            raise TypeError(f"{type(value).__name__} has no spelling in SQL here")


def plain(joined: Joined[Any]) -> str:
    """Return a statement with its values in it."""
    return joined.query.formatted % {name: literal(value) for name, value in joined.parameters.items()}


def is_short(joined: Joined[Any]) -> bool:
    """Tell whether a statement may be sent as a text."""
    sized = (value for value in joined.parameters.values() if isinstance(value, str | bytes))
    return 2 * sum(map(len, sized)) <= MAX_SCRIPT_BYTES


class Prepared:
    """What one session of the store's own has prepared. It prepares by SQL, in the text that first needs it, so a
    database without Semel's tables is no trouble before that.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._names: dict[Query, str] = {}
        self._pending: dict[Query, str] = {}

    def script(self, statements: Sequence[Joined[Any]]) -> str:
        """Return *statements* as one text."""
        return "; ".join(self._executed(each) for each in statements)

    def note_sent(self) -> None:
        """Take note that the last text has gone through. After one that did not, the session is not to be used again if
        ``is_unsure``.
        """
        self._names.update(self._pending)
        self._pending.clear()

    def forget(self) -> None:
        """Take note that nothing is prepared any more."""
        self._names.clear()

    @property
    def is_unsure(self) -> bool:
        """Whether it is not known what the session has prepared."""
        return bool(self._pending)

    def _executed(self, joined: Joined[Any]) -> str:
        name, prepare = self._names.get(joined.query), ""
        if name is None:
            name = self._pending[joined.query] = f"semel_{len(self._names) + len(self._pending) + 1}"
            prepare = f"PREPARE {name} AS {joined.query.numbered}; "
        values = ", ".join(map(literal, joined.in_order))
        return f"{prepare}EXECUTE {name} ({values})"

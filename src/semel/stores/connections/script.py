"""Several statements as one text, which a driver sends in one round trip. It sends nothing.

A text takes no parameters, so the values are written into it: in letters that mean the same whatever encoding the
session has and whether or not it takes a backslash in a string for an escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from semel.stores.statement import Joined, Query

#: How large a text may be. Bytes take two letters each in it, and the server reads it letter by letter.
MAX_SCRIPT_BYTES = 64 * 1024

#: What needs no escape in a string: printable, and neither its end nor a backslash.
_is_plain = re.compile(r"[ -&(-\[\]-~]*").fullmatch

#: Of what a text may be full.
_SIZED = (str, bytes)

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
            return f"'{text}'" if _is_plain(text) else f"convert_from(decode('{text.encode().hex()}', 'hex'), 'UTF8')"
        case bytes() | bytearray() | memoryview():
            return f"E'\\\\x{value.hex()}'"
        case _:
            raise TypeError(f"{type(value).__name__} has no spelling in SQL here")


def literals(values: Iterable[Any]) -> str:
    """Write *values* one after the other, as ``literal`` does. The usual kinds are spelled here: a call for each would
    be felt.
    """
    spelled = []
    for value in values:
        kind = type(value)
        if kind is str and _is_plain(value):
            spelled.append(f"'{value}'")
        elif kind is bytes:
            spelled.append(f"E'\\\\x{value.hex()}'")
        elif kind is int:
            spelled.append(str(value))
        elif value is None:
            spelled.append("NULL")
        else:
            spelled.append(literal(value))
    return ", ".join(spelled)


def plain(joined: Joined[Any], *, is_marked: bool = False) -> str:
    """Return a statement with its values in it; *is_marked*: for a transaction that bears the mark."""
    query = (joined.marked if is_marked else None) or joined.query
    return query.formatted % {name: literal(value) for name, value in joined.parameters.items()}


def is_short(joined: Joined[Any]) -> bool:
    """Tell whether a statement may be sent as a text."""
    size = 0
    for value in joined.parameters.values():
        if isinstance(value, _SIZED):
            size += len(value)
    return 2 * size <= MAX_SCRIPT_BYTES


class Prepared:
    """What one session of the store's own has prepared. It prepares by SQL, in the text that first needs it, so a
    database without Semel's tables is no trouble before that.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._names: dict[Query, str] = {}
        self._pending: dict[Query, str] = {}
        #: Whether it is not known what the session has prepared.
        self.is_unsure = False

    def script(self, statements: Sequence[Joined[Any]]) -> str:
        """Return *statements* as one text."""
        parts = []
        for joined in statements:
            query = joined.marked or joined.query
            name = self._names.get(query)
            if name is None:
                name = self._pending[query] = f"semel_{len(self._names) + len(self._pending) + 1}"
                self.is_unsure = True
                parts.append(f"PREPARE {name} AS {query.numbered}")
            values = map(joined.parameters.__getitem__, query.parameters)
            parts.append(f"EXECUTE {name} ({literals(values)})")
        return "; ".join(parts)

    def note_sent(self) -> None:
        """Take note that the last text has gone through. After one that did not, the session is not to be used again if
        ``is_unsure``.
        """
        self._names.update(self._pending)
        self._pending.clear()
        self.is_unsure = False

    def forget(self) -> None:
        """Take note that nothing is prepared any more."""
        self._names.clear()

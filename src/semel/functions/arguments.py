"""The arguments of a call as bytes, so that a retry can be compared with it. They are never parsed back.

The rule is *exact or none*: two values that a function could tell apart never have the same bytes (except numbers:
1 and 1.0 are equal), and a value without a certain form is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

#: Marks a value that JSON has no form for. A dictionary with this name in it is written in another way.
MARK = "$"

_encode = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":")).encode

#: The first type that fits is used: a datetime is a date, too, and an Enum may be a string.
_MARKED: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (Enum, "enum", lambda each: f"{type(each).__qualname__}.{each.name}"),
    (bytes, "bytes", bytes.hex),
    (Decimal, "decimal", str),
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (timedelta, "timedelta", lambda each: [each.days, each.seconds, each.microseconds]),
    (UUID, "uuid", str),
    (PurePath, "path", str),
    (frozenset, "set", lambda each: sorted(_encode(form_of(one)) for one in each)),
    (set, "set", lambda each: sorted(_encode(form_of(one)) for one in each)),
)


class CantBeWritten(TypeError):
    """This value has no form that a retry could be compared with."""

    def __init__(self, value: object) -> None:
        """Name the type of *value*, and not the value, which may be a secret."""
        super().__init__(type(value).__qualname__)


def written(forms: Any) -> bytes:
    """Return the bytes of what ``form_of`` has returned, or of a list or dict of such forms."""
    return _encode(forms).encode()


def form_of(value: object) -> Any:
    """Return *value* in a form that JSON can hold: the same for equal values, different for all others."""
    try:
        form = _form_of(value)
        _encode(form)
    except (ValueError, RecursionError) as error:  # NaN, or a list that holds itself
        raise CantBeWritten(value) from error
    return form


def _form_of(value: Any) -> Any:
    for kind, mark, form in _MARKED:
        if isinstance(value, kind):
            return {MARK + mark: form(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_form_of(each) for each in value]
    if isinstance(value, Mapping):
        return _members(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: _form_of(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {MARK + type(value).__qualname__: fields}
    raise CantBeWritten(value)


def _members(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(name, str) and not name.startswith(MARK) for name in value):
        return {name: _form_of(each) for name, each in value.items()}
    # In JSON the names 1 and "1" would be the same.
    return {MARK + "dict": sorted([_encode(_form_of(name)), _encode(_form_of(each))] for name, each in value.items())}

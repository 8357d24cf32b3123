"""The arguments of a call as bytes, so that a retry can be compared with it. They are never parsed back.

The rule is *exact or none*: two values that a function could tell apart never have the same bytes, and a value without
a certain form is refused. Except: 1 and 1.0 are equal, and of a datetime's zone its offset counts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

from semel.functions.names import module_of

#: Marks a value that JSON has no form for. A dictionary with this name in it is written in another way.
MARK = "$"

_encode = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":")).encode

#: Of exactly these types: a subclass may hold more than its base, or mean something else by it.
_MARKED: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", bytes.hex),
    Decimal: ("decimal", str),
    datetime: ("datetime", lambda each: each.isoformat() + _fold(each)),
    date: ("date", date.isoformat),
    time: ("time", lambda each: each.isoformat() + _zone(each) + _fold(each)),
    timedelta: ("timedelta", lambda each: [each.days, each.seconds, each.microseconds]),
    UUID: ("uuid", str),
    PosixPath: ("path", str),
    PurePosixPath: ("path", str),
    WindowsPath: ("windows-path", str),
    PureWindowsPath: ("windows-path", str),
    frozenset: ("set", lambda each: sorted(_encode(form_of(one)) for one in each)),
    set: ("set", lambda each: sorted(_encode(form_of(one)) for one in each)),
}
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})


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


def _form_of(value: Any) -> Any:  # noqa: PLR0911 - a list of kinds
    kind: type[Any] = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if marked := _MARKED.get(kind):
        mark, form = marked
        return {MARK + mark: form(value)}
    if kind in {list, tuple}:
        return [_form_of(each) for each in value]
    if kind in {dict, MappingProxyType}:
        return _members(value)
    if isinstance(value, Enum):
        # Some flags have no name.
        return {MARK + "enum": f"{_name(kind)}.{value.name or value._value_}"}
    if isinstance(value, UUID):
        return {MARK + "uuid": str(value)}  # A driver's own: it holds 128 bits, and no more.
    if hasattr(kind, "_fields") and isinstance(value, tuple) and not getattr(value, "__dict__", None):
        return {MARK + _name(kind): [_form_of(each) for each in value]}
    if dataclasses.is_dataclass(kind) and not isinstance(value, (*_MARKED, str, int, float, list, tuple, dict)):
        fields = {each.name: _form_of(getattr(value, each.name)) for each in dataclasses.fields(value)}
        # A class that is derived from a dataclass, and is none, may have attributes that are no fields.
        if "__dataclass_fields__" in vars(kind) or fields.keys() >= getattr(value, "__dict__", fields).keys():
            return {MARK + _name(kind): fields}
    raise CantBeWritten(value)


def _name(kind: type) -> str:
    """Return the name of a class: two modules may have one of the same name."""
    return f"{module_of(kind)}.{kind.__qualname__}"


def _fold(each: datetime | time) -> str:
    """Tell the second of two hours of one name from the first."""
    return " again" if each.fold else ""


def _zone(each: time) -> str:
    """Tell a zone whose offset depends on the date, which a time alone does not have."""
    return "" if each.tzinfo is None or each.utcoffset() is not None else f" {each.tzinfo}"


def _members(value: Mapping[Any, Any]) -> Any:
    if all(isinstance(name, str) and not name.startswith(MARK) for name in value):
        return {name: _form_of(each) for name, each in value.items()}
    # In JSON the names 1 and "1" would be the same.
    return {MARK + "dict": sorted([_encode(_form_of(name)), _encode(_form_of(each))] for name, each in value.items())}

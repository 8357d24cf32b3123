"""How the annotated result of a function becomes JSON and comes back as it was: ``Decimal``, dates, ``UUID``, enums,
tuples, dataclasses, models of pydantic, which is not imported here. What is stored has no word of its types.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints, is_typeddict
from uuid import UUID

from semel.core.result_type import annotated_result, is_plain, named, without_alias


class Form(Protocol):
    """How values of one type are written and read."""

    def write(self, value: Any, path: str, /) -> Any:
        """Return *value* as JSON holds it; *path* is where it stands in the result."""

    def read(self, stored: Any, /) -> Any:
        """Return what was written."""


class Unwritable(TypeError):
    """A type that does not come back from JSON as it was."""


class Misfit(TypeError):
    """A result that is not of the type that its annotation says, or does not come back as it was."""

    @classmethod
    def of(cls, path: str, value: object, kind: type[Any]) -> Misfit:
        """Say where, and the types; the value may be a secret."""
        return cls(f"{path} is a {type(value).__qualname__}, and is annotated as {kind.__qualname__}")


def form_of_result(function: Callable[..., Any]) -> Form | None:
    """Return how the annotated result of *function* is stored; None: as the JSON that it is, or it is not known.

    A type that can't come back as it was is ``Unwritable``.
    """
    try:
        return _form(annotated_result(function), {})
    except Unwritable:
        raise
    except Exception:  # noqa: BLE001 - as in annotated_result, of the fields of a class
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Text:
    """A value that is one text, or the value of an enum."""

    kind: type[Any]
    said: Callable[[Any], Any]
    made: Callable[[Any], Any]

    def write(self, value: Any, path: str) -> Any:
        # A subclass may hold more. Drivers have a UUID of their own, which holds 128 bits and no more.
        if type(value) is not self.kind and not (self.kind is UUID and isinstance(value, UUID)):
            # A field of a model is the plain text or number that its enum is equal to.
            if not issubclass(self.kind, Enum) or all(value != each for each in self.kind):
                raise Misfit.of(path, value, self.kind)
            return value
        return self.said(value)

    def read(self, stored: Any) -> Any:
        return self.made(stored)


@dataclasses.dataclass(frozen=True, slots=True)
class _Optional:
    form: Form

    def write(self, value: Any, path: str) -> Any:
        return None if value is None else self.form.write(value, path)

    def read(self, stored: Any) -> Any:
        return None if stored is None else self.form.read(stored)


@dataclasses.dataclass(frozen=True, slots=True)
class _Items:
    """A list, or a tuple of any length, or of one length with a form for each place."""

    kind: type[list[Any] | tuple[Any, ...]]
    forms: tuple[Form | None, ...]
    is_repeated: bool

    def _pairs(self, values: Any) -> Any:
        return ((each, self.forms[0]) for each in values) if self.is_repeated else zip(values, self.forms, strict=True)

    def write(self, value: Any, path: str) -> Any:
        if not isinstance(value, self.kind) or not (self.is_repeated or len(value) == len(self.forms)):
            return _other(self.kind, value, path)
        return [_write(form, each, f"{path}[{at}]") for at, (each, form) in enumerate(self._pairs(value))]

    def read(self, stored: Any) -> Any:
        if not isinstance(stored, list):
            return _other(self.kind, stored, "it")
        return self.kind(_read(form, each) for each, form in self._pairs(stored))


@dataclasses.dataclass(frozen=True, slots=True)
class _Members:
    """A dictionary with one form for all, or a form for each name; or a dataclass. It may hold itself."""

    kind: type[Any]
    forms: dict[str, Form | None]
    #: Of all names that have none.
    other: Form | None = None

    def write(self, value: Any, path: str) -> Any:
        if type(value) is not self.kind and not (self.kind is dict and isinstance(value, dict)):
            return _other(self.kind, value, path)
        members = value if self.kind is dict else {name: getattr(value, name) for name in self.forms}
        return {
            name: _write(self.forms.get(name, self.other), each, f"{path}.{name}") for name, each in members.items()
        }

    def read(self, stored: Any) -> Any:
        if not isinstance(stored, dict):
            return _other(self.kind, stored, "it")
        back = {name: _read(self.forms.get(name, self.other), each) for name, each in stored.items()}
        if self.kind is dict:
            return back
        # A field that the class has no more is left out, and a new one has its default.
        return self.kind(**{name: each for name, each in back.items() if name in self.forms})


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """A model of pydantic 2, by its own JSON."""

    kind: Any

    def write(self, value: Any, path: str) -> Any:
        if type(value) is not self.kind:
            raise Misfit.of(path, value, self.kind)
        text = value.model_dump_json(by_alias=True)
        if self.kind.model_validate_json(text) != value:
            raise Misfit(f"{path} is a {self.kind.__qualname__}, which does not come back from its own JSON as it was")
        return json.loads(text)

    def read(self, stored: Any) -> Any:
        return self.kind.model_validate_json(json.dumps(stored))


_SCALARS: dict[Any, Form] = {
    # A number, of older code or an operator, has its digits: Decimal(1.1) would have its bits.
    Decimal: _Text(Decimal, str, lambda stored: Decimal(str(stored))),
    datetime: _Text(datetime, datetime.isoformat, datetime.fromisoformat),
    date: _Text(date, date.isoformat, date.fromisoformat),
    time: _Text(time, time.isoformat, time.fromisoformat),
    UUID: _Text(UUID, str, UUID),
}


def _other(kind: type[Any], value: Any, path: str) -> Any:
    """Return a value of another type than was said. In the place of a list or a dictionary, JSON says what it was."""
    if kind in {list, dict} and not isinstance(value, (list, dict)):
        return value
    raise Misfit.of(path, value, kind)


def _write(form: Form | None, value: Any, path: str) -> Any:
    return value if form is None else form.write(value, path)


def _read(form: Form | None, stored: Any) -> Any:
    return stored if form is None else form.read(stored)


def _form(kind: Any, known: dict[Any, Form | None]) -> Form | None:
    kind = without_alias(kind)
    found, parts = get_origin(kind) or kind, get_args(kind)
    if kind in _SCALARS or kind in known:
        return _SCALARS.get(kind) or known[kind]
    if found is types.UnionType or not isinstance(found, type):
        return None if found is Literal else _of_several(kind, [(part, _form(part, known)) for part in parts])
    if is_typeddict(found) or dataclasses.is_dataclass(found):
        if any(_form(part, known) for part in parts):
            raise Unwritable(named(kind))  # Its fields do not say where they hold which part.
        return _of_members(found, known)
    # What has no fields or members of its own is the base of others, which would be lost.
    if callable(getattr(found, "model_validate_json", None)) and getattr(found, "model_fields", None):
        return _Model(found)
    if issubclass(found, Enum) and len(found) and all(type(each.value) in {str, int} for each in found):
        return _Text(found, _value_of, found)
    return _of_container(kind, found, parts, known)


def _of_container(kind: Any, found: type[Any], parts: tuple[Any, ...], known: dict[Any, Form | None]) -> Form | None:
    """Return the form of a list, a tuple or a dictionary, or of what JSON holds as it is."""
    forms = [_form(part, known) for part in parts if part is not Ellipsis]
    if found is tuple:
        return _Items(tuple, tuple(forms or [None]), is_repeated=not parts or parts[-1] is Ellipsis)
    is_held = is_plain(found) and not issubclass(found, (tuple, Enum))
    if not is_held or (issubclass(found, Mapping) and parts and not _is_text(parts[0])):
        raise Unwritable(named(kind))  # Of a dictionary: the names 1 and "1" are the same in JSON.
    if not any(forms):
        return None
    if found is list:
        return _Items(list, tuple(forms), is_repeated=True)
    if found is dict:
        return _Members(dict, {}, forms[-1])
    raise Unwritable(named(kind))  # Of a Sequence, JSON does not say whether it was a list or a tuple.


def _of_several(kind: Any, members: list[tuple[Any, Form | None]]) -> Form | None:
    """Return the form of a union: what is stored must say which of its types it was."""
    forms = [form for part, form in members if part is not types.NoneType]
    if not any(forms):
        return None
    if len(forms) == 1 and forms[0] is not None:
        return _Optional(forms[0])
    raise Unwritable(named(kind))


def _of_members(kind: type[Any], known: dict[Any, Form | None]) -> Form | None:
    """Return the form of a ``TypedDict`` or a dataclass."""
    hints = get_type_hints(kind)
    inside: dict[Any, Form | None] = known | {kind: None}
    if is_typeddict(kind) and not any(_form(each, inside) for each in hints.values()):
        known[kind] = None  # All of it is plain, and so is a list or a union of it.
        return None
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    if fields and (
        issubclass(kind, (str, int, float, list, tuple, BaseException))
        or {each.name for each in fields} != inspect.signature(kind).parameters.keys()
    ):
        raise Unwritable(named(kind))  # It holds more than its fields, or is not made of them.
    known[kind] = members = _Members(dict if is_typeddict(kind) else kind, {})
    names = [each.name for each in fields] or (hints if is_typeddict(kind) else ())
    members.forms.update((name, _form(hints[name], known)) for name in names)
    return members


def _is_text(kind: Any) -> bool:
    """Whether a dictionary's names of this type are the same when they come back."""
    kind = without_alias(kind)
    if get_origin(kind) is Literal:
        return all(type(each) is str for each in get_args(kind))
    return kind in {Any, object} or not isinstance(kind, type) or issubclass(kind, str)


def _value_of(each: Enum) -> Any:
    return each.value

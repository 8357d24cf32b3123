"""What a function's annotation says of its result: whether JSON can hold it. It calls no function and sees no result.

A result that can't be stored is found out after the function has run, which is too late. Most are annotated.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

#: Written as they are, and their subclasses as the same text, number, list or object.
_WRITTEN = (str, int, float, types.NoneType, list, dict)
#: Modules of types that say what a value can do, and not what it is.
_ABSTRACT = frozenset({"collections.abc", "typing"})


def unwritable(function: Callable[..., Any], *, exactly: bool = False) -> str | None:
    """Return the type in the annotated result of *function* that JSON can't hold; None: there is none, or it can't be
    known. *exactly*: one that would come back as another type, too (a tuple, a dictionary whose names are numbers).
    """
    if hasattr(function, "__wrapped__"):
        return None  # The annotation is of the function inside, and the wrapper may return something else.
    try:
        # Alone: the other annotations may name what is imported for type checkers only.
        said = types.SimpleNamespace(__annotations__={"return": function.__annotations__.get("return")})
        hints = get_type_hints(said, getattr(function, "__globals__", None))
        return _unwritable(hints["return"], exactly, frozenset())
    except Exception:  # noqa: BLE001 - an annotation is the application's own code, and may name what is not imported
        return None


def _unwritable(kind: Any, exactly: bool, inside: frozenset[Any]) -> str | None:  # noqa: FBT001 - a rule of each level
    kind = getattr(kind, "__value__", getattr(kind, "__supertype__", kind))  # of `type X = …` and of a NewType
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal or kind in inside:
        return None
    if is_typeddict(origin or kind):
        parts = tuple(get_type_hints(origin or kind).values())
    elif isinstance(found := origin or kind, type) and found is not types.UnionType:
        if issubclass(found, tuple):
            if exactly:
                return _name(kind)
            parts = tuple(part for part in parts if part is not Ellipsis)
        elif issubclass(found, Mapping):
            if exactly and parts and not _is_text(parts[0]):
                return _name(kind)
            parts = parts[1:]
        elif not (
            issubclass(found, _WRITTEN) or found is object or found.__module__ in _ABSTRACT or _is_protocol(found)
        ):
            return _name(kind)
    inside = inside | ({kind} if is_typeddict(origin or kind) else frozenset())
    return next((name for part in parts if (name := _unwritable(part, exactly, inside))), None)


def _is_text(kind: Any) -> bool:
    """Whether a dictionary's names of this type are the same when they come back."""
    kind = getattr(kind, "__supertype__", kind)
    if get_origin(kind) is Literal:
        return all(type(each) is str for each in get_args(kind))
    return kind in {Any, object} or not isinstance(kind, type) or issubclass(kind, str)


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _name(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind).removeprefix("typing.")

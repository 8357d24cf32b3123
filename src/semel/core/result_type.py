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


def unwritable(function: Callable[..., Any]) -> str | None:
    """Return the type in the annotated result of *function* that JSON can't hold; None: there is none, or it can't be
    known.
    """
    try:
        return _unwritable(annotated_result(function), frozenset())
    except Exception:  # noqa: BLE001 - as below, of the annotations of a TypedDict
        return None


def annotated_result(function: Callable[..., Any]) -> Any:
    """Return what *function* is annotated to return; ``Any``: nothing, or it can't be known."""
    if hasattr(function, "__wrapped__"):
        return Any  # The annotation is of the function inside, and the wrapper may return something else.
    try:
        # Alone: the other annotations may name what is imported for type checkers only.
        said = types.SimpleNamespace(__annotations__={"return": function.__annotations__["return"]})
        return get_type_hints(said, getattr(function, "__globals__", None))["return"]
    except Exception:  # noqa: BLE001 - an annotation is the application's own code, and may name what is not imported
        return Any


def _unwritable(kind: Any, inside: frozenset[Any]) -> str | None:
    kind = without_alias(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal or kind in inside:
        return None
    if is_typeddict(origin or kind):
        parts = tuple(get_type_hints(origin or kind).values())
    elif isinstance(found := origin or kind, type) and found is not types.UnionType:
        if issubclass(found, tuple):
            parts = tuple(part for part in parts if part is not Ellipsis)
        elif issubclass(found, Mapping):
            parts = parts[1:]
        elif not is_plain(found):
            return named(kind)
    inside = inside | ({kind} if is_typeddict(origin or kind) else frozenset())
    return next((name for part in parts if (name := _unwritable(part, inside))), None)


def without_alias(kind: Any) -> Any:
    """Return what a ``NewType`` or ``type X = …`` stands for."""
    return getattr(kind, "__value__", getattr(kind, "__supertype__", kind))


def is_plain(kind: type) -> bool:
    """Whether JSON holds values of this class, or it says what they can do, and not what they are."""
    is_protocol = bool(getattr(kind, "_is_protocol", False))
    return issubclass(kind, _WRITTEN) or kind is object or kind.__module__ in _ABSTRACT or is_protocol


def named(kind: Any) -> str:
    """Return a type as it is written."""
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind).removeprefix("typing.")

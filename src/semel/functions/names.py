"""The name and the signature of a function. It calls none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from semel.errors import ConfigurationError

Function = Callable[..., Any]

#: The first parameter of a method. The object itself is not compared: most objects have no form to compare.
OWNERS = frozenset({"self", "cls"})

#: The code of the functions that are known by their own names.
_defined: dict[str, CodeType] = {}

#: Names of a module that runs as a program, and of its copy in a process that multiprocessing has spawned.
_PROGRAMS = frozenset({"__main__", "__mp_main__"})


def signature_of(function: Function) -> inspect.Signature:
    """Return the signature of *function*. Some functions in C have none: then any arguments are allowed."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))


def name_of(function: Function, given: Any = None) -> str:
    """Return the name of *function*: its keys are kept under it. A name that could be of several functions is refused:
    the second would not be run, and would get the result of the first.
    """
    if given is not None:
        if not isinstance(given, str) or not given or not given.isprintable():
            raise ConfigurationError(f"name must be a printable string, not {given!r}.")
        return given
    if isinstance(function, partial):
        raise ConfigurationError("Two partials of one function have one name. Give each name=, to keep its keys under.")
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    _refuse_local(named)
    name = f"{module_of(named)}.{named.__qualname__}"
    if named is not function and getattr(function, "__dict__", None):
        raise ConfigurationError(
            f"An object of {name} has attributes of its own, and two objects have one name: with one key, only one of "
            f'them would run. Give each a name=; the first may keep name="{name}".'
        )
    if inspect.isfunction(function):
        _refuse_second(name, function)
    return name_for(name, function.__self__) if inspect.ismethod(function) else name


def name_for(name: str, owner: object) -> str:
    """Return the name under which the method *name* keeps the keys of *owner*, its object or class. A subclass may do
    something else in what the method calls, so it has keys of its own.
    """
    kind: type[Any] = owner if isinstance(owner, type) else type(owner)
    own, defining = f"{module_of(kind)}.{kind.__qualname__}", name.rpartition(".")[0]
    if own == defining:
        return name
    _refuse_local(kind)
    return f"{name}[{own}]"


def owner_of(function: Function) -> str | None:
    """Return the parameter of *function* that is its object or class, if it is a method."""
    path = function.__qualname__.rpartition("<locals>.")[2] if inspect.isfunction(function) else ""
    first = next(iter(signature_of(function).parameters), None)
    return first if "." in path and first in OWNERS else None


def _refuse_local(named: Any) -> None:
    """Refuse what is made anew, and may do something else, whenever the code around it runs."""
    if "<lambda>" in named.__qualname__:
        raise ConfigurationError("A lambda has no name to keep its keys under. Give name=, or use `def`.")
    _, local, path = named.__qualname__.rpartition("<locals>.")
    is_plain = inspect.isfunction(named) and not (named.__closure__ or named.__defaults__ or named.__kwdefaults__)
    if local and ("." in path or not is_plain):
        raise ConfigurationError(
            f"{named.__qualname__} is made anew by each call of the function around it, and all of them have one name: "
            f'with one key, only one of them would run. Give name=, such as name="{path}", and a name of its own to '
            "each that does something else; or define it outside."
        )


def _refuse_second(name: str, function: Any) -> None:
    """Refuse a second function of one name in a module: handlers that are all called ``_``, for example."""
    # Of the function itself: a decorator around several gives all of them one code.
    code: CodeType = getattr(inspect.unwrap(function), "__code__", function.__code__)
    other = _defined.setdefault(name, code)
    if other != code and _are_made_together(other, code):
        raise ConfigurationError(
            f"Two functions are called {name} (lines {other.co_firstlineno} and {code.co_firstlineno}), and would "
            "share their keys: with one key, only one of them would run. Give one of them name=."
        )
    _defined[name] = code


def _are_made_together(one: CodeType, other: CodeType) -> bool:
    """Whether code that is running now makes both. A module that is loaded again, in a notebook or by a development
    server, may have been changed, and no longer makes what was there before.
    """
    frame = sys._getframe()  # noqa: SLF001 - there is no other way to it
    while frame.f_back is not None:
        frame = frame.f_back
        if {one, other} <= set(_codes_in(frame.f_code)):
            return True
    return False


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_in(each)


def is_async(function: Function) -> bool:
    """Whether a call of *function* must be awaited; refuse what is not a function."""
    if isinstance(function, staticmethod) or not callable(function):
        raise ConfigurationError(
            f"{type(function).__name__} is not a function. Give the function, and not what it returns; put @idempotent "
            "under @classmethod and @staticmethod."
        )
    call = function if hasattr(function, "__qualname__") or isinstance(function, partial) else function.__call__  # type: ignore[operator]  # an object's own
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigurationError(
            f"{getattr(function, '__qualname__', function)} is a generator: what it yields can't be stored as a result."
        )
    return inspect.iscoroutinefunction(call)


def module_of(named: Any) -> str:
    """Return the name by which its module is imported, also if it runs as the program: keys are kept under it."""
    module: str = named.__module__
    if module not in _PROGRAMS:
        return module
    program = sys.modules.get(module)
    spec = getattr(program, "__spec__", None)
    file: str | None = getattr(program, "__file__", None)
    return spec.name if spec else Path(file).stem if file else module

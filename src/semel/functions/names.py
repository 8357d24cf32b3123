"""The name and the signature of a function. It calls none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from semel.errors import ConfigurationError

Function = Callable[..., Any]

#: Names of a module that runs as a program, and of its copy in a process that multiprocessing has spawned.
_PROGRAMS = frozenset({"__main__", "__mp_main__"})


def signature_of(function: Function) -> inspect.Signature:
    """Return the signature of *function*. Some functions in C have none: then any arguments are allowed."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))


def name_of(function: Function, given: Any = None) -> str:
    """Return the name of *function*: its keys are kept under it."""
    if given is not None:
        if not isinstance(given, str) or not given or not given.isprintable():
            raise ConfigurationError(f"name must be a printable string, not {given!r}.")
        return given
    inner = function.func if isinstance(function, partial) else function
    named: Any = inner if hasattr(inner, "__qualname__") else type(inner)
    if "<lambda>" in named.__qualname__:
        raise ConfigurationError("A lambda has no name to keep its keys under. Give name=, or use `def`.")
    return f"{module_of(named)}.{named.__qualname__}"


def is_async(function: Function) -> bool:
    """Whether a call of *function* must be awaited; refuse what is not a function."""
    if not callable(function):
        raise ConfigurationError(
            f"{type(function).__name__} is not a function. Put @idempotent under @classmethod and @staticmethod."
        )
    call = function if hasattr(function, "__qualname__") or isinstance(function, partial) else function.__call__  # type: ignore[operator]  # an object's own
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigurationError(f"{name_of(function)} is a generator: what it yields can't be stored as a result.")
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

"""What a function is called, and how it is to be called. It calls none."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from semel.errors import ConfigurationError

Function = Callable[..., Any]

#: What a module is called while it runs as a program, and in a process that multiprocessing has spawned from one.
_PROGRAMS = frozenset({"__main__", "__mp_main__"})


def signature_of(function: Function) -> inspect.Signature:
    """Return what *function* can be called with. Some that are written in C don't say: then, with anything."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))


def name_of(function: Function, given: Any = None) -> str:
    """Return what *function* is called: its keys are kept under this name."""
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
    """Whether a call of *function* is to be awaited; refuse what is called in no usual way."""
    if not callable(function):
        raise ConfigurationError(
            f"{type(function).__name__} is no function. Put @idempotent under @classmethod and @staticmethod."
        )
    call = function if hasattr(function, "__qualname__") or isinstance(function, partial) else function.__call__  # type: ignore[operator]  # an object's own
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigurationError(f"{name_of(function)} is a generator: what it yields can't be kept as a result.")
    return inspect.iscoroutinefunction(call)


def module_of(named: Any) -> str:
    """Return the name of its module as others import it, even where that is the program itself: keys are kept by it."""
    module: str = named.__module__
    if module not in _PROGRAMS:
        return module
    program = sys.modules.get(module)
    spec = getattr(program, "__spec__", None)
    file: str | None = getattr(program, "__file__", None)
    return spec.name if spec else Path(file).stem if file else module

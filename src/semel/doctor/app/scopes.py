"""What a scope function reads, by its compiled code. It is not called: that might ask a database, or cost money."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from semel.core.scope import SingleTenant

#: Names and strings by which a function gets at the address of a client.
ADDRESSES = frozenset(
    {
        *("client", "remote_addr", "REMOTE_ADDR", "access_route", "remote_address", "client_host"),
        *("x-forwarded-for", "x-real-ip", "forwarded", "cf-connecting-ip", "true-client-ip", "x-client-ip"),
        *("HTTP_X_FORWARDED_FOR", "HTTP_X_REAL_IP"),
    }
)
_FOLDED = frozenset(each.lower() for each in ADDRESSES)


@dataclass(frozen=True, slots=True)
class Named:
    """How the user of a guard's requests is named."""

    guard: str
    #: The function's own name.
    function: str = ""
    #: None: its code can't be read.
    is_constant: bool | None = None
    #: The names and strings in it that stand for an address.
    addresses: tuple[str, ...] = ()
    #: Whether the app says aloud that it has one user.
    is_said: bool = False


def named(guard: str, scope: Any) -> Named:
    """Read the code of *scope*."""
    if isinstance(scope, SingleTenant):
        return Named(guard, repr(scope), is_constant=True, is_said=True)
    code = _code_of(scope)
    name = getattr(scope, "__qualname__", type(scope).__qualname__)
    if code is None:
        return Named(guard, name)
    return Named(guard, name, is_constant=_is_constant(code), addresses=tuple(_addresses(code)))


def _code_of(scope: Any) -> CodeType | None:
    function = inspect.unwrap(scope) if callable(scope) else None
    function = getattr(function, "__func__", function)
    if not inspect.isfunction(function):
        function = inspect.getattr_static(type(scope), "__call__", None)
        function = function if inspect.isfunction(function) else None
    return None if function is None else function.__code__


def _is_constant(code: CodeType) -> bool:
    """Whether nothing flows into what it returns: no parameter, no name from outside, no function inside."""
    if code.co_names or code.co_freevars or any(isinstance(each, CodeType) for each in code.co_consts):
        return False
    parameters = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return not any(parameters.intersection(_read(each)) for each in _instructions(code))


def _instructions(code: CodeType) -> Iterator[Any]:
    import dis  # noqa: PLC0415 - nothing else needs it

    yield from dis.get_instructions(code)


def _read(instruction: Any) -> tuple[str, ...]:
    said = instruction.argval
    # Newer versions of Python read two names with one instruction.
    if isinstance(said, tuple):
        return tuple(each for each in said if isinstance(each, str))
    return (said,) if isinstance(said, str) and instruction.opname != "LOAD_CONST" else ()


def _addresses(code: CodeType) -> Iterator[str]:
    for each in (*code.co_names, *code.co_consts):
        if isinstance(each, CodeType):
            yield from _addresses(each)
        elif isinstance(each, str) and each.lower() in _FOLDED:
            yield each

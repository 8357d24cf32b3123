"""The functions that a handler gives to ``phase`` and ``effect``: their types, how they are called, and whether they
can be. It calls none of them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from semel.core.result_type import unwritable
from semel.core.value import value
from semel.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)

# An effect's function is called with one keyword more than the handler gives, and no ParamSpec can take a keyword out
# of a signature. So there is one type for each number of arguments. ``async def`` needs none of its own: what such a
# function returns is to be awaited, and what the step returns is that.


class Effect0(Protocol[R_co]):
    """An effect's function without arguments of the handler's."""

    def __call__(self, *, idempotency_key: str) -> R_co:
        """Call the outside world."""


class Effect1(Protocol[A_contra, R_co]):
    """With one."""

    def __call__(self, a: A_contra, /, *, idempotency_key: str) -> R_co:
        """Call the outside world."""


class Effect2(Protocol[A_contra, B_contra, R_co]):
    """With two."""

    def __call__(self, a: A_contra, b: B_contra, /, *, idempotency_key: str) -> R_co:
        """Call the outside world."""


class Effect3(Protocol[A_contra, B_contra, C_contra, R_co]):
    """With three."""

    def __call__(self, a: A_contra, b: B_contra, c: C_contra, /, *, idempotency_key: str) -> R_co:
        """Call the outside world."""


class Effect4(Protocol[A_contra, B_contra, C_contra, D_contra, R_co]):
    """With four."""

    def __call__(self, a: A_contra, b: B_contra, c: C_contra, d: D_contra, /, *, idempotency_key: str) -> R_co:
        """Call the outside world."""


@value
class Call:
    """What the handler wants called in one step."""

    #: Of the step.
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    #: Says of an effect whether it happened.
    verify: Callable[..., Any] | None = None

    def inside(self, connection: object) -> partial[Any]:
        """Return the call of a phase."""
        return partial(self.function, connection, *self.arguments, **self.named)

    def outside(self, key: str) -> partial[Any]:
        """Return the call of an effect."""
        return partial(self.function, *self.arguments, **self.named, idempotency_key=key)

    def question(self, key: str) -> partial[Any]:
        """Return the call that asks about an effect."""
        if self.verify is None:
            raise ConfigurationError('on_unknown="verify" needs verify=, a function that says what happened.')
        return partial(self.verify, *self.arguments, **self.named, idempotency_key=key)


class InThread(Generic[P, R]):
    """A plain function that is awaited: it runs in a thread."""

    def __init__(self, function: Callable[P, R]) -> None:
        """Run *function*."""
        self.function = function

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it, outside of any step."""
        return await asyncio.to_thread(self.function, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """What it can be called with."""
        return inspect.signature(self.function, follow_wrapped=False)


def in_thread(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Say to a type checker that *function*, which is not ``async``, is awaited as a step of an async handler.

    Such a step runs in a thread with or without this; but only with it does its type say that it is to be awaited.
    """
    return InThread(function)


#: Calls that were found to be possible: to read a signature takes some fifty times as long as to look here. It is
#: bounded, for programs that make functions as they go.
_possible: set[tuple[Hashable, ...]] = set()
_MAX_POSSIBLE = 4096


def check(
    what: str,
    step: str,
    function: object,
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    *,
    wanted: str,
    is_stored: bool = False,
) -> None:
    """Refuse a function that can't be called with these: an error here, and not in the middle of a step. *what* it is
    in the *step* of that name is said with ``%``. If its result *is_stored*, refuse one that says it can't be, too.
    """
    shape = _shape(function, arguments, named, is_stored)
    if shape in _possible:
        return
    if not callable(function):
        raise ConfigurationError(f"{what % (step,)}: {function!r} can't be called.")
    try:
        # As it stands: a wrapper may take what the function inside does not.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # Some builtins don't tell.
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        message = f"{what % (step,)}: {name}{signature} can't be called {wanted}: {error}."
        raise ConfigurationError(message) from None
    if is_stored and (kind := unwritable(function)):
        raise ConfigurationError(
            f"{what % (step,)}: its function is annotated to return {kind}, and what JSON can't hold would be lost "
            "after the call. Return text, numbers, lists, dictionaries or None: str(total), for example."
        )
    if shape is not None:
        if len(_possible) >= _MAX_POSSIBLE:
            _possible.clear()
        _possible.add(shape)


def _shape(
    function: object, arguments: Sequence[Any], named: Mapping[str, Any], *flags: bool
) -> tuple[Hashable, ...] | None:
    """Return what decides whether a plain function or method can be called like this; None: it is something else."""
    is_bound = isinstance(function, MethodType)
    plain: Any = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType) or "__signature__" in plain.__dict__:
        return None
    defaults = len(plain.__defaults__ or ()), frozenset(plain.__kwdefaults__ or ())
    return plain.__code__, *defaults, is_bound + len(arguments), frozenset(named), *flags

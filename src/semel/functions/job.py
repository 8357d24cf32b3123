"""The name of a guarded function, and the key, scope and compared content of a call. It runs nothing."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal
from uuid import UUID

from semel.core.fingerprint import Subject
from semel.core.key import Key
from semel.core.message import Head
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.core.scope import SingleTenant, principal_of, scoped
from semel.errors import ConfigurationError, KeyInvalid, KeyMissing, ScopeMissing
from semel.flows.guard import guard
from semel.flows.identify import Asked
from semel.flows.ports import GuardPorts
from semel.flows.reply import PassOn, Reply
from semel.functions.arguments import CantBeWritten, form_of, written
from semel.functions.calls import FunctionFlow
from semel.functions.names import OWNERS, Function, name_for
from semel.functions.results import Results
from semel.guard.request import switch

#: What must be the same on a retry: every argument, what a function chooses, or nothing but the key.
Compare = Function | Literal["arguments"] | None
#: The owner of the key: a name, or a function of the same arguments.
Owner = str | Function

#: In the place of a request's method, so that keys of functions and of requests never collide.
METHOD = "CALL"

_JSON = ((b"content-type", b"application/json"),)
#: Only these are compared with a default: the ``==`` of other types may be the application's own.
_SIMPLE = (bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class Job:
    """A function, and how the keys of its calls are found."""

    function: Function
    signature: inspect.Signature
    name: str
    key: str | Function
    scope: Owner
    compare: Compare
    policy: Policy
    results: Results
    #: The parameter that is its object or class, of a method that is known by its own name.
    owner: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that can't work."""
        if isinstance(self.key, str) and self.key not in self.signature.parameters:
            close = get_close_matches(self.key, self.signature.parameters, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "Name one, or give a function."
            raise ConfigurationError(f"key: {self.name} has no parameter {self.key!r}. {hint}")
        if not isinstance(self.key, str) and not callable(self.key):
            raise ConfigurationError(
                "key must be the name of a parameter, or a function of the same arguments: "
                'key="order_id", key=lambda order: f"invoice-{order.id}".'
            )
        if not isinstance(self.scope, str) and not callable(self.scope):
            raise ConfigurationError("scope must be a string, or a function of the same arguments that returns one.")
        if not (self.compare is None or self.compare == "arguments" or callable(self.compare)):
            raise ConfigurationError('compare must be "arguments", a function of the same arguments, or None.')
        for setting in ("key", "scope", "compare"):
            if inspect.iscoroutinefunction(getattr(self, setting)):
                raise ConfigurationError(f"{setting} must be a plain function: it is called before any await.")

    def flow(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, notes_replays: bool) -> FunctionFlow:
        """Return the flow of one call. A call that can't be guarded is refused here, before the store is asked."""
        # First, so that wrong arguments raise Python's own TypeError.
        bound = self.signature.bind(*args, **kwargs)
        key = self._key(bound, args, kwargs)
        principal = self._principal(args, kwargs)
        name = name_for(self.name, bound.arguments[self.owner]) if self.owner else self.name
        scope = scoped(principal, Head(METHOD, name, b"", ()), self.policy)
        if switch() == "off" and self.policy.mode != "atomic":
            return partial(_pass_on, hold=Hold(scope, key.value, 1, os.urandom(16)))
        subject = Subject(METHOD, name, b"", _JSON, self._likeness(bound, args, kwargs))
        asked = Asked(key, scope, principal, subject, self.policy)
        return partial(_guard, asked=asked, notes_replays=notes_replays)

    def _key(self, bound: inspect.BoundArguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
        if isinstance(self.key, str):
            bound.apply_defaults()
            value = bound.arguments[self.key]
        else:
            value = self.key(*args, **kwargs)
        if value is None or value == "":
            raise KeyMissing(
                f"The key of this call of {self.name} is {value!r}. Give every operation a key of its own."
            )
        if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool)):
            value = str(value)
        if not isinstance(value, str):
            raise ConfigurationError(f"The key of {self.name} must be a string, not {type(value).__name__}.")
        if len(value) > self.policy.max_key_length:
            # Never truncated: two keys could become one.
            raise KeyInvalid(
                f"The key of this call of {self.name} has {len(value)} characters, "
                f"and at most {self.policy.max_key_length} are kept. Give a digest of it."
            )
        return Key(value)

    def _principal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        if isinstance(self.scope, str):
            principal: object = self.scope
        else:
            principal = self.scope(None) if isinstance(self.scope, SingleTenant) else self.scope(*args, **kwargs)
        try:
            return principal_of(principal)
        except ScopeMissing:
            message = f"scope of {self.name} returned {principal!r}. It must return the owner of the key."
            raise ScopeMissing(message) from None

    def _likeness(self, bound: inspect.BoundArguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        if self.compare is None:
            return b""
        if callable(self.compare):
            return written(self._form("what compare returned", self.compare(*args, **kwargs)))
        own = {name: value for name, value in bound.arguments.items() if self._counts(name, value, bound)}
        return written({name: self._form(f"the argument {name!r}", value) for name, value in own.items()})

    def _counts(self, name: str, value: object, bound: inspect.BoundArguments) -> bool:
        parameters = bound.signature.parameters
        if name in OWNERS and name == next(iter(parameters)):
            return False
        # An argument at its default does not count, so that a parameter can be added while retries are under way.
        default = parameters[name].default
        is_default = value is default or (
            isinstance(value, _SIMPLE) and type(value) is type(default) and value == default
        )
        is_nothing_more = parameters[name].kind in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        return not is_default and not (is_nothing_more and not value)

    def _form(self, what: str, value: object) -> Any:
        try:
            return form_of(value)
        except CantBeWritten as error:
            parameters = ", ".join(self.signature.parameters)
            raise ConfigurationError(
                f"{self.name}: {what} holds a {error}, which can't be compared with a retry's. Give "
                "compare=, a function of the same arguments that returns what must be the same "
                f"(compare=lambda {parameters}: […]); or compare=None, to compare the key alone."
            ) from None


async def _guard(ports: GuardPorts, *, asked: Asked, notes_replays: bool) -> Reply:
    return await guard(ports, asked, os.urandom(16), notes_replays=notes_replays)


async def _pass_on(_ports: GuardPorts, *, hold: Hold) -> Reply:
    """Call the function: its guard is switched off."""
    return PassOn(hold)

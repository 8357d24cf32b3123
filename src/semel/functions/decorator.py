"""``idempotent`` and ``once``. The arguments are checked here; the guard itself is elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, cast

from semel.core.policy import FINAL_STATUSES, Policy
from semel.core.record import OnCrash
from semel.core.scope import SINGLE_TENANT
from semel.errors import ConfigurationError
from semel.functions.calls import AsyncFunctionCall, FunctionCall
from semel.functions.guards import async_guard_at, guard_at
from semel.functions.job import Compare, Job, Owner
from semel.functions.names import Function, is_async, name_of, owner_of, signature_of
from semel.functions.results import Codec, Results
from semel.functions.typed import Form, Unwritable, form_of_result
from semel.guard.request import switch

P = ParamSpec("P")
R = TypeVar("R")
#: The arguments that are passed on.
Args = TypeVarTuple("Args")

#: Queues and operators retry later than HTTP clients do.
RETENTION = timedelta(days=30)
#: A one-off must never run again: longer than any script is kept.
ONE_OFF_RETENTION = timedelta(days=3650)

#: The attribute of a guarded function with the name that its keys are kept under.
_MARK = "__semel_name__"

#: The fields of a policy that need a request, and the values that do not.
_WITHOUT_A_REQUEST: dict[str, tuple[object, ...]] = {
    "enforcement": ("enforce",),
    "in_progress": ("conflict", "wait"),
    "key_from": (None,),
    "store_request": (False,),
}


def idempotent(
    *,
    key: str | Function,
    scope: Owner = SINGLE_TENANT,
    store: Any = None,
    name: str | None = None,
    compare: Compare = "arguments",
    keep: type[Exception] | Iterable[type[Exception]] = (),
    codec: Codec | None = None,
    policy: Policy | None = None,
    retention: timedelta | None = None,
    lease: timedelta | None = None,
    on_crash: OnCrash | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function once for each key, and return its first result to every later call.

    *key* is the name of a parameter, or a function of the same arguments; *scope* is a string, or such a function. Keys
    are kept under the scope and the function's *name*. *store* is a URL, a store, an engine or a pool; else it is
    ``SEMEL_STORE``. *compare* says what must be the same on a retry. An exception frees the key, unless it is one
    of *keep*.
    """
    policy = _policy(policy, RETENTION, compare, retention=retention, lease=lease, on_crash=on_crash)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        is_awaited = is_async(function)
        job = _job(function, name, policy, key=key, scope=scope, compare=compare, keep=keep, codec=codec)
        decorated = _async_guarded(job, store) if is_awaited else _guarded(job, store)
        return cast("Callable[P, R]", decorated)

    return decorate


def once(
    key: str,
    function: Callable[[*Args], R],
    /,
    *args: *Args,
    scope: Owner = SINGLE_TENANT,
    store: Any = None,
    name: str | None = None,
    compare: Compare = "arguments",
    keep: type[Exception] | Iterable[type[Exception]] = (),
    codec: Codec | None = None,
    policy: Policy | None = None,
    retention: timedelta | None = None,
    lease: timedelta | None = None,
    on_crash: OnCrash | None = None,
) -> R:
    """Call ``function(*args)`` once for *key*; return its first result to every later call.

    Await it if *function* is ``async def``. The other arguments are those of ``idempotent``.
    """
    policy = _policy(policy, ONE_OFF_RETENTION, compare, retention=retention, lease=lease, on_crash=on_crash)
    is_awaited = is_async(function)
    call: partial[R] = function if isinstance(function, partial) else partial(cast("Callable[..., R]", function))

    def the_key(*_args: Any, **_kwargs: Any) -> str:
        return key

    job = _job(call.func, name, policy, key=the_key, scope=scope, compare=compare, keep=keep, codec=codec)
    decorated = _async_guarded(job, store) if is_awaited else _guarded(job, store)
    return cast("R", decorated(*call.args, *args, **call.keywords))


def _guarded(job: Job, given: Any) -> Function:
    @wraps(job.function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        guard = guard_at(given)
        flow = job.flow(args, kwargs, notes_replays=guard.store.notes_replays)
        return FunctionCall(guard, job.results, partial(job.function, *args, **kwargs)).run(flow)

    setattr(guarded, _MARK, job.name)
    return guarded


def _async_guarded(job: Job, given: Any) -> Function:
    @wraps(job.function)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        guard = await async_guard_at(given)
        flow = job.flow(args, kwargs, notes_replays=guard.store.notes_replays)
        return await AsyncFunctionCall(guard, job.results, partial(job.function, *args, **kwargs)).run(flow)

    setattr(guarded, _MARK, job.name)
    return guarded


def _job(
    function: Function,
    name: str | None,
    policy: Policy,
    *,
    key: str | Function,
    scope: Owner,
    compare: Compare,
    keep: type[Exception] | Iterable[type[Exception]],
    codec: Codec | None,
) -> Job:
    owner = owner_of(function) if name is None else None
    name = name_of(function, name)
    if getattr(function, _MARK, None) == name:
        raise ConfigurationError(
            f"{name} is guarded already, and would wait for itself. Call it as it is, or give another name=."
        )
    kinds: tuple[Any, ...] = (keep,) if isinstance(keep, type) else tuple(keep)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise ConfigurationError(f"keep must be exceptions, such as keep=(ValueError,), not {keep!r}.")
    if codec is not None and not (hasattr(codec, "encode") and hasattr(codec, "decode")):
        raise ConfigurationError("codec must have encode(result) -> bytes and decode(bytes) -> result.")
    results = Results(name, codec, kinds, policy.mode == "atomic", _form(function, name, codec))
    return Job(function, signature_of(function), name, key, scope, compare, policy, results, owner)


def _form(function: Function, name: str, codec: Codec | None) -> Form | None:
    try:
        return form_of_result(function)
    except Unwritable as kind:
        if codec is not None:
            return None
        raise ConfigurationError(
            f"{name} is annotated to return {kind}, which does not come back from JSON as it was. Return text, "
            "numbers, Decimal, dates, UUID, enums, lists, tuples, dictionaries with strings as names, dataclasses or "
            "models of pydantic; or give codec=, which can write and read it."
        ) from None


def _policy(
    given: Policy | None, usual_retention: timedelta, compare: Compare, **said: timedelta | OnCrash | None
) -> Policy:
    if given is not None and not isinstance(given, Policy):
        raise ConfigurationError(f"policy must be a Policy, such as Policy.ietf(), not {given!r}.")
    switch()  # A wrong value is an error here, and not at the first call.
    policy = Policy(retention=usual_retention) if given is None else given
    for field, possible in _WITHOUT_A_REQUEST.items():
        value = getattr(policy, field)
        if value not in possible:
            raise ConfigurationError(f"Policy.{field} can't be {value!r} for a function: it needs a request.")
    if policy.may_accept:
        raise ConfigurationError('Policy.preferences can\'t have "respond-async" for a function: it needs a request.')
    changes: dict[str, Any] = {field: value for field, value in said.items() if value is not None}
    if compare is None:
        changes["fingerprint"] = None
    # For functions `keep` decides, and not statuses: an ending in it is kept, and every other one frees the key.
    return dataclasses.replace(
        policy, scope_by="operation", keep=FINAL_STATUSES, server_errors="keep", dialect="ietf", **changes
    )

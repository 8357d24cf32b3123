"""Where Django's ``ATOMIC_REQUESTS`` goes when a view is guarded: inside the guard.

Django would put it around the guard, and the guard's writes would be invisible to other requests until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction
from django.db.transaction import Atomic

from semel.core.policy import Policy
from semel.django import conf
from semel.stores.connections.endings import FAILED_INSIDE

F = TypeVar("F", bound=Callable[..., Any])

#: The attribute with the aliases on which a view wants no transaction, for Django.
MARK = "_non_atomic_requests"


class EveryAlias(set[str]):
    """The aliases that a view opted out of. For Django it has opted out of all, since the guard opens transactions."""

    def __contains__(self, alias: object) -> bool:
        """Every alias is in it."""
        return True


def opted_out(view: Any, request: Any = None) -> frozenset[str]:
    """Return the aliases on which *view* has no transaction, guarded or not: by a mark on itself, or on what the URL
    configuration has around it, where *request* came to it that way.
    """
    match = getattr(request, "resolver_match", None)
    return frozenset(alias for each in (view, match and match.func) for alias in iter(getattr(each, MARK, ())))


def see_to(view: F) -> F:
    """Tell Django that the guard opens the transactions of *view*."""
    setattr(view, MARK, EveryAlias(opted_out(view)))
    return view


def aliases(without: Collection[str]) -> list[str]:
    """Return the databases on which a request has a transaction, by Django's own rule."""
    each = connections.settings.items()
    return [alias for alias, entry in each if entry["ATOMIC_REQUESTS"] and alias not in without]


class Inner(Atomic):  # type: ignore[misc]  # Django has no types
    """The view's block inside the guard's transaction. It is rolled back alone, if the view raises an exception that is
    answered below 500: the answer is kept, and what the view wrote is not.

    Django would also roll it back silently if a statement has failed and the view has caught the error. Then an answer
    that reports success would be kept, without the writes that it reports.
    """

    def __init__(self) -> None:
        """On the database that keeps the records."""
        super().__init__(using=conf.settings().database, savepoint=True, durable=False)

    def __enter__(self) -> None:
        """Begin."""
        super().__enter__()
        self._before = connections[self.using].rollback_exc

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the block; raise if the view's writes were rolled back without its knowledge."""
        wrapper = connections[self.using]
        is_lost = error is None and wrapper.needs_rollback and wrapper.rollback_exc is not self._before
        super().__exit__(kind, error, trace)
        if is_lost:
            raise transaction.TransactionManagementError(FAILED_INSIDE) from wrapper.rollback_exc


def blocks(without: Collection[str], policy: Policy | None) -> AbstractContextManager[None]:
    """Return the transactions of a view, to be opened; *policy* is None if it is not guarded.

    In atomic mode there is one around them already.
    """
    wanted = aliases(without)
    inner = Inner() if policy is not None and policy.mode == "atomic" else None
    return _opened(wanted, inner) if wanted or inner is not None else nullcontext()


@contextmanager
def _opened(wanted: Collection[str], inner: Inner | None) -> Iterator[None]:
    with ExitStack() as stack:
        for alias in wanted:
            if inner is None or alias != inner.using:
                stack.enter_context(transaction.atomic(using=alias))
        if inner is not None:
            stack.enter_context(inner)
        yield


class AsyncBlocks:
    """The same for an async view: in the thread where Django runs its ORM."""

    def __init__(self, without: Collection[str], policy: Policy | None) -> None:
        """Nothing is open yet."""
        if aliases(without):
            # Django's own message for the same case.
            raise RuntimeError(
                "You cannot use ATOMIC_REQUESTS with async views. Mark it with transaction.non_atomic_requests."
            )
        self._wanted = policy is not None and policy.mode == "atomic"
        self._block: Any = None

    async def __aenter__(self) -> None:
        """Open them."""
        if self._wanted:
            self._block = Inner()
            await sync_to_async(self._block.__enter__)()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit them, or roll them back."""
        if self._block is not None:
            await sync_to_async(self._block.__exit__)(kind, error, trace)

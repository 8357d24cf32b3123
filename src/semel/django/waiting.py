"""Waiting for work that must not stop half-way, and for other requests. It decides nothing. Django cancels the task of
a request when its client hangs up.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

T = TypeVar("T")


def always() -> bool:
    """Return True."""
    return True


def nothing() -> None:
    """Do nothing."""


async def to_the_end(
    doing: Coroutine[Any, Any, T], *, if_: Callable[[], bool] = always, wake: Callable[[], None] = nothing
) -> T:
    """Wait for *doing* to its end, *if* it must not be stopped, even if this task is cancelled; then be cancelled.

    It can't go on in the background: the thread of this request, with its transaction, ends with the request. *wake*
    ends its wait for another request.
    """
    context = contextvars.copy_context()
    task = asyncio.get_running_loop().create_task(doing, context=context)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.done():
                break
            cancelled = error
            wake()
            if not if_():
                task.cancel()
        except BaseException:  # noqa: BLE001 - it is the task's own, and given below
            break
    for variable, value in context.items():
        # Context variables that were set (a language, a time zone) stay visible to the code around this call.
        if variable.get(None) is not value:
            variable.set(value)
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Retrieved, so that asyncio does not log it: no caller is left.
        raise cancelled
    return await task


async def close_connections() -> None:
    """Close Django's connections in the thread of this request before it waits; the next use opens them.

    Otherwise each of the many threads under an event loop would keep one. One in a transaction (of a test) stays.
    """
    await sync_to_async(_close_connections)()


def _close_connections() -> None:
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:
            wrapper.close()

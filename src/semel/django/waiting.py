"""Waiting for what must not be left half-way, and for other requests. Django cancels the task of a request whose client
has hung up.
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
    """Whatever happens."""
    return True


def nothing() -> None:
    """Leave it at that."""


async def to_the_end(
    doing: Coroutine[Any, Any, T], *, if_: Callable[[], bool] = always, wake: Callable[[], None] = nothing
) -> T:
    """Wait for *doing* to its end, whoever cancels us meanwhile, *if* it must not be stopped; then be cancelled.

    Not leaving it to itself: the thread of this request, with its transaction in it, ends with the request. *wake* ends
    what it waits for, where that is another request.
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
        # What was set on the way (a language, a time zone) is seen by whoever is around us, as if we were not there.
        if variable.get(None) is not value:
            variable.set(value)
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Seen: nobody is there to be told.
        raise cancelled
    return await task


async def close_connections() -> None:
    """Close Django's connections in the thread of this request, since it is about to wait; the next use opens them.

    Of its many threads under an event loop each would keep one. One that is in a transaction (of a test) stays.
    """
    await sync_to_async(_close_connections)()


def _close_connections() -> None:
    for wrapper in connections.all(initialized_only=True):
        if not wrapper.in_atomic_block:
            wrapper.close()

"""A future that outlives the task that waits for it. It does not know what resolves it.

Cancelling a task cancels the future it waits for, and with it the answer. ``asyncio.shield`` prevents that at the price
of a second future and a second turn of the loop, on every statement of every request. A step is waited for directly;
only when its waiter is cancelled does the outcome go elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Step(asyncio.Future[T]):
    """Something that is under way, and goes on whether or not a task waits for it."""

    #: Where the outcome goes once the waiter was cancelled.
    heir: asyncio.Future[T] | None = None
    #: Waited for by the application's own code, inside of a flow's: ``guard/running`` says so.
    is_theirs = False

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the outcome. One who is resumed after the first waiter was cancelled gets it all the same."""
        if not self.done():
            self._asyncio_future_blocking = True
            yield self
        return self.result() if self.heir is None else self.heir.result()

    def cancel(self, msg: Any | None = None) -> bool:
        """Let the waiter go, and keep the outcome for the task that takes its place."""
        if self.done():
            return False
        self.heir = self.get_loop().create_future()
        return super().cancel(msg)

    def abandon(self) -> None:
        """Say that there will be no outcome."""
        if self.heir is not None:
            self.heir.cancel()
        else:
            super().cancel()

    def settle(self, outcome: T | Exception) -> None:
        """Say what came of it; an exception is raised to the waiter. Nothing happens if it was said before."""
        answer: asyncio.Future[T] = self if self.heir is None else self.heir
        if answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

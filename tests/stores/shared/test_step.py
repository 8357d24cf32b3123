"""A future that outlives whoever waits for it."""

import asyncio
from typing import Any

import pytest

from semel.stores.step import Step


async def waiting_for(step: Step[Any]) -> "asyncio.Task[Any]":
    async def wait() -> Any:
        return await step

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_outcome_reaches_its_waiter() -> None:
    """Whoever waits gets the value, or has the exception raised."""
    value, error = Step[int](), Step[int]()
    value.settle(1)
    error.settle(OSError("gone"))
    assert await value == 1
    with pytest.raises(OSError, match="gone"):
        await error


async def test_cancelled_waiter_leaves_the_outcome_to_an_heir() -> None:
    """A waiter that is cancelled goes at once; the outcome goes to the heir."""
    step = Step[int]()
    waiter = await waiting_for(step)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert step.heir is not None
    step.settle(1)
    assert await step.heir == 1


async def test_settled_step_has_no_heir() -> None:
    """A step that is settled can't be cancelled or settled again."""
    step = Step[int]()
    step.settle(1)
    step.settle(2)
    assert not step.cancel()
    assert step.heir is None
    assert await step == 1


@pytest.mark.parametrize("was_cancelled", [False, True])
async def test_abandoned_step_has_no_outcome(was_cancelled: bool) -> None:
    """An abandoned step is cancelled for its waiter and for its heir, and can't be settled any more."""
    step = Step[int]()
    if was_cancelled:
        step.cancel()
    step.abandon()
    step.settle(1)
    with pytest.raises(asyncio.CancelledError):
        await (step.heir or step)

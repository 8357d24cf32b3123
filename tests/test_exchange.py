"""A guarded call's handler, and who tells it that it has lost its lease."""

import asyncio
import threading
from datetime import timedelta
from functools import partial

from semel.core.commands import Renew
from semel.core.record import Hold
from semel.exchange.loops import _stop
from semel.operation import Operation
from semel.stores.keeper import Keeper
from tests.web.harness import HANG_SECONDS


def test_a_loop_that_ended_before_its_handler_was_told() -> None:
    """Where loops come and go with the requests, one that has ended does not stop the leases of the others."""

    async def handle() -> asyncio.Task[None] | None:
        return asyncio.current_task()

    task = asyncio.run(handle())
    assert task is not None
    lost, kept = (Hold("scope", name, 1, name.encode() * 16) for name in "ab")
    renewed = threading.Event()

    def renew(command: Renew) -> frozenset[Hold]:
        holds = {hold for hold, _ in command.holds}
        if lost not in holds:
            renewed.set()
        return frozenset({lost} & holds)

    keeper = Keeper(renew)
    keeper.add(lost, timedelta(seconds=0.03), partial(_stop, Operation(lost), task))
    keeper.add(kept, timedelta(seconds=0.03))
    assert renewed.wait(HANG_SECONDS)
    keeper.close()

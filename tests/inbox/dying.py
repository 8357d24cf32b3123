"""A consumer's process that dies at a place of the test's choice: ``python -m tests.inbox.dying KIND URL PLACE``.

It takes one delivery of one message, and prints what it would tell the broker: only what is printed was acked.
"""

import asyncio
import os
import signal
import sys
from typing import Any

from sqlalchemy import text

from semel.inbox import AsyncInbox, Inbox
from semel.stores.transaction import AsyncTransaction, Transaction

MESSAGE = "m-1"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying:
    """Dies before or after COMMIT, in the handler, or not at all."""

    def __init__(self, place: str) -> None:
        self.place = place

    def at(self, place: str) -> None:
        if self.place == place:
            die()

    def write(self, connection: Any) -> Any:
        sql = f"INSERT INTO parcels VALUES ('{MESSAGE}')"
        return connection.execute(text(sql) if type(connection).__module__.startswith("sqlalchemy") else sql)


def receive(url: str, dying: Dying) -> None:
    def ship(connection: Any) -> None:
        dying.write(connection)
        dying.at("in the handler")

    perform = Transaction.perform

    def watched(self: Transaction, command: Any) -> Any:
        if type(command).__name__ == "CommitAlone":
            dying.at("before COMMIT")
        return perform(self, command)

    Transaction.perform = watched  # type: ignore[method-assign]
    verdict = Inbox(url, consumer="billing").receive(MESSAGE, ship)
    dying.at("before the ack")
    sys.stdout.write(f"{type(verdict).__name__} {verdict.ack}")


async def receive_async(url: str, dying: Dying) -> None:
    async def ship(connection: Any) -> None:
        done = dying.write(connection)
        if hasattr(done, "__await__"):
            await done
        dying.at("in the handler")

    perform = AsyncTransaction.perform

    def watched(self: AsyncTransaction, command: Any) -> Any:
        if type(command).__name__ == "CommitAlone":
            dying.at("before COMMIT")
        return perform(self, command)

    AsyncTransaction.perform = watched  # type: ignore[method-assign]
    async with AsyncInbox(url, consumer="billing") as inbox:
        verdict = await inbox.receive(MESSAGE, ship)
        dying.at("before the ack")
        sys.stdout.write(f"{type(verdict).__name__} {verdict.ack}")


if __name__ == "__main__":
    _, colour, where, place = sys.argv
    if colour == "async":
        asyncio.run(receive_async(where, Dying(place)))
    else:
        receive(where, Dying(place))

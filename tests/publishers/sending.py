"""Messages to publish, and publishers that are opened and closed. It looks at no broker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from semel.core.outbox import Delivered, Message, Unreachable, Verdict
from semel.publishers import Publisher, publisher

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
#: A Tuesday in 2026.
CREATED_AT = 1_777_000_000.25


def message(**fields: Any) -> Message:
    """Make a message with an id of its own."""
    usual = Message(id=str(uuid4()), type="order.paid", to="events", payload=b'{"order": 17}', created_at=CREATED_AT)
    return replace(usual, **fields)


def full_message(**fields: Any) -> Message:
    """Make a message that has everything a message can have."""
    headers = (("tenant", "blue"), ("greeting", "grüß dich"))
    given = {"key": "order-17", "headers": headers, "traceparent": TRACE, "content_type": "application/vnd.shop+json"}
    return message(**{**given, **fields})


def kinds(verdicts: Sequence[Verdict]) -> list[str]:
    return [type(verdict).__name__ for verdict in verdicts]


def delivered(messages: Sequence[Message], verdicts: Sequence[Verdict]) -> set[str]:
    """Return the ids of those that were confirmed."""
    pairs = zip(messages, verdicts, strict=True)
    return {each.id for each, verdict in pairs if isinstance(verdict, Delivered)}


def reason(verdict: Verdict) -> str:
    assert not isinstance(verdict, Delivered)
    assert verdict.reason.isprintable()
    return verdict.reason


@asynccontextmanager
async def opened(given: Publisher | str, name: str = "events") -> AsyncIterator[Publisher]:
    """Open a publisher, or the one of a URL, and close it in the end."""
    made = publisher(name, given) if isinstance(given, str) else given
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def cut_off(made: Publisher, *, after: float = 0.0) -> None:
    """Publish many messages, and cancel it while they are under way."""
    task = asyncio.create_task(_publish_many(made))
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _publish_many(made: Publisher) -> None:
    await made.publish([message() for _ in range(200)])


async def through_a_death(
    made: Publisher, kill: Callable[[], None], start: Callable[[], None], *, batch: int = 100, before: int = 5
) -> tuple[set[str], set[str]]:
    """Publish batch after batch; after *before* of them kill the server in the middle of one, then start it again.

    Return the ids that were confirmed, and all: each message is published until it is confirmed.
    """
    confirmed: set[str] = set()
    everything: set[str] = set()
    deaths: Awaitable[None] | None = None
    is_lost = False
    number = 0
    while not is_lost or number < 2 * before:
        messages = [message() for _ in range(batch)]
        everything |= {each.id for each in messages}
        if number == before:
            deaths = asyncio.ensure_future(asyncio.to_thread(kill))
        while messages:
            verdicts = await made.publish(messages)
            assert set(kinds(verdicts)) <= {"Delivered", "Unreachable"}
            confirmed |= delivered(messages, verdicts)
            messages = [each for each in messages if each.id not in confirmed]
            if any(isinstance(verdict, Unreachable) for verdict in verdicts):
                assert deaths is not None
                if not is_lost:
                    await deaths
                    await asyncio.to_thread(start)
                is_lost = True
                await _until_open(made)
        number += 1
    return confirmed, everything


async def _until_open(made: Publisher) -> None:
    while True:
        try:
            await made.open()
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return

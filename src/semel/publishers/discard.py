"""A destination that confirms everything and keeps nothing (``discard://``): for measuring, and for switching one off.
Nothing is sent anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Message, Schedule, Verdict


class Discard:
    """Confirms every message."""

    schedule: Schedule = BROKER_SCHEDULE

    def __init__(self, name: str, url: str) -> None:
        """Take the place of destination *name*; the *url* says nothing more."""

    async def open(self) -> None:
        """Connect to nothing."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Confirm all of them."""
        return [Delivered()] * len(messages)

    async def close(self) -> None:
        """Do nothing."""

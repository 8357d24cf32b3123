"""The order of I/O of a relay: claim a batch, send it, write back what became of each message. It sends nothing itself.

A message is deleted only after its destination has confirmed it, so a crash at any point sends it again, under the same
id. Every write-back names the token of the claim: a relay that was paused past its lease changes nothing. Of one key,
a message is sent only when all before it were confirmed; the first that fails stops the rest of its key, and nothing
else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, assert_never

from semel.core.outbox import (
    Claimed,
    Delivered,
    Ending,
    Failed,
    Message,
    Rejected,
    Schedule,
    Unreachable,
    Verdict,
    waves,
)
from semel.core.value import value
from semel.errors import SemelError, StoreError, StoreUnavailable

#: How many messages are claimed at once: enough that two statements for each batch do not count.
MAX_BATCH = 500
#: How many bytes of payload: what a process can easily hold.
MAX_BATCH_BYTES = 8 * 1024 * 1024
#: A destination may ask for a longer pause than the schedule has, up to this.
MAX_RETRY_AFTER = timedelta(days=1)
#: Between the tries to write back: the batch was sent, and whatever is not written is sent again.
SETTLE_PAUSES = (timedelta(seconds=0.2), timedelta(seconds=1), timedelta(seconds=3))


@value
class RelayReport:
    """What came of one run of a relay."""

    to: str
    sent: int = 0
    #: Failed, and to be tried again.
    retried: int = 0
    #: Dead letters.
    dead: int = 0
    #: Taken and not tried: the relay is about to stop, or another of the same key has failed.
    released: int = 0
    #: Sent, but the lease had run out: another relay may have sent them as well.
    fenced: int = 0
    #: Why the destination gets a pause, if it does.
    unreachable: str | None = None
    #: Why the run ended early, if it did.
    error: SemelError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        counts = f"relayed to {self.to}: {self.sent} sent, {self.retried} to be tried again, {self.dead} dead"
        if self.fenced:
            counts += f", {self.fenced} fenced"
        if self.unreachable is not None:
            counts += f"; it can't be reached: {self.unreachable}"
        return counts + (f"; {self.error}" if self.error else "")

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.sent or self.retried or self.dead or self.unreachable or self.error)


class RelayPorts(Protocol):
    """What the flow may ask for."""

    schedule: Schedule

    @property
    def is_stopping(self) -> bool:
        """Whether nothing new is to be begun."""

    @property
    def batch(self) -> int:
        """How many messages to claim now: 0, while the destination is left alone; few, to try whether it is back."""

    async def claim(self, limit: int, *, aside: bool) -> Claimed:
        """Take messages, under a new token."""

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages, and keep their lease meanwhile. Never raises for what a publisher does."""

    async def keep(self) -> bool:
        """Renew the lease of the last claim, if that is due; return whether all of it is still held."""

    async def settle(self, endings: Sequence[Ending]) -> int:
        """Write back what became of the messages of the last claim; return how many were still held."""

    async def free(self) -> None:
        """Free messages that are behind nothing any more."""

    async def pause(self, duration: timedelta) -> None:
        """Wait."""

    def chance(self) -> float:
        """Return a random number between 0 and 1."""

    def note_reached(self, reason: str | None) -> None:
        """Take note that the destination could be reached; or else why it could not."""


class _Count:
    """The report in the making."""

    def __init__(self) -> None:
        self.sent = self.retried = self.dead = self.released = self.fenced = 0
        self.unreachable: str | None = None

    def add(self, endings: Sequence[Ending], held: int) -> None:
        ends = Counter(each.ending for each in endings)
        self.sent += ends["delivered"]
        self.retried += ends["failed"]
        self.dead += ends["dead"]
        self.released += ends["released"]
        self.fenced += len(endings) - held

    def report(self, to: str, error: SemelError | None = None) -> RelayReport:
        return RelayReport(to, self.sent, self.retried, self.dead, self.released, self.fenced, self.unreachable, error)


async def relay(ports: RelayPorts, to: str) -> RelayReport:
    """Send what is there, batch by batch, until nothing is left, or the destination can't be reached."""
    count = _Count()
    try:
        await ports.free()
        aside = False
        while not ports.is_stopping and (limit := ports.batch):
            claimed = await ports.claim(limit, aside=aside)
            if not claimed.messages and (aside or claimed.walked < limit) and not claimed.set_aside:
                break
            # Much of what was looked at waits for others of its key: out of the way with it.
            aside = claimed.walked >= limit and len(claimed.messages) <= limit // 2
            if not claimed.messages:
                continue
            await _send(ports, claimed.messages, count)
            if count.unreachable is not None:
                break
    except StoreError as error:
        return count.report(to, error)
    return count.report(to)


async def _send(ports: RelayPorts, messages: Sequence[Message], count: _Count) -> None:
    endings = await _published(ports, messages, count)
    if endings:
        ports.note_reached(count.unreachable)
    whole = [endings.get(message.id) or Ending(message.id, "released") for message in messages]
    held = await _settled(ports, whole)
    count.add(whole, len(whole) if held is None else held)


async def _published(ports: RelayPorts, messages: Sequence[Message], count: _Count) -> dict[str, Ending]:
    """Send what may be sent, wave by wave; return what became of it."""
    endings: dict[str, Ending] = {}
    stopped: set[str | None] = set()
    for wave in waves(messages):
        if ports.is_stopping:
            break
        if endings and not await ports.keep():
            break  # Another relay has the batch, and sends the rest of it.
        going = [message for message in wave if message.key not in stopped]
        verdicts = await ports.publish(going) if going else ()
        lost = next((verdict.reason for verdict in verdicts if isinstance(verdict, Unreachable)), None)
        for message, verdict in zip(going, verdicts, strict=True):
            endings[message.id] = ending = _ending(ports, message, verdict)
            if ending.ending != "delivered" and message.key is not None:
                stopped.add(message.key)
        if lost is not None:
            # One that has confirmed some of them is slow, or gone since: the next claim, of fewer, will tell.
            if not any(isinstance(verdict, Delivered) for verdict in verdicts):
                count.unreachable = lost
            break
    return endings


async def _settled(ports: RelayPorts, endings: Sequence[Ending]) -> int | None:
    """Write back; return how many were still held, or None where that can't be known."""
    for pause in SETTLE_PAUSES:
        try:
            return await ports.settle(endings)
        except StoreUnavailable:
            await ports.pause(pause)
    # What was written at an earlier time, with a lost reply, is not there any more, and was not lost to another.
    await ports.settle(endings)
    return None


def _ending(ports: RelayPorts, message: Message, verdict: Verdict) -> Ending:
    match verdict:
        case Delivered():
            return Ending(message.id, "delivered")
        case Rejected(reason):
            return Ending(message.id, "dead", error=reason)
        case Unreachable(reason):
            return Ending(message.id, "released", error=reason)
        case Failed(reason, retry_after):
            pause = ports.schedule.pause(message.attempts + 1, ports.chance())
            if pause is None:
                return Ending(message.id, "dead", error=reason)
            return Ending(message.id, "failed", max(pause, min(retry_after or pause, MAX_RETRY_AFTER)), reason)
        case _:
            assert_never(verdict)

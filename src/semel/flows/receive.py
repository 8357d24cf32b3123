"""One delivery of a message: the handler's writes and the receipt in one commit. What a receipt decides is in
``core/inbox.py``.

As in atomic mode, a transaction is open while the handler runs, and whatever ends this early undoes it: the database
ends the transaction of a process that dies, and nothing has happened. Failures are counted in a second transaction,
after the first was rolled back.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, Protocol

from semel.core.commands import ReapInbox
from semel.core.events import Happening, MessageParked, MessageReused, TryNotCounted
from semel.core.inbox import (
    Busy,
    Duplicate,
    Failed,
    Parked,
    Ran,
    Receipt,
    ReceiptState,
    Returned,
    Seen,
    Verdict,
    judge,
    said,
)
from semel.core.upkeep import MAX_BATCH
from semel.core.value import value
from semel.errors import (
    CommitUnknown,
    MessageDiffers,
    Overtaken,
    SemelError,
    StoreError,
    StoreNotReady,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from semel.flows.handle import COMPLETE_PAUSES
from semel.flows.ports import Ports
from semel.flows.upkeep import MAX_ROUNDS


class ReceivePorts(Protocol):
    """What receiving one message takes. All but ``pause`` is about one transaction at a time."""

    def open(self) -> Awaitable[None]:
        """Begin a transaction."""

    def look(self) -> Awaitable[Seen]:
        """Take the message's lock, without waiting for it, and read its receipt."""

    def call_inside(self) -> Awaitable[Any]:
        """Call the handler: ``Returned`` or ``Failed``. What this raises is not the handler's."""

    def note_done(self) -> Awaitable[Receipt | None]:
        """Write the receipt of a message that was handled; None: there is one already."""

    def note_failure(self, error: str, /) -> Awaitable[Receipt | None]:
        """Count a failed try, and park the message if it was the last; None: it was handled meanwhile."""

    def save(self) -> Awaitable[None]:
        """Commit."""

    def undo(self) -> Awaitable[None]:
        """Roll back, if a transaction is open. Never raises."""

    def pause(self, duration: timedelta, /) -> Awaitable[None]:
        """Wait."""

    def tell(self, happening: Happening, /) -> None:
        """Let people know."""


@value
class Delivery:
    """What is known of the message before its receipt is read."""

    consumer: str
    message_id: str
    #: Of the payload, if there is one to compare.
    digest: bytes | None = None


async def receive(ports: ReceivePorts, delivery: Delivery) -> Verdict[Any]:
    """Handle a message, unless it was handled before. A failure of the handler is raised, but for the last one."""
    try:
        return await _receive(ports, delivery)
    except MessageDiffers as differs:
        await ports.undo()
        ports.tell(MessageReused(delivery.message_id, delivery.consumer, differs.stored, differs.received))
        raise
    except Exception:
        # Whatever it was, nothing of this may be left open; where the transaction has ended this does nothing.
        await ports.undo()
        raise


async def _receive(ports: ReceivePorts, delivery: Delivery) -> Verdict[Any]:
    known = await _begin(ports, delivery)
    if known is not None:
        return known
    ending = await ports.call_inside()
    if isinstance(ending, Failed):
        await ports.undo()
        return await _fail(ports, delivery, ending)
    return await _end(ports, delivery, ending)


async def _begin(ports: ReceivePorts, delivery: Delivery) -> Duplicate | Busy | Parked | None:
    """Get the message's lock, with an open transaction, and return None; or the verdict, with none open."""
    await ports.open()
    known = judge(await ports.look(), delivery.digest)
    if known is None:
        # The first look may be older than the lock that it took: a rival may have committed in between.
        known = judge(await ports.look(), delivery.digest)
    if known is not None:
        await ports.undo()
    return known


async def _end(ports: ReceivePorts, delivery: Delivery, ending: Returned) -> Verdict[Any]:
    """Commit the receipt with what the handler wrote."""
    try:
        receipt = await ports.note_done()
        if receipt is None:
            await ports.undo()
            return Duplicate()
        try:
            await ports.save()
        except CommitUnknown as unknown:
            return await _settle(ports, ending, receipt, unknown)
    except Overtaken:
        # Under REPEATABLE READ or SERIALIZABLE: what the handler wrote is rolled back. Who was in the way?
        await ports.undo()
        known = await _begin(ports, delivery)
        await ports.undo()
        return known or Busy()
    except (StoreNotReady, StoreReadOnly, StoreRefused) as refused:
        await ports.undo()
        why = (
            "The receipt could be written before the handler and not after it: the handler has to set back what it SETs"
        )
        return await _fail(ports, delivery, Failed(StoreRefused(f"{why} (role, search_path, read only). {refused}")))
    except SemelError:
        raise
    except Exception as error:  # noqa: BLE001 - the application's own: a constraint that is checked at COMMIT
        await ports.undo()
        return await _fail(ports, delivery, Failed(error))
    return Ran(ending.result)


async def _settle(ports: ReceivePorts, ending: Returned, mine: Receipt, unknown: CommitUnknown) -> Ran[Any] | Duplicate:
    """Find out what became of a COMMIT without a reply. While its transaction may be under way, it has the lock."""
    for pause in (*COMPLETE_PAUSES, None):
        seen = await _look_again(ports)
        if seen is not None and seen.receipt is not None and seen.receipt.state is ReceiptState.DONE:
            return Ran(ending.result) if seen.receipt.mark == mine.mark else Duplicate()
        if seen is not None and seen.has_lock:
            raise StoreUnavailable(f"The transaction was rolled back: {unknown}")
        if pause is not None:
            await ports.pause(pause)
    raise unknown


async def _look_again(ports: ReceivePorts) -> Seen | None:
    """Look in a transaction of its own; None: the store can't be asked."""
    try:
        await ports.open()
        seen = await ports.look()
        if seen.has_lock:
            seen = await ports.look()
    except StoreError:
        seen = None
    await ports.undo()
    return seen


async def _fail(ports: ReceivePorts, delivery: Delivery, ending: Failed) -> Verdict[Any]:
    """Count the try, and raise its error; return the verdict where there are to be no more tries."""
    error = ending.error
    try:
        known = await _begin(ports, delivery)
        if known is not None and not isinstance(known, Busy):
            return known  # A rival has handled it, and may have been why this one failed.
        if known is None and ending.counts:
            receipt = await ports.note_failure(said(error))
            await ports.save()
            if receipt is None:
                return Duplicate()
            if receipt.state is ReceiptState.PARKED:
                _tell_parked(ports, delivery, receipt)
                return Parked(receipt.attempts, receipt.error)
    except StoreError as trouble:
        ports.tell(TryNotCounted(delivery.message_id, delivery.consumer, str(trouble)))
    raise error


def _tell_parked(ports: ReceivePorts, delivery: Delivery, receipt: Receipt) -> None:
    ports.tell(MessageParked(delivery.message_id, delivery.consumer, receipt.attempts, receipt.error or ""))


@value
class InboxReport:
    """What came of one run of the inbox's reaper."""

    deleted: int = 0
    #: Why the run ended early, if it did.
    error: StoreError | None = None

    def __str__(self) -> str:
        """Say it in one line."""
        return f"reaped the inbox: {self.deleted} receipts deleted" + (
            f"; then it ended: {self.error}" if self.error else ""
        )

    @property
    def is_idle(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.deleted or self.error)


async def reap_inbox(ports: Ports, retention: timedelta, batch: int = MAX_BATCH) -> InboxReport:
    """Delete the receipts of handled messages that are older than *retention*, *batch* at a time. Those of messages
    that fail, or are parked, stay.
    """
    deleted = 0
    try:
        for _ in range(MAX_ROUNDS):
            count = await ports.ask(ReapInbox(batch, retention))
            deleted += count
            if count < batch:
                break
    except StoreError as error:
        return InboxReport(deleted, error)
    return InboxReport(deleted)

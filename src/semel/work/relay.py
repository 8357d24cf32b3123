"""The relay: sends the messages of the outbox to one destination. Which publisher does, ``publishers/`` says.

Any number of relays may serve the same destination at once, in any number of processes. Polling is the truth: a relay
looks every second, and soon again after it was busy; PostgreSQL and SQLite wake it earlier, where they can.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from semel.core.cursor import AFRESH_EVERY, Cursor
from semel.core.events import Relayed
from semel.core.message import one_line
from semel.core.outbox import (
    Claimed,
    Delivered,
    Ending,
    Failed,
    Message,
    Pace,
    Rejected,
    Schedule,
    Unreachable,
    Verdict,
    breaker_pause,
    check_name,
)
from semel.errors import ConfigurationError
from semel.flows.relay import MAX_BATCH, MAX_BATCH_BYTES, RelayReport, relay
from semel.publishers.base import Publisher
from semel.stores import AsyncStore
from semel.stores.dialect import messages_of
from semel.stores.outbox import OutboxStatements, Statements, carry_out
from semel.telemetry.stream import count, sinks
from semel.work.loops import LoopThread
from semel.work.service import S_co, StoreService
from semel.work.wakeup import AsyncWakeup, Wakeup
from semel.work.waking import NoWaker, waker_of

T = TypeVar("T")

#: How long a relay has a batch before others may take it. It is renewed while the batch is being sent.
LEASE = timedelta(seconds=30)
#: How often the destination may end the connection while it has one message alone, before that message is to blame.
MAX_DROPS = 3
#: How long such a message waits at least: longer than its destination is left alone, so that others come first.
DROPPED_PAUSE = timedelta(minutes=1)
#: How long a publisher may take for the messages of one call, unless it has a ``limit`` of its own. One that has ends a
#: call by itself, and says what was confirmed until then.
PUBLISH_LIMIT = timedelta(seconds=30)
#: A call that has not ended after so many times its publisher's own limit hangs, and is given up.
_PATIENCE = 3
#: How soon to look again when there was nothing, in seconds: soon after work, and every second when idle.
POLLS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
#: How often to look for messages that were set aside and are behind nothing any more.
FREE_EVERY = 5.0
#: How many keys are looked at then.
MAX_FREED_KEYS = 100
#: How many messages that were kept are deleted in one statement.
MAX_REAPED = 1000
#: How many messages are suspected at the same time.
MAX_SUSPECTS = 1000
#: What a publisher raises when the connection that it had was ended. One that was refused was none.
_DROPS = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
#: A reason is a line in a table.
MAX_REASON = 500

_logger = logging.getLogger("semel")


class Relay(StoreService[S_co, RelayReport]):
    """Relays to one destination."""

    name = "relay"

    def __init__(
        self,
        store: S_co,
        to: str,
        publisher: Publisher,
        *,
        lease: timedelta = LEASE,
        batch: int = MAX_BATCH,
        keep: timedelta | None = None,
        publish_limit: timedelta | None = None,
        turn: timedelta = timedelta.max,
        is_woken: bool = True,
    ) -> None:
        """Send the messages of *store* that are *to* this destination, by *publisher*. With *keep*, what was sent stays
        in the table for so long. After *turn* a run claims no more, so that others may have theirs. One that is not
        woken by the database takes no connection for that, and polls.
        """
        super().__init__(store, timedelta(seconds=POLLS[-1]))
        if lease <= timedelta():
            raise ConfigurationError("lease is longer than nothing.")
        self.to = check_name("A destination", to)
        self.schedule: Schedule = publisher.schedule
        self._statements = OutboxStatements(messages_of(store, "outbox"))
        self.publisher = publisher
        self._lease = lease
        self._batch = batch
        self._keep = keep
        own: timedelta = getattr(publisher, "limit", publish_limit or PUBLISH_LIMIT)
        self._limit = publish_limit or max(PUBLISH_LIMIT, _PATIENCE * own)
        self._own_limit = own.total_seconds()
        self._pace = Pace(batch, MAX_BATCH_BYTES, getattr(publisher, "batch", 1))
        self._turn = turn.total_seconds()
        #: When this run claims no more; None: it has not begun to.
        self._turn_ends: float | None = None
        self._cursor = Cursor()
        self._is_open = False
        self._token = b""
        #: What the last claim took, and since when its lease runs.
        self._held: list[str] = []
        self._renewed_at = 0.0
        self._is_stopping = False
        #: How often in a row the destination could not be reached, and until when it is left alone.
        self._failures = 0
        self._alone_until = 0.0
        self._suspects = _Suspects()
        self._idle_runs = 0
        self._freed_at = float("-inf")
        self._freed_key = ""
        #: After which time, of the store's clock, kept messages are reaped; and when that is begun afresh.
        self._reaped_to = 0.0
        self._afresh_at = float("-inf")
        self._loop = None if isinstance(store, AsyncStore) else LoopThread()
        self.wakeup: Wakeup | AsyncWakeup = AsyncWakeup() if isinstance(store, AsyncStore) else Wakeup()
        self._waker = waker_of(store, to, self.wakeup.wake) if is_woken else NoWaker()

    @property
    def interval(self) -> timedelta:
        """How long until the next look."""
        if (left := self._alone_until - time.monotonic()) > 0:
            return timedelta(seconds=min(left, POLLS[-1]))
        return timedelta(seconds=POLLS[min(self._idle_runs, len(POLLS) - 1)])

    @property
    def is_left_alone(self) -> bool:
        """Whether the destination could not be reached, and gets a pause."""
        return time.monotonic() < self._alone_until

    @property
    def safe_place(self) -> int:
        """The number in the queue up to which nothing is left."""
        return self._cursor.safe

    def stop(self) -> None:
        """Begin nothing new: what was taken and not begun is handed back."""
        self._is_stopping = True

    async def flow(self, ports: Relay[Any]) -> RelayReport:
        """Send what is there now."""
        await self._waker.wake_up()
        report = await self._relay(ports)
        # A database that is down is not asked two hundred times a second.
        self._idle_runs = self._idle_runs + 1 if report.is_idle or report.error is not None else 0
        if report.error is not None:
            # The server may be another one now.
            self._cursor.reset(time.monotonic())
        if report.is_idle and self._idle_runs >= len(POLLS) - 1 and await self._waker.fall_asleep():
            # What was added just before is not told to others: one more look.
            again = await self._relay(ports)
            if not again.is_idle:
                self._idle_runs = 0
                return again
        return report

    async def _relay(self, ports: Relay[Any]) -> RelayReport:
        self._turn_ends = None
        report = await relay(ports, self.to)
        if sinks():
            count(Relayed(self.to, report.sent, report.retried, report.dead, report.fenced))
        return report

    async def let_go(self) -> None:
        """Disconnect from the destination."""
        await self._waker.close()
        if self._is_open:
            self._is_open = False
            await self._on_loop(self.publisher.close(), self._limit.total_seconds())
        if self._loop is not None:
            self._loop.close()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing new is to be begun."""
        return self._is_stopping

    @property
    def batch(self) -> int:
        """How many messages to claim now."""
        is_over = self._turn_ends is not None and time.monotonic() >= self._turn_ends
        if self.is_left_alone or is_over:
            return 0
        if self._failures:
            # With those that may be to blame, another one: they are, if that gets through.
            return min(self._batch, 1 + len(self._suspects.unproven))
        return self._pace.count

    async def claim(self, limit: int, *, aside: bool) -> Claimed:
        """Take messages, under a new token."""
        self._token = secrets.token_bytes(16)
        began = time.monotonic()
        if self._turn_ends is None:
            self._turn_ends = began + self._turn
        start, due_from = self._cursor.start(began), self._cursor.start_of_due(began)
        claimed = await self._ask(
            self._statements.claim(
                self.to,
                self._token,
                self._lease,
                limit,
                after=start,
                due_from=due_from,
                floor=self._cursor.safe,
                bytes=MAX_BATCH_BYTES if self._failures else self._pace.size,
                aside=aside,
            )
        )
        self._held, self._renewed_at = [message.id for message in claimed.messages], began
        if claimed.walk is not None:
            ended = time.monotonic()
            self._cursor.note(start, claimed.walk, began, ended)
            self._cursor.note_due(due_from, claimed.walk, began, ended)
        return claimed

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send messages, and keep their lease meanwhile; those that may be to blame for lost connections or silence
        alone, after the others.
        """
        if len(messages) == 1:
            return [self._suspects.judged(messages[0], (await self._published(messages))[0])]
        others = [message for message in messages if message.id not in self._suspects]
        if len(others) == len(messages):
            return await self._published(messages)
        others = others or [messages[-1]]
        verdicts = dict(zip((each.id for each in others), await self.publish(others), strict=True))
        lost = next((each for each in verdicts.values() if isinstance(each, Unreachable)), None)
        is_there = any(isinstance(each, Delivered) for each in verdicts.values())
        for message in messages:
            if message.id not in verdicts:
                await self.keep()
                verdict = lost or (await self._published([message]))[0]
                verdicts[message.id] = lost or self._suspects.judged(message, verdict, is_there=is_there)
        return [verdicts[message.id] for message in messages]

    async def _published(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        began = time.monotonic()
        verdicts = await self._judged(messages)
        self._pace.note(messages, verdicts, (time.monotonic() - began) / self._own_limit)
        return verdicts

    async def _judged(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        try:
            return await self._sent(messages)
        except (OSError, TimeoutError) as error:
            is_dropped = self._is_open and isinstance(error, _DROPS)
            is_late = self._is_open and isinstance(error, TimeoutError)
            self._is_open = False
            return [Unreachable(_reason(error), is_dropped=is_dropped, is_late=is_late)] * len(messages)
        except (ConfigurationError, ImportError) as error:
            # It never will be, until a person has corrected it: no message is to pay for that.
            self._is_open = False
            return [Unreachable(_reason(error))] * len(messages)
        except Exception as error:  # a publisher's own fault, or one message's
            if len(messages) == 1:
                _logger.exception("The publisher of %s failed.", self.to)
                return [Failed(_reason(error))]
        verdicts: list[Verdict] = []
        for message in messages:
            await self.keep()
            verdicts += await self.publish([message])
        return verdicts

    async def keep(self) -> bool:
        """Renew the lease of the batch, if that is due; return whether all of it is still held."""
        if time.monotonic() - self._renewed_at < self._lease.total_seconds() / 3:
            return True
        return await self._renewed()

    async def settle(self, endings: Sequence[Ending]) -> int:
        """Write back what became of the messages of the last claim."""
        return await self._ask(self._statements.settle(self.to, self._token, endings, keep=self._keep is not None))

    async def free(self) -> None:
        """Free messages that are behind nothing any more, and delete those that were kept for long, now and then."""
        now = time.monotonic()
        if now - self._freed_at < FREE_EVERY:
            return
        self._freed_at = now
        last, _ = await self._ask(self._statements.free(self.to, self._freed_key, MAX_FREED_KEYS))
        self._freed_key = last or ""
        if self._keep is not None:
            await self._reap(self._keep, now)

    async def _reap(self, keep: timedelta, now: float) -> None:
        if now >= self._afresh_at:
            self._afresh_at, self._reaped_to = now + AFRESH_EVERY, 0.0
        reaped = MAX_REAPED
        while reaped == MAX_REAPED:
            asked = self._statements.reap(self.to, keep, MAX_REAPED, self._reaped_to)
            reaped, self._reaped_to = await self._ask(asked)

    async def pause(self, duration: timedelta) -> None:
        """Wait."""
        if self._loop is None:
            await asyncio.sleep(duration.total_seconds())
        else:
            time.sleep(duration.total_seconds())  # noqa: ASYNC251 - there is no loop in this thread

    def chance(self) -> float:
        """Return a random number."""
        return random.random()  # noqa: S311 - no secret

    def note_reached(self, reason: str | None) -> None:
        """Take note that the destination could be reached; or else why it could not."""
        if reason is None:
            if self._failures:
                _logger.info("%s can be reached again.", self.to)
            self._failures = 0
            return
        self._failures += 1
        pause = breaker_pause(self._failures)
        self._alone_until = time.monotonic() + pause.total_seconds()
        log = _logger.warning if self._failures == 1 else _logger.info
        log("%s can't be reached, and is left alone for %g s: %s", self.to, pause.total_seconds(), reason)

    async def _sent(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        verdicts = await self._keeping(self._opened_and_sent(messages))
        if len(verdicts) != len(messages):
            raise TypeError(f"{type(self.publisher).__name__}.publish returned {len(verdicts)} verdicts, not one each.")
        return [_checked(verdict, self.publisher) for verdict in verdicts]

    async def _opened_and_sent(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        async with asyncio.timeout(self._limit.total_seconds()):
            if not self._is_open:
                await self.publisher.open()
                self._is_open = True
            verdicts = await self.publisher.publish(messages)
        if any(isinstance(verdict, Unreachable) for verdict in verdicts):
            self._is_open = False
        return verdicts

    async def _keeping(self, sending: Coroutine[Any, Any, T]) -> T:
        """Wait for *sending*, and renew the lease of the whole batch as long as it takes."""
        every = self._lease.total_seconds() / 3
        if self._loop is None:
            task = asyncio.ensure_future(sending)
            try:
                while not (await asyncio.wait([task], timeout=every))[0]:
                    await self._renewed()
            except BaseException:
                task.cancel()
                raise
            return task.result()
        running = self._loop.start(sending)
        while not self._loop.is_done(running, every):
            await self._renewed()
        return running.result()

    async def _renewed(self) -> bool:
        began = time.monotonic()
        try:
            held = await self._ask(self._statements.renew(self._held, self._token, self._lease))
        except Exception as error:  # noqa: BLE001 - what is sent meanwhile may still be written back
            _logger.warning("The lease of messages to %s could not be renewed: %s", self.to, error)
            return began - self._renewed_at < self._lease.total_seconds()
        if held < len(self._held):
            return False  # And so it is whenever this is asked again.
        self._renewed_at = began
        return True

    async def _on_loop(self, running: Coroutine[Any, Any, Any], limit: float) -> None:
        if self._loop is None:
            async with asyncio.timeout(limit):
                await running
        else:
            self._loop.start(running).result(limit)

    async def _ask(self, statements: Statements[T]) -> T:
        return await carry_out(self._store, statements)


class AsyncRelay(Relay[AsyncStore]):
    """The same, of a store for an event loop."""


class _Suspects:
    """Messages that were alone when the destination ended the connection, and how often in a row.

    A destination that is away costs no message a try; but a message that it can't digest would keep all others for
    ever, since it is the one by which the destination is asked whether it is back. So would one that is too large to be
    sent within the time limit; but a destination that is blocked is as silent, so another one has to get through first.
    """

    def __init__(self) -> None:
        self._drops: dict[str, int] = {}
        #: Those that were too late so often, while no other was tried.
        self.unproven: set[str] = set()

    def __contains__(self, identity: str) -> bool:
        return self._drops.get(identity, 0) >= MAX_DROPS

    def judged(self, message: Message, verdict: Verdict, *, is_there: bool = False) -> Verdict:
        """Return the *verdict* on a message that was alone, or that it is to blame. *is_there*: the destination has
        just confirmed another.
        """
        self.unproven.discard(message.id)
        if not isinstance(verdict, Unreachable):
            self._drops.pop(message.id, None)
        elif verdict.is_dropped or verdict.is_late:
            if len(self._drops) >= MAX_SUSPECTS:
                self._drops.clear()
                self.unproven.clear()
            self._drops[message.id] = drops = self._drops.get(message.id, 0) + 1
            if drops >= MAX_DROPS and (verdict.is_dropped or is_there):
                what = "ended the connection" if verdict.is_dropped else "did not confirm in time"
                told = f"The destination {what} {drops} times while it had this message alone"
                return Failed(_line(f"{told}: {verdict.reason}"), DROPPED_PAUSE)
            if drops >= MAX_DROPS:
                self.unproven.add(message.id)
        return verdict


def _reason(error: BaseException) -> str:
    return _line(" ".join(f"{type(error).__name__}: {error}".split()))


def _checked(verdict: object, publisher: Publisher) -> Verdict:
    """Return what a publisher said as what can be written. A mistake in it is a failure of that message alone."""
    match verdict:
        case Delivered():
            return verdict
        case Rejected(reason):
            return Rejected(_line(reason))
        case Failed(reason, retry_after, is_late):
            retry_after = retry_after if isinstance(retry_after, timedelta) else None
            return Failed(_line(reason), retry_after, is_late=bool(is_late))
        case Unreachable(reason, is_dropped, is_late):
            return Unreachable(_line(reason), is_dropped=bool(is_dropped), is_late=bool(is_late))
        case _:
            return Failed(_line(f"{type(publisher).__name__}.publish returned {verdict!r}, which is no verdict."))


def _line(text: object) -> str:
    return one_line(str(text))[:MAX_REASON]

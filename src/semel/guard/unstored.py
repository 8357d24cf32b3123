"""Answers that the store did not take when their handlers had ended: kept in memory, and tried again until it does.

One daemon thread does this for threads and event loops, and lives while there is something to store. It decides
nothing: every command is fenced by its token. The leases are renewed meanwhile as before (``stores/leases.py``).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from semel.core.commands import Command, Complete, Look, Note, Now, Save, Verdict
from semel.core.events import AnswerLost, Fenced, NotKept, StoredLate
from semel.core.key import Key
from semel.core.record import Hold
from semel.core.recovery import written
from semel.errors import StoreError, StoreUnavailable
from semel.flows.handle import LARGE_ANSWER, RECORD_GONE, next_try, tombstone
from semel.stores.forks import start_afresh_in_children
from semel.stores.leases import Leases
from semel.telemetry.stream import tell

T = TypeVar("T")
#: Has the store carry out one command, from the thread of this file.
Ask = Callable[[Command[Any]], Any]

#: Bytes of all answers together: a small part of what a worker process takes. Beyond it the answers that come next are
#: kept without their bodies, as tombstones: their retries are refused and do not run.
MAX_BYTES = 64 * 1024 * 1024
#: A tombstone takes about a kilobyte. What comes beyond this many is left to its lease, and logged as an error.
MAX_ANSWERS = 10_000

#: A store that is back has to be noticed before the leases end that ran on while it was away; and to ask one that is
#: away once in a second costs neither side anything.
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 1.0

#: How long the end of a process, or of an app, waits for what is left to be stored. Servers allow 30 s for all of it.
CLOSE_SECONDS = 5.0
#: How often the thread looks whether the event loop that it waits for still runs.
_LOOK_SECONDS = 0.25

_logger = logging.getLogger("semel")


class _LoopClosed(Exception):
    """The event loop whose store it is has been closed."""


@dataclass(slots=True)
class _Entry:
    hold: Hold
    #: To be carried out one after the other.
    commands: list[Command[Verdict]]
    ask: Ask
    size: int


class Unstored:
    """The answers of one guard that wait for the store."""

    _entries: dict[bytes, _Entry]
    _changed: threading.Condition
    _thread: threading.Thread | None
    _size: int

    def __init__(self, perform: Callable[[Any], Any], leases: Leases, hint: Callable[[str, str], None]) -> None:
        """Store by *perform*, keep the claims in *leases*, and *hint* at the scope and key of what has ended."""
        self._perform = perform
        self._leases = leases
        self._hint = hint
        #: How long ``close`` waits.
        self.close_seconds = CLOSE_SECONDS
        self.start_afresh()
        start_afresh_in_children(self)
        _all.add(self)

    def add(self, hold: Hold, commands: tuple[Command[Verdict], ...], lease: timedelta) -> bool:
        """Keep the claim of *hold*, and try *commands* until they are carried out or fenced; False: too many wait."""
        first, key = commands[0], Key(hold.key).short()
        self._leases.keep(hold, lease)
        with self._changed:
            size = _size(first)
            has_room = self._size + size <= MAX_BYTES
            if not has_room and isinstance(first, Complete):
                commands = (replace(first, answer=tombstone(first.answer)), *commands[1:])
                size, has_room = 0, True
                tell(NotKept(key, first.answer.status))
            if not has_room or len(self._entries) >= MAX_ANSWERS:
                tell(AnswerLost(key, hold.attempt, "too many answers wait for the store already"))
                return False
            entry = self._entries[hold.token] = _Entry(hold, list(commands), self._ask_here(), size)
            self._size += entry.size
            if self._thread is None:
                self._thread = threading.Thread(target=self._store_all, name="semel-unstored", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # The process is about to end, or has too many threads.
                    self._thread = None
                    del self._entries[hold.token]
                    self._size -= entry.size
                    tell(AnswerLost(key, hold.attempt, str(error)))
                    return False
        return True

    def has(self, hold: Hold) -> bool:
        """Whether the answer of *hold* is here. Then the store has answered a request for it, and is tried at once."""
        if hold.token not in self._entries:
            return False
        with self._changed:
            self._changed.notify()
        return True

    def close(self) -> None:
        """Wait some seconds for what is left to be stored; then give it up. It may be used again."""
        with self._changed:
            thread = self._thread
            self._changed.notify()
        if thread is None:
            return
        thread.join(self.close_seconds)
        with self._changed:
            left = list(self._entries.values())
            self._entries, self._size = {}, 0
            self._changed.notify()
        for entry in left:
            self._lose(entry, "the process was about to end")

    async def aclose(self) -> None:
        """The same on an event loop, which goes on meanwhile."""
        if self._thread is not None:
            await asyncio.to_thread(self.close)

    def start_afresh(self) -> None:
        """Have no answers, and no thread: they are the parent's."""
        self._entries = {}
        self._size = 0
        # Its lock may be taken twice: what is told of an answer may itself guard calls.
        self._changed = threading.Condition()
        self._thread = None

    def _ask_here(self) -> Ask:
        return self._perform

    def _store_all(self) -> None:
        changed, thread, pause = self._changed, threading.current_thread(), FIRST_PAUSE_SECONDS
        while True:
            with changed:
                entry = next(iter(self._entries.values()), None)
                if entry is None:
                    if self._thread is thread:
                        self._thread = None
                    return
            if self._has_ended(entry):
                pause = FIRST_PAUSE_SECONDS
                with changed:
                    if self._entries.pop(entry.hold.token, None) is not None:
                        self._size -= entry.size
                self._let_go(entry.hold)
                continue
            with changed:
                if self._entries.pop(entry.hold.token, None) is not None:
                    self._entries[entry.hold.token] = entry  # Behind the others: it may be its own fault.
                    changed.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _has_ended(self, entry: _Entry) -> bool:
        """Try to store *entry*; whether it needs no other try."""
        key, hold = Key(entry.hold.key).short(), entry.hold
        try:
            while entry.commands:
                if _carry_out(entry) is Verdict.FENCED:
                    self._tell_fenced(entry)
                    return True
                del entry.commands[0]
        except StoreError:
            return False
        except _LoopClosed:
            tell(AnswerLost(key, hold.attempt, "its event loop was closed"))
            return True
        except Exception:  # whatever it was, the thread must live to try again
            _logger.exception("An answer could not be stored; it is tried again.")
            return False
        tell(StoredLate(key, hold.attempt))
        return True

    def _tell_fenced(self, entry: _Entry) -> None:
        key, hold = Key(entry.hold.key).short(), entry.hold
        with suppress(StoreError):
            if entry.ask(Look(hold.scope, hold.key)) is None:
                tell(AnswerLost(key, hold.attempt, RECORD_GONE))
                return
            entry.ask(Note(hold, "fenced"))
        tell(Fenced(key, hold.attempt))

    def _lose(self, entry: _Entry, reason: str) -> None:
        tell(AnswerLost(Key(entry.hold.key).short(), entry.hold.attempt, reason))
        self._let_go(entry.hold)

    def _let_go(self, hold: Hold) -> None:
        self._leases.discard(hold)
        self._hint(hold.scope, hold.key)


class AsyncUnstored(Unstored):
    """The same where the store belongs to an event loop: that carries the commands out, and the thread waits for it."""

    def _ask_here(self) -> Ask:
        return partial(_ask_on, asyncio.get_running_loop(), self._perform)


def _ask_on(loop: asyncio.AbstractEventLoop, perform: Callable[[Command[T]], Any], command: Command[T]) -> T:
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def start() -> None:
        try:
            asyncio.ensure_future(perform(command)).add_done_callback(end)
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            answer.set_exception(error)

    def end(done: asyncio.Future[T]) -> None:
        if done.cancelled():
            answer.set_exception(_LoopClosed())
        elif (error := done.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(done.result())

    _check(loop)
    with suppress(RuntimeError):  # It has been closed at this moment.
        loop.call_soon_threadsafe(start)
    while not concurrent.futures.wait((answer,), _LOOK_SECONDS).done:
        _check(loop)
    return answer.result()


def _check(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        raise _LoopClosed
    if not loop.is_running():
        # It may run again. The answers of other loops must not wait for that.
        raise StoreUnavailable("The event loop of the store is stopped.")


def _carry_out(entry: _Entry) -> Verdict:
    """Carry out what is next; of an answer that the store will not take, store at least that the operation is done."""
    first = entry.commands[0]
    try:
        return entry.ask(first)  # type: ignore[no-any-return]  # by the command's own type
    except StoreError as error:
        if not isinstance(first, Complete):
            raise
        if isinstance(error, StoreUnavailable) and entry.size > LARGE_ANSWER:
            error.has_no_space = error.has_no_space or _is_there(entry.ask)
        lighter = next_try(first, error)
        if lighter.answer is first.answer:
            raise
        verdict: Verdict = entry.ask(lighter)
    tell(NotKept(Key(entry.hold.key).short(), first.answer.status))
    return verdict


def _is_there(ask: Ask) -> bool:
    """Whether the store answers: then it is the size of an answer that it, or what is in front of it, does not take."""
    with suppress(StoreError):
        ask(Now())
        return True
    return False


def _size(command: Command[Verdict]) -> int:
    match command:
        case Complete(answer=answer):
            return len(answer.body or b"") + sum(len(name) + len(value) for name, value in answer.headers)
        case Save(progress=progress):
            return len(written(progress) or "")
        case _:
            return 0


#: Of this process.
_all: WeakSet[Unstored] = WeakSet()


def _close_all() -> None:
    """Wait for all at the end of the process, which many servers give no other word of; together no longer than one."""
    ends_at = time.monotonic() + CLOSE_SECONDS
    for each in tuple(_all):
        each.close_seconds = max(ends_at - time.monotonic(), 0.0)
        each.close()


atexit.register(_close_all)

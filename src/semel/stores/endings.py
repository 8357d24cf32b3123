"""How the requests of this process have ended, and the addition of that to a store's counts by minute. It counts
nothing itself, no request waits for it, and no request costs a statement.

The first request of a process begins it, whatever the entry point: from then on there is one statement in an interval,
also where no request has ended, so that a minute without requests differs from one that was not counted. For stores in
threads one daemon thread does it; on an event loop a timer does. ``close`` of the store adds what is left, and so does
the end of the process where Python runs its ``atexit`` functions. A process that is killed loses what it has counted
since the last time. A store that can't be written, or has no table for it, has no counts: that is logged once, and
changes nothing else.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from weakref import ref

from semel.core.commands import AddCounts
from semel.core.commands.counts import ADDED
from semel.errors import StoreUnavailable
from semel.stores.forks import start_afresh_in_children

#: The console draws minutes; a process that is killed loses as much.
COUNT_INTERVAL = timedelta(seconds=20)
#: Intervals vary by this share, so that processes that were started together do not stay together.
JITTER = 0.2
#: How long the end of a process, or of a store, waits for what is left to be added.
CLOSE_SECONDS = 1.0

_logger = logging.getLogger("semel")


class Performs(Protocol):
    """What it needs of a store."""

    def perform(self, command: Any) -> Any:
        """Carry out one command."""


class SharedEndings(dict[str, int]):
    """How many requests have ended how (``core/outcome.py``) since that was last added to the store. It is bounded by
    the list of outcomes.

    An outcome is missing when it is the first of its kind since then, so counting one that is not costs nothing else.
    """

    def __init__(self, store: Performs) -> None:
        """Add to the counts of *store*, once there is something to add. A store that is no longer used may go."""
        self._store = ref(store)
        #: Whether the last addition failed.
        self.has_failed = False
        self._is_told = False
        place = id(self)
        _known[place] = ref(self, lambda _: _known.pop(place, None))

    def __missing__(self, outcome: str) -> int:
        """Begin to add, if that is not begun."""
        self.begin()
        return 0

    def begin(self) -> None:
        """Add to the store from now on, once in an interval."""
        raise NotImplementedError

    def start_afresh(self) -> None:
        """Have counted nothing: in a forked child, it is the parent that adds it."""
        self.clear()

    def _take(self) -> AddCounts:
        # Others may count meanwhile: what is taken is what is no longer here.
        return AddCounts({**{outcome: self.pop(outcome) for outcome in list(self)}, ADDED: 1})

    def _note(self, error: BaseException | None) -> None:
        """Say once why nothing can be added. What was taken is dropped: it would be of another minute."""
        self.has_failed = error is not None
        if error is not None and not self._is_told:
            self._is_told = True
            # Of a store that is away, others tell: the call that failed, and not this, at the end of a script.
            level = logging.INFO if isinstance(error, StoreUnavailable) else logging.WARNING
            _logger.log(
                level, "How requests end can't be added to the store's counts, and the console lacks it: %s", error
            )


class Endings(SharedEndings):
    """Those of a store for threads."""

    def begin(self) -> None:
        """Have the thread of this process add, from now on."""
        _thread.begin(self)

    def add(self) -> None:
        """Add what was counted. It raises nothing."""
        store = self._store()
        if store is None:
            return
        try:
            store.perform(self._take())
        except Exception as error:  # noqa: BLE001 - whatever it was, the thread must live to add to others
            self._note(error)
        else:
            self._note(None)

    def close(self) -> None:
        """Add what is left, and no more until another request ends; but do not wait for a store that is away."""
        _thread.end(self)


class AsyncEndings(SharedEndings):
    """Those of a store for an event loop."""

    _loop: asyncio.AbstractEventLoop | None = None
    _timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Add from now on, by a timer of the running loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(_jittered(), self._add)

    async def close(self) -> None:
        """Add what is left, and no more until another request ends; but do not wait for a store that is away."""
        timer, self._timer = self._timer, None
        if timer is None or self._loop is not asyncio.get_running_loop():
            return
        timer.cancel()
        store = self._store()
        if self and store is not None and not self.has_failed:
            adding = self._start(store)
            if adding is not None:
                await asyncio.wait([adding], timeout=CLOSE_SECONDS)

    def start_afresh(self) -> None:
        """Have counted nothing, on no loop."""
        super().start_afresh()
        self._loop = self._timer = None

    def _add(self) -> None:
        self._timer = None
        store = self._store()
        if store is not None:
            self._start(store)
            self.begin()

    def _start(self, store: Performs) -> asyncio.Future[None] | None:
        try:
            adding: asyncio.Future[None] = store.perform(self._take())
        except Exception as error:  # noqa: BLE001 - no request is to blame for it
            self._note(error)
            return None
        adding.add_done_callback(self._added)
        return adding

    def _added(self, adding: asyncio.Future[None]) -> None:
        if not adding.cancelled():
            self._note(adding.exception())


class _Thread:
    """Adds for the stores of this process that are for threads. It lives while there are any."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()
        #: Those that it adds for, by their id.
        self._endings: dict[int, ref[Endings]] = {}
        #: What it is asked to add before its time, and what is to be set then.
        self._asked: SimpleQueue[tuple[Endings, threading.Event]] = SimpleQueue()
        start_afresh_in_children(self)

    def begin(self, endings: Endings) -> None:
        """Add for *endings* from now on."""
        with self._mutex:
            self._endings[id(endings)] = ref(endings)
            if self._thread is None:
                thread = threading.Thread(target=self._repeat, args=[self._asked], name="semel-counts", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # The process is about to end, or has too many: no request is to fail for it.
                    return
                self._thread = thread

    def end(self, endings: Endings) -> None:
        """Add what is left of *endings*, and then no more."""
        added = threading.Event()
        with self._mutex:
            is_begun = self._endings.pop(id(endings), None) is not None and self._thread is not None
            if not is_begun or not endings or endings.has_failed:
                return
            self._asked.put((endings, added))
        added.wait(CLOSE_SECONDS)

    def end_all(self) -> None:
        """Add what is left, at the end of the process: no thread can be started then, but this one is there."""
        for each in tuple(self._endings.values()):
            if (endings := each()) is not None:
                self.end(endings)

    def start_afresh(self) -> None:
        """Have no thread, and nothing to add: all that was counted is the parent's."""
        self._thread = None
        self._mutex = threading.Lock()
        self._endings = {}
        self._asked = SimpleQueue()
        for each in tuple(_known.values()):
            if (known := each()) is not None:
                known.start_afresh()

    def _repeat(self, asked: SimpleQueue[tuple[Endings, threading.Event]]) -> None:
        due_at = time.monotonic() + _jittered()
        while True:
            try:
                endings, added = asked.get(timeout=max(due_at - time.monotonic(), 0.0))
            except Empty:
                if not self._add_all():
                    return
                due_at = time.monotonic() + _jittered()
            else:
                endings.add()
                added.set()
                del endings, added  # A store that is no longer used may go while this waits.

    def _add_all(self) -> bool:
        """Add for all of them; return whether there are any left."""
        with self._mutex:
            found = {number: endings for number, each in self._endings.items() if (endings := each()) is not None}
            self._endings = {number: ref(endings) for number, endings in found.items()}
            if not found and self._asked.empty():
                self._thread = None
                return False
        for endings in found.values():
            endings.add()
        return True


def _jittered() -> float:
    return COUNT_INTERVAL.total_seconds() * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret


#: All of this process, by their id: a dict can't be in a WeakSet.
_known: dict[int, ref[SharedEndings]] = {}
_thread = _Thread()
atexit.register(_thread.end_all)

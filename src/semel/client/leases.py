"""Keeps what this process is sending in its hands: a thread that renews the leases of its intents, however long a try
takes. What a lease is worth to other processes is in ``journal.sql``.

A lease is short, so that the intents of a process that died are soon free. A try may take longer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from semel.errors import JournalError

#: An intent in the hands of one sender, by the sender's token.
Held = tuple[str, bytes]

#: Of a lease: two renewals may fail, or be late.
_PART = 3
#: Seconds. A shorter lease than three of these may end while its try is under way.
_MIN_INTERVAL = 0.005
#: The thread ends after as many intervals without an intent. To start one takes longer than to send to this machine.
_IDLE_INTERVALS = 10

#: Seconds that a renewal can take, on a file that is kept locked.
_PATIENCE = 10.0

_logger = logging.getLogger("semel")


class Leases:
    """The intents that this process is sending."""

    def __init__(self, lease: float, extend: Callable[[Sequence[Held]], None]) -> None:
        """Have *extend* called with all of them, three times in *lease* seconds."""
        self._interval = max(lease / _PART, _MIN_INTERVAL)
        self._extend = extend
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Entered by itself: the condition's own way in is a function of Python, and a signal handler may raise in it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Until when, at the latest: a task that is never ended must not keep its intent for ever.
        self._held: dict[Held, float] = {}
        self._thread: threading.Thread | None = None

    def hold(self, intent: str, token: bytes, seconds: float) -> None:
        """Renew the lease from now on, for at most so many *seconds*."""
        if self._pid != os.getpid():
            self._reset()  # A fork takes neither the thread nor what the parent sends.
        with self._lock:
            self._held[intent, token] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="semel-journal", daemon=True)
                self._thread.start()

    def drop(self, intent: str, token: bytes) -> None:
        """Renew it no more."""
        if self._pid != os.getpid():
            return  # The lock is the parent's, and so is what it sends.
        with self._lock:
            self._held.pop((intent, token), None)

    def stop(self) -> None:
        """End the thread, unless something is being sent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._held:
                return
            ending, self._thread = self._thread, None
            self._changed.notify_all()
        if ending is not None:
            ending.join(_PATIENCE)

    def _run(self) -> None:
        idle = 0
        while idle < _IDLE_INTERVALS:
            with self._lock:
                self._changed.wait(self._interval)
                if self._thread is not threading.current_thread():
                    return
                now = time.monotonic()
                for late in [held for held, until in self._held.items() if until <= now]:
                    del self._held[late]
                held = list(self._held)
                idle = 0 if held else idle + 1
                if idle == _IDLE_INTERVALS:
                    self._thread = None
            if held:
                try:
                    self._extend(held)
                except JournalError as error:  # Others may send as well, with the same key.
                    _logger.warning("The journal could not renew %d intents: %s", len(held), error)

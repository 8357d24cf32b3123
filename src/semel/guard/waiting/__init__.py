"""Queues of duplicates that wait for the first to end: ``Waiters`` for threads, ``AsyncWaiters`` for event loops. They
run no handler.

However many requests wait for a key, only one at a time asks the store, once per interval, and shares the answer with
the others. A hint (this process has ended the operation, or the store says that another process has) only makes it ask
sooner. A waiting request holds no connection.
"""

from semel.guard.waiting.loops import MAX_WAITERS, AsyncWaiters
from semel.guard.waiting.queue import POLL_INTERVAL, Waiter
from semel.guard.waiting.threads import MAX_THREADS, Waiters

__all__ = ["MAX_THREADS", "MAX_WAITERS", "POLL_INTERVAL", "AsyncWaiters", "Waiter", "Waiters"]

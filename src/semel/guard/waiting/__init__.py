"""Where duplicates wait for the first to end: ``Waiters`` for threads, ``AsyncWaiters`` for event loops. It runs
nothing.

However many wait for a key, one of them at a time asks the store, once in a while: that is the truth. What it finds is
shared with the others. A hint (this process has ended the operation, or the store says that somebody has) only makes it
ask sooner. Nobody who waits holds a connection.
"""

from semel.guard.waiting.loops import MAX_WAITERS, AsyncWaiters
from semel.guard.waiting.queue import POLL_INTERVAL, Waiter
from semel.guard.waiting.threads import MAX_THREADS, Waiters

__all__ = ["MAX_THREADS", "MAX_WAITERS", "POLL_INTERVAL", "AsyncWaiters", "Waiter", "Waiters"]

"""Where duplicates wait for the first to end: ``Room`` for threads, ``AsyncRoom`` for event loops. It runs nothing.

However many wait for a key, one of them at a time asks the store, once in a while: that is the truth. What it finds is
shared with the others. A hint (this process has ended the operation, or the store says that somebody has) only makes it
ask sooner. Nobody who waits holds a connection.
"""

from semel.room.loops import MAX_WAITERS, AsyncRoom
from semel.room.seats import POLL_INTERVAL, Visit
from semel.room.threads import MAX_THREADS, Room

__all__ = ["MAX_THREADS", "MAX_WAITERS", "POLL_INTERVAL", "AsyncRoom", "Room", "Visit"]

"""The reference store: the shortest program with every guarantee of ``base.py``, in one process's memory.

For tests and for reading. It shares nothing between processes and loses everything when this one ends.
"""

from semel.stores.memory.store import AsyncMemoryStore, MemoryStore
from semel.stores.memory.transaction import AsyncMemoryTransaction, MemoryTransaction

__all__ = ["AsyncMemoryStore", "AsyncMemoryTransaction", "MemoryStore", "MemoryTransaction"]

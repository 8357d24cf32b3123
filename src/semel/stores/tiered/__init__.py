"""A cache of finished answers in front of a durable store: in this process, and in Redis. It decides nothing: a miss,
and everything but the replay of a finished answer, goes to the durable store.

A finished answer does not change until its record expires, so a copy of it may be used. A copy is deleted before the
record expires.
"""

from semel.stores.tiered.value import Tiered

__all__ = ["Tiered"]

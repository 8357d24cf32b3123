"""A cache of finished answers in front of a durable store: in this process, and in Redis. It decides nothing: a miss,
and everything but the replay of a finished answer, is the durable store's.

A finished answer does not change until its record expires, so that it may be given from wherever it is kept. What is
kept is gone before the record is.
"""

from semel.stores.tiered.value import Tiered

__all__ = ["Tiered"]

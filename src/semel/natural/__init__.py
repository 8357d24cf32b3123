"""Natural keys: a row's unique constraint is the key. Insert the row, or get the stored one, and say which it was.

It keeps no record of its own and replays no answer: what is stored is the row itself. It joins the transaction that the
caller has open, and never commits.
"""

from semel.errors import RowDiffers, RowNotSeen
from semel.natural.front import insert_or_get
from semel.natural.got import Got

__all__ = ["Got", "RowDiffers", "RowNotSeen", "insert_or_get"]

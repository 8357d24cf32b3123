"""What processes that share a table tell each other through the server, beside the table: who has ended, and who lives.
Nothing here connects; and nothing depends on it but how soon others know.
"""

from __future__ import annotations

import hashlib
import secrets

from semel.stores.statement import Names

#: The upper half of every owner's number ("seml"): PostgreSQL shows it as the ``classid`` of the lock in ``pg_locks``.
#: It keeps the numbers apart from those that an application is likely to use. The locks of keys are in the same space,
#: but spread over all of it.
_OWNERS = 0x73656D6C
_OWNER_BITS = 32

#: Shorter than the 63 bytes that PostgreSQL keeps of a name, and the same for all that use the same table.
_CHANNEL_BYTES = 8


def channel_of(names: Names) -> str:
    """Return the channel on which hints (``core/hint.py``) are given: one for each table of Semel's.

    A schema that is not named is whatever the server finds first, and so it is here.
    """
    table = f"{names.schema or ''}.{names.table}"
    return f"semel_{hashlib.sha256(table.encode()).hexdigest()[: 2 * _CHANNEL_BYTES]}"


def owner_lock() -> int:
    """Return the number of a lock by which a process can show that it lives, as ``pg_advisory_lock`` takes it.

    Its owner has to hold it *exclusively*, in a session of its own. Should two draw the same number, the second does
    not get it, and draws another; should it be a dead process's, that is taken for alive until its lease is over.
    """
    return _OWNERS << _OWNER_BITS | secrets.randbits(_OWNER_BITS)

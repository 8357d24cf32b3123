"""Handles each message once: the handler's writes and the fact that the message was seen are one commit. Sending is the
outbox's concern.

``Inbox(store, consumer="billing").receive(message_id, handler, …)`` returns a verdict, and each knows whether the
broker may forget the delivery (``.ack``):

==============  ======  ============================================================================================
``Ran``         ack     the handler ran, and its writes are committed with the receipt
``Duplicate``   ack     the message was handled before; nothing was run
``Busy``        nack    another delivery of it is being handled; it has to come again
``Parked``      ack     it has failed ``max_attempts`` times, and waits for a person (``semel inbox list``)
an exception    nack    the handler failed, or the store did: nothing is committed, and it has to come again
==============  ======  ============================================================================================

**What it promises.** Effectively once for what the handler writes through its connection, at least once for everything
else that it does: a mail, a call to another service. Those belong into an outbox, in the same transaction.

**What a delivery costs**, on PostgreSQL over a connection of the store's own. A first one: BEGIN, two looks at the
receipt, the handler, one INSERT, COMMIT; five round trips and one row, in the transaction that the handler needed
anyway. A redelivery: BEGIN, one look, ROLLBACK; three round trips (four with psycopg, which drops its prepared
statements after a ROLLBACK) and one row read by its primary key. It writes nothing: no row version, no WAL. A failed
try: those of a first one up to the handler, ROLLBACK, and a transaction of five round trips that counts it. On SQLite
the statements are the same without round trips; a redelivery, too, waits for the file's write lock.

**Two deliveries at once**, in any two processes: one has the message's lock, and the other is ``Busy`` at once. On
SQLite there is one lock for the whole file, and the second waits for it; then it is a ``Duplicate``.

**Attempts** survive the rollback. A process that is killed in the middle of a try leaves nothing, and the try is not
counted. A conflict with another transaction (a serialization failure, a deadlock) and ``semel.NoEffect`` are not
counted either.
"""

from semel.core.inbox import INBOX_RETENTION, MAX_ATTEMPTS, Busy, Duplicate, Parked, Ran, Verdict
from semel.errors import MessageDiffers, MessageRefused, MessageUnidentified
from semel.inbox.front import AsyncInbox, Inbox

__all__ = [
    "INBOX_RETENTION",
    "MAX_ATTEMPTS",
    "AsyncInbox",
    "Busy",
    "Duplicate",
    "Inbox",
    "MessageDiffers",
    "MessageRefused",
    "MessageUnidentified",
    "Parked",
    "Ran",
    "Verdict",
]

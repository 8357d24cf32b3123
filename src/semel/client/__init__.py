"""What calls an API: it makes the idempotency key, keeps it over retries and, with a journal, over a crash. The side of
the server is everything else in this package.

``semel.client.httpx`` has transports for httpx and httpx2, ``semel.client.requests`` an adapter for requests.
"""

from semel.client.journal import Journal
from semel.client.resuming import Resumed
from semel.core.intent import Entry
from semel.errors import (
    AnswerNotKept,
    ClientError,
    IntentBusy,
    IntentDiffers,
    JournalError,
    RedirectRefused,
    RequestNotRepeatable,
    RequestOutcomeUnknown,
)

__all__ = [
    "AnswerNotKept",
    "ClientError",
    "Entry",
    "IntentBusy",
    "IntentDiffers",
    "Journal",
    "JournalError",
    "RedirectRefused",
    "RequestNotRepeatable",
    "RequestOutcomeUnknown",
    "Resumed",
]

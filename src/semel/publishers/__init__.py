"""What sends the messages of the outbox: one file per kind of destination. When, ``flows/relay.py`` says."""

from semel.core.outbox import (
    BROKER_SCHEDULE,
    Delivered,
    Failed,
    Message,
    Rejected,
    Schedule,
    Unreachable,
    Verdict,
)
from semel.publishers.base import Publisher, publisher

__all__ = [
    "BROKER_SCHEDULE",
    "Delivered",
    "Failed",
    "Message",
    "Publisher",
    "Rejected",
    "Schedule",
    "Unreachable",
    "Verdict",
    "publisher",
]

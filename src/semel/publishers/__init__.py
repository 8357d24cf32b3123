"""What sends the messages of the outbox: one file per kind of destination. When, ``flows/relay.py`` says."""

from semel.core.outbox import Delivered, Failed, Message, Rejected, Unreachable, Verdict
from semel.publishers.base import Publisher, publisher

__all__ = ["Delivered", "Failed", "Message", "Publisher", "Rejected", "Unreachable", "Verdict", "publisher"]

"""Events as records of the logger ``semel``: a name, a fixed message, fields. It writes no raw key."""

from __future__ import annotations

import dataclasses
import logging

from semel.core.events import (
    AnswerLost,
    EndpointTurnedOff,
    Fenced,
    FinishedAbandoned,
    FinishedAccepted,
    GaveUpAbandoned,
    Happening,
    LargeWebhook,
    LostLease,
    MessageParked,
    MessageReused,
    NotKept,
    NotLoggedIn,
    NotStored,
    ParkedUnknown,
    PersonalKey,
    Reported,
    ReportFailed,
    StoredLate,
    StoreFailed,
    Swept,
    SweptUnknown,
    TookOver,
    TryNotCounted,
)
from semel.core.message import one_line
from semel.core.outcome import UNCHANGED

logger = logging.getLogger("semel")

_LEVELS: dict[type[Happening], int] = {
    PersonalKey: logging.WARNING,
    LargeWebhook: logging.WARNING,
    EndpointTurnedOff: logging.ERROR,
    TookOver: logging.WARNING,
    Fenced: logging.WARNING,
    NotLoggedIn: logging.WARNING,
    NotStored: logging.ERROR,
    StoredLate: logging.WARNING,
    AnswerLost: logging.ERROR,
    NotKept: logging.INFO,
    StoreFailed: logging.ERROR,
    LostLease: logging.WARNING,
    ParkedUnknown: logging.ERROR,
    Swept: logging.WARNING,
    SweptUnknown: logging.ERROR,
    FinishedAbandoned: logging.INFO,
    FinishedAccepted: logging.INFO,
    GaveUpAbandoned: logging.ERROR,
    Reported: logging.INFO,
    ReportFailed: logging.ERROR,
    MessageParked: logging.ERROR,
    MessageReused: logging.ERROR,
    TryNotCounted: logging.WARNING,
}


def log(happening: Happening) -> None:
    """Write one log record; its fields are in ``extra`` and in the message."""
    level = _LEVELS[type(happening)]
    if isinstance(happening, Reported) and happening.outcome in UNCHANGED:
        # Nearly every request is one of these: the tally counts them.
        level = logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    facts = {
        name: one_line(value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(happening).items()
        if name not in getattr(happening, "unlogged", ())
    }
    said = " ".join((type(happening).__doc__ or "").split())
    shown = " ".join(f"{name}={value}" for name, value in facts.items())
    name = type(happening).__name__
    extra = {"semel_event": name} | {f"semel_{name}": value for name, value in facts.items()}
    # The name first: operators search and alert by it.
    logger.log(level, "%s: %s %s", name, said, shown, extra=extra)

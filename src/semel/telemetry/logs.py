"""Happenings as log records of the logger ``semel``: a fixed message, the facts beside it, never a raw key."""

from __future__ import annotations

import dataclasses
import logging

from semel.core.events import (
    Fenced,
    FinishedAbandoned,
    GaveUpAbandoned,
    Happening,
    LostLease,
    NotKept,
    NotStored,
    ParkedUnknown,
    PersonalKey,
    StoreFailed,
    Swept,
    SweptUnknown,
    TookOver,
)

logger = logging.getLogger("semel")

_LEVELS: dict[type[Happening], int] = {
    PersonalKey: logging.WARNING,
    TookOver: logging.WARNING,
    Fenced: logging.WARNING,
    NotStored: logging.ERROR,
    NotKept: logging.INFO,
    StoreFailed: logging.ERROR,
    LostLease: logging.WARNING,
    ParkedUnknown: logging.ERROR,
    Swept: logging.WARNING,
    SweptUnknown: logging.ERROR,
    FinishedAbandoned: logging.INFO,
    GaveUpAbandoned: logging.ERROR,
}


def log(happening: Happening) -> None:
    """Write one log record; its fields are in ``extra`` and in the message."""
    facts = dataclasses.asdict(happening)
    said = " ".join((type(happening).__doc__ or "").split())
    shown = " ".join(f"{name}={value}" for name, value in facts.items())
    extra = {"semel_event": type(happening).__name__} | {f"semel_{name}": value for name, value in facts.items()}
    logger.log(_LEVELS[type(happening)], "%s %s", said, shown, extra=extra)

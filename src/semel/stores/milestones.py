"""A handler's progress as readable text, and back. It stores nothing."""

from __future__ import annotations

import json

from semel.core.record import Milestone

# In ASCII: a note may hold characters that no database accepts as text, such as half of a surrogate pair.
_write = json.JSONEncoder(separators=(",", ":")).encode


def written(milestone: Milestone) -> str:
    """Return *milestone* as it is stored: a JSON object."""
    return _write({"fraction": milestone.fraction, "note": milestone.note})


def read_back(text: str | None) -> Milestone | None:
    """Return a stored milestone, if there is one."""
    return None if text is None else Milestone(**json.loads(text))

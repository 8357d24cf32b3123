"""The commands of a store and their answers, as values. Nothing here carries one out.

One command is one round trip, or one transaction that the store owns.
"""

from semel.core.commands.base import Again, Command, Verdict
from semel.core.commands.counts import AddCounts, Minutes, ReadCounts
from semel.core.commands.erasing import Erase, Erased, EraseTrail, Left
from semel.core.commands.keys import (
    Browse,
    Claim,
    Complete,
    Look,
    Mark,
    Now,
    Park,
    Release,
    Renew,
    Save,
    Settle,
    TakeOver,
)
from semel.core.commands.search import Filter, Page, Search, Survey, Surveyed
from semel.core.commands.steps import (
    Begin,
    Commit,
    CommitAlone,
    Finish,
    Open,
    Undo,
)
from semel.core.commands.upkeep import (
    Discard,
    FindStuck,
    Note,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapInbox,
    ReapTrail,
    Resolution,
    Sweep,
    Unpark,
)

__all__ = [
    "AddCounts",
    "Again",
    "Begin",
    "Browse",
    "Claim",
    "Command",
    "Commit",
    "CommitAlone",
    "Complete",
    "Discard",
    "Erase",
    "EraseTrail",
    "Erased",
    "Filter",
    "FindStuck",
    "Finish",
    "Left",
    "Look",
    "Mark",
    "Minutes",
    "Note",
    "Now",
    "Open",
    "Page",
    "Park",
    "ReadCounts",
    "ReadRequest",
    "ReadTrail",
    "Reap",
    "ReapInbox",
    "ReapTrail",
    "Reaped",
    "Release",
    "Renew",
    "Resolution",
    "Save",
    "Search",
    "Settle",
    "Survey",
    "Surveyed",
    "Sweep",
    "TakeOver",
    "Undo",
    "Unpark",
    "Verdict",
]

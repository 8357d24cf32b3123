"""What a batch does for those who clean up, and for operators: the commands of ``core/commands/upkeep.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from semel.core.commands import (
    Decree,
    Discard,
    FindStuck,
    Note,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapTrail,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.message import Request
from semel.core.record import Entry, Hold, Stuck
from semel.core.upkeep import FIRST_PAUSE, MOST_DOUBLINGS
from semel.stores import requests
from semel.stores.sqlite import statements as by
from semel.stores.sqlite.session import Session
from semel.stores.sqlite.statements import chunks


class Upkeep:
    """Sweeping, reaping, resolving, and the trail, on one connection."""

    def __init__(self, session: Session) -> None:
        """Nothing happens yet."""
        self._session = session
        self._statements = session.statements

    def find_stuck(self, command: FindStuck) -> tuple[Stuck, ...]:
        """Read what is in progress under a lease that has run out."""
        wanted = (command.with_pending, command.with_request, command.with_nobodys)
        pauses = (command.only_due, FIRST_PAUSE // timedelta(milliseconds=1), MOST_DOUBLINGS)
        rows = self._session.run(self._statements.find_stuck, (*wanted, *pauses, command.limit))
        return tuple(map(by.read_stuck, rows))

    def read_request(self, command: ReadRequest) -> Request | None:
        """Read a kept request."""
        rows = self._session.run(self._statements.read_request, by.hold_row(command.hold))
        return requests.read_back(*rows[0]) if rows else None

    def sweep(self, command: Sweep) -> Verdict:
        """Free a dead worker's key."""
        return self._write(self._statements.sweep, by.hold_row(command.hold), command.hold, "swept")

    def reap(self, command: Reap) -> Reaped:
        """Clear away what is past its retention."""
        due: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
        for fate, *row in self._session.run(self._statements.find_due, (command.limit,)):
            due[fate].append(row)
        for fate, bulk, event, first in (
            # First what may be refused, since what was done before it would stay.
            ("fail", self._statements.fail_due, "abandoned", by.answer_row(command.abandoned)),
            ("delete", self._statements.delete_due, "reaped", ()),
            ("strip", self._statements.strip_due, "stripped", ()),
        ):
            for chunk in chunks(due[fate]):
                self._session.run(bulk.of(len(chunk)), [*first, *[number for number, *_ in chunk]])
            for _, scope, key, attempt in due[fate]:
                self._session.note(scope, key, attempt, event)
        return Reaped(deleted=len(due["delete"]), stripped=len(due["strip"]), failed=len(due["fail"]))

    def discard(self, command: Discard) -> Verdict:
        """Forget a record that has not ended."""
        return self._write(self._statements.discard, by.hold_row(command.hold), command.hold, "discarded")

    def unpark(self, command: Unpark) -> Verdict:
        """Let a parked operation go on."""
        row = (*by.progress_row(command.progress), *by.hold_row(command.hold))
        return self._write(self._statements.unpark, row, command.hold, "resolved")

    def decree(self, command: Decree) -> Verdict:
        """End a parked operation."""
        row = (*by.answer_row(command.answer), *by.hold_row(command.hold))
        return self._write(self._statements.decree, row, command.hold, "resolved")

    def note(self, command: Note) -> None:
        """Write one line into the trail, by itself: a line that can't be written is nobody else's trouble."""
        hold = command.hold
        self._session.write_down()
        self._session.note(hold.scope, hold.key, hold.attempt, command.event, command.detail)
        self._session.write_down()

    def read_trail(self, command: ReadTrail) -> tuple[Entry, ...]:
        """Read the lines of one key."""
        wanted = (command.scope, command.key, command.limit)
        return tuple(map(by.read_entry, self._session.run(self._statements.read_trail, wanted)))

    def reap_trail(self, command: ReapTrail) -> int:
        """Delete old lines."""
        return self._session.count(self._statements.reap_trail, (command.limit, by.milliseconds(command.older_than)))

    def _write(self, sql: str, row: tuple[Any, ...], hold: Hold, event: str) -> Verdict:
        for (attempt,) in self._session.run(sql, row):
            self._session.note(hold.scope, hold.key, attempt, event)
            return Verdict.DONE
        return Verdict.FENCED

"""What each command does on one connection. The order within a batch is in ``writer.py``.

Every cursor is read to its end: otherwise its statement keeps running, and with it a transaction that the code
believes to be committed.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from semel.core import trail
from semel.core.commands import (
    AddCounts,
    Again,
    Browse,
    Command,
    Discard,
    Erase,
    Erased,
    EraseTrail,
    FindStuck,
    Look,
    Mark,
    Minutes,
    Note,
    Now,
    Page,
    Park,
    ReadCounts,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapInbox,
    ReapTrail,
    Release,
    Renew,
    Resolution,
    Save,
    Search,
    Settle,
    Survey,
    Surveyed,
    Sweep,
    TakeOver,
    Unpark,
    Verdict,
)
from semel.core.key import digest_of
from semel.core.message import Request
from semel.core.record import Entry, Found, Hold, Record, Stuck
from semel.core.recovery import change, written
from semel.core.state import State
from semel.core.upkeep import FIRST_PAUSE, MAX_DOUBLINGS
from semel.stores import erasing, milestones, requests
from semel.stores.sqlite import searching
from semel.stores.sqlite import statements as by
from semel.stores.sqlite.statements import MIN_GATHERED, Bulk, Statements, chunks

#: A command, and its place in the batch.
Item = tuple[int, Any]
Items = Sequence[Item]

#: Keys that are in memory at a time while their digests are computed.
KEYS_AT_ONCE = 10_000

#: Scope, key, attempt, event and detail of a line of the audit trail.
Line = tuple[str, str, int, str, str | None]


class Session:
    """What the commands of one batch share: a connection, the time, and the lines for the audit trail."""

    def __init__(
        self, connection: sqlite3.Connection, statements: Statements, actor: str | None, *, is_full: bool
    ) -> None:
        """Without an *actor* there is no trail; with *is_full*, it has every change."""
        self.statements = statements
        self.is_full = is_full and actor is not None
        self._connection = connection
        self._actor = actor
        self._lines: list[Line] = []
        self._now: int | None = None

    @property
    def now(self) -> int:
        """The time of this batch by the database's clock, read at its first use: under the write lock."""
        if self._now is None:
            self._now = self.run(self.statements.now)[0][0]
        return self._now

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run it, and return its rows."""
        return self._connection.execute(sql, parameters).fetchall()

    def count(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run it, and return how many rows it changed."""
        cursor = self._connection.execute(sql, parameters)
        cursor.fetchall()
        return cursor.rowcount

    def count_all(self, bulk: Bulk, shared: Sequence[Any], rows: Sequence[Sequence[Any]]) -> int:
        """Run it for all *rows*, a power of two of them, and return how many rows it changed."""
        return self.count(bulk.of(len(rows)), [*shared, *[value for row in rows for value in row]])

    def find(self, scope: str, key: str) -> Found | None:
        """Read what is there under a key."""
        rows = self.run(self.statements.find, (scope, key))
        return by.read_found(rows[0]) if rows else None

    def note(self, scope: str, key: str, attempt: int, event: str, detail: str | None = None) -> None:
        """Remember a line for the trail."""
        self._lines.append((scope, key, attempt, event, detail))

    def write_down(self) -> None:
        """Write the noted lines, in few statements for the whole batch."""
        if not self._lines:
            return
        noted, self._lines = self._lines, []
        if self._actor is not None:
            for lines in chunks(noted):
                self.count_all(self.statements.write_down, (self.now, self._actor), lines)


class Keys:
    """The commands of ``core/commands/keys.py``."""

    def __init__(self, session: Session, outcomes: list[Any]) -> None:
        """Bulk commands write their *outcomes* themselves."""
        self._session = session
        self._statements = session.statements
        self._outcomes = outcomes

    def find(self, items: Items) -> None:
        """Answer the claims on keys that are in use already."""
        for place, claim in items:
            self._outcomes[place] = self._session.find(claim.scope, claim.key)

    def claim(self, items: Items) -> None:
        """Take the keys that are free. All of these claims have the same policy terms."""
        session = self._session
        terms = by.claim_terms(items[0][1], session.now)
        changed = session.count_all(self._statements.claim, terms, [by.claim_row(claim) for _, claim in items])
        for place, claim in items:
            if changed != len(items):
                # Another claim came first: in another process, or for the same key in this statement.
                there = session.find(claim.scope, claim.key)
                if there is None or there.token != claim.token:
                    self._outcomes[place] = there or Again.AGAIN
                    continue
            self._outcomes[place] = hold = Hold(claim.scope, claim.key, 1, claim.token)
            if changed and session.is_full:
                session.note(hold.scope, hold.key, 1, "accepted" if claim.is_accepted else "claimed")

    def complete(self, items: Items) -> None:
        """Store how operations ended."""
        session = self._session
        rows = [by.complete_row(command) for _, command in items]
        if len(rows) == 1:
            changed = session.count(self._statements.complete_one, (session.now, *rows[0]))
        else:
            changed = session.count_all(self._statements.complete, (session.now,), rows)
        for place, command in items:
            hold = command.hold
            # Fewer rows: some were stored before, or are fenced.
            if changed == len(items) or by.is_answered(session.find(hold.scope, hold.key), hold):
                self._outcomes[place] = Verdict.DONE
            else:
                self._outcomes[place] = Verdict.FENCED
            if changed and session.is_full:
                session.note(hold.scope, hold.key, hold.attempt, by.ENDED[command.event])

    def take_over(self, command: TakeOver) -> Hold | Again:
        """Take over the key of a dead worker, or of a record past its retention."""
        claim = command.claim
        rows = self._session.run(self._statements.take_over, by.take_over_row(command))
        if not rows:
            return Again.AGAIN
        attempt, state = rows[0]
        event = "taken over"
        if state == "pending":
            event = "accepted"
        elif command.is_abandoned and attempt == command.seen.attempt:
            event = "claimed"
        if self._session.is_full or event not in trail.ORDINARY:
            self._session.note(claim.scope, claim.key, attempt, event)
        return Hold(claim.scope, claim.key, attempt, claim.token)

    def release(self, command: Release) -> Verdict:
        """Free a key, or give an operation up."""
        hold = command.hold
        mine = (hold.scope, hold.key, hold.token, hold.attempt)
        for sql, event in ((self._statements.release, "released"), (self._statements.give_up, "given up")):
            for (attempt,) in self._session.run(sql, mine):
                self._session.note(hold.scope, hold.key, attempt, event, command.reason)
                return Verdict.DONE
        return Verdict.FENCED if self._session.run(self._statements.exists, (hold.scope, hold.key)) else Verdict.DONE

    def renew(self, command: Renew) -> frozenset[Hold]:
        """Renew leases; return which are lost."""
        lost = []
        now = self._session.now
        for chunk in chunks(command.holds, MIN_GATHERED):
            rows = [by.renew_row(hold, lease) for hold, lease in chunk]
            if len(rows) > 1 and self._session.count_all(self._statements.renew, (now,), rows) == len(rows):
                continue
            lost += [
                hold
                for (hold, _), row in zip(chunk, rows, strict=True)
                if not self._session.count(self._statements.renew_one, (now, *row))
            ]
        return frozenset(lost)

    def save(self, command: Save) -> Verdict:
        """Store how far an operation has come."""
        hold, progress = command.hold, command.progress
        steps = (*by.progress_row(progress), written(command.before))
        if not self._session.run(self._statements.save, (*steps, *by.hold_row(hold))):
            return Verdict.FENCED
        self._session.note(hold.scope, hold.key, hold.attempt, "saved", change(command.before, progress))
        return Verdict.DONE

    def mark(self, command: Mark) -> Verdict:
        """Store how far a handler says it is."""
        row = (milestones.written(command.milestone), *by.hold_row(command.hold))
        return Verdict.DONE if self._session.run(self._statements.mark, row) else Verdict.FENCED

    def park(self, command: Park) -> Verdict:
        """Stop an operation."""
        hold = command.hold
        if self._session.run(self._statements.park, (*by.hold_row(hold), command.if_silent)):
            self._session.note(hold.scope, hold.key, hold.attempt, "parked", command.reason)
            return Verdict.DONE
        # Its worker may ask twice. Of several other processes, one gets DONE.
        is_mine = not command.if_silent and self._session.run(self._statements.is_parked, by.hold_row(hold))
        return Verdict.DONE if is_mine else Verdict.FENCED

    def settle(self, command: Settle) -> Record | None:
        """Read a record under the write lock: every writing transaction has ended then."""
        return self.look(Look(command.hold.scope, command.hold.key))

    def look(self, command: Look) -> Record | None:
        """Read one record."""
        rows = self._session.run(self._statements.look, (command.scope, command.key))
        return by.read_record(rows[0]) if rows else None

    def browse(self, command: Browse) -> tuple[Record, ...]:
        """Read the newest records."""
        if command.digest is None:
            return tuple(self._newest(command.key, command.scope, command.state, command.limit))
        found = [
            record
            for scope, key in self._with_digest(command.digest)
            if command.key in {None, key} and command.scope in {None, scope}
            for record in self._newest(key, scope, command.state, 1)
        ]
        return tuple(sorted(found, key=lambda record: record.created_at, reverse=True)[: command.limit])

    def now(self, _command: Now) -> datetime:
        """Read the clock."""
        return by.read_time(self._session.run(self._statements.now)[0][0])

    def _newest(self, *wanted: Any) -> list[Record]:
        return [by.read_record(row) for row in self._session.run(self._statements.browse, wanted)]

    def _with_digest(self, digest: str) -> Iterator[tuple[str, str]]:
        place = 0
        while rows := self._session.run(self._statements.keys_after, (place, KEYS_AT_ONCE)):
            yield from ((scope, key) for _, scope, key in rows if digest_of(key).startswith(digest))
            place = rows[-1][0]


class Commands(Keys):
    """All commands. Here are those of ``core/commands/upkeep.py``, for services and operators."""

    def find_stuck(self, command: FindStuck) -> tuple[Stuck, ...]:
        """Read the records in progress under an expired lease."""
        wanted = (command.with_pending, command.with_request, command.with_no_token)
        pauses = (command.only_due, FIRST_PAUSE // timedelta(milliseconds=1), MAX_DOUBLINGS)
        rows = self._session.run(self._statements.find_stuck, (*wanted, *pauses, command.limit))
        return tuple(map(by.read_stuck, rows))

    def search(self, command: Search) -> Page:
        """Read a page of records."""
        return searching.search(self._session, command)

    def survey(self, command: Survey) -> Surveyed:
        """Count records."""
        return searching.survey(self._session, command)

    def read_request(self, command: ReadRequest) -> Request | None:
        """Read a stored request."""
        rows = self._session.run(self._statements.read_request, by.hold_row(command.hold))
        return requests.read_back(*rows[0]) if rows else None

    def sweep(self, command: Sweep) -> Verdict:
        """Free a dead worker's key."""
        return self._write(self._statements.sweep, by.hold_row(command.hold), command.hold, "swept")

    def reap(self, command: Reap) -> Reaped:
        """Clear the records past their retention."""
        session, statements = self._session, self._statements
        due: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
        for fate, *row in session.run(statements.find_due, (command.limit,)):
            due[fate].append(row)
        for fate, bulk, event, shared in (
            # First what may be refused, since earlier changes would stay.
            ("fail", statements.fail_due, "abandoned", by.answer_row(command.abandoned)),
            ("delete", statements.delete_due, "reaped", ()),
            ("strip", statements.strip_due, "stripped", ()),
        ):
            for chunk in chunks(due[fate]):
                session.count_all(bulk, shared, [(number,) for number, *_ in chunk])
            if session.is_full or event not in trail.ORDINARY:
                for _, scope, key, attempt in due[fate]:
                    session.note(scope, key, attempt, event)
        reaped = Reaped(deleted=len(due["delete"]), stripped=len(due["strip"]), failed=len(due["fail"]))
        if not session.is_full and (summary := trail.reaped(reaped.deleted, reaped.stripped)) is not None:
            session.note(trail.NO_KEY, trail.NO_KEY, 0, "reaped", summary)
        return reaped

    def add_counts(self, command: AddCounts) -> None:
        """Add to the counts of this minute."""
        self._session.count(self._statements.counts["add"], (json.dumps(dict(command.counts)),))
        self._session.count(self._statements.counts["delete"], ())

    def read_counts(self, command: ReadCounts) -> Minutes:
        """Read the counts of the last minutes."""
        rows = self._session.run(self._statements.counts["read"], (command.minutes,))
        counts = ((by.read_time(minute), outcome, n) for _, minute, outcome, n in rows if minute is not None)
        return Minutes(by.read_time(rows[0][0]), tuple(counts))

    def erase(self, command: Erase) -> Erased:
        """Make tombstones of what has ended."""
        scope, key, _, end = erasing.span(command)
        rows = self._session.run(self._statements.erasing["walk_owner"], (scope, key, end, command.limit))
        walked = [
            erasing.Walked(scope, key, State(state), bool(has_data), bool(has_data) and not command.is_preview)
            for _, scope, key, state, has_data in rows
        ]
        done = erasing.records(command, walked)
        places = [place for place, *_, has_data in rows if has_data]
        self._erase("erase", places, command, trail.erased(done.count, command.reason))
        return done

    def erase_trail(self, command: EraseTrail) -> Erased:
        """Delete lines of the trail."""
        rows = self._session.run(self._statements.erasing["walk_lines"], (*erasing.span(command), command.limit))
        places = [number for _, _, number, may_go in rows if may_go]
        self._erase("erase_lines", places, command, trail.erased(len(places), command.reason, trail.LINES))
        return erasing.lines(command, len(places), [(scope, key, number) for scope, key, number, _ in rows])

    def _erase(self, how: str, places: list[int], command: Erase | EraseTrail, summary: str | None) -> None:
        if summary is not None and not command.is_preview:
            self._session.count(self._statements.erasing[how], (json.dumps(places),))
            self._session.note(trail.NO_KEY, trail.NO_KEY, 0, "erased", summary)

    def discard(self, command: Discard) -> Verdict:
        """Delete a record that has not ended."""
        return self._write(self._statements.discard, by.hold_row(command.hold), command.hold, "discarded")

    def unpark(self, command: Unpark) -> Verdict:
        """Let a parked operation go on."""
        row = (*by.progress_row(command.progress), *by.hold_row(command.hold))
        return self._write(self._statements.unpark, row, command.hold, "resolved")

    def resolve(self, command: Resolution) -> Verdict:
        """End a parked operation."""
        row = (*by.answer_row(command.answer), *by.hold_row(command.hold))
        return self._write(self._statements.resolve, row, command.hold, "resolved")

    def note(self, command: Note) -> None:
        """Write one line into the trail, by itself: a line that can't be written fails alone."""
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

    def reap_inbox(self, command: ReapInbox) -> int:
        """Delete old receipts."""
        return self._session.count(self._statements.reap_inbox, (by.milliseconds(command.older_than), command.limit))

    def _write(self, sql: str, row: tuple[Any, ...], hold: Hold, event: str) -> Verdict:
        for (attempt,) in self._session.run(sql, row):
            self._session.note(hold.scope, hold.key, attempt, event)
            return Verdict.DONE
        return Verdict.FENCED


Table = dict[type[Command[Any]], Callable[[Commands, Any], Any]]

#: Commands that only read.
READS: Table = {
    Look: Commands.look,
    Browse: Commands.browse,
    Search: Commands.search,
    Now: Commands.now,
    FindStuck: Commands.find_stuck,
    Survey: Commands.survey,
    ReadCounts: Commands.read_counts,
    ReadRequest: Commands.read_request,
    ReadTrail: Commands.read_trail,
}
#: Commands that write, one by one, in this order. Claims and endings come before, in bulk.
WRITES: Table = {
    TakeOver: Commands.take_over,
    Save: Commands.save,
    Mark: Commands.mark,
    Park: Commands.park,
    Release: Commands.release,
    Renew: Commands.renew,
    Sweep: Commands.sweep,
    Erase: Commands.erase,
    EraseTrail: Commands.erase_trail,
    Discard: Commands.discard,
    Unpark: Commands.unpark,
    Resolution: Commands.resolve,
    Reap: Commands.reap,
    ReapTrail: Commands.reap_trail,
    ReapInbox: Commands.reap_inbox,
    AddCounts: Commands.add_counts,
    Note: Commands.note,
    # A read, but under the write lock: when it has the lock, no other transaction is running.
    Settle: Commands.settle,
}

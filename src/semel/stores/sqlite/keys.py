"""What a batch does for requests. Its own ends, and in what order its commands are carried out, are in ``batch.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from semel.core.commands import Again, Browse, Look, Mark, Now, Park, Release, Renew, Save, Settle, TakeOver, Verdict
from semel.core.key import digest_of
from semel.core.record import Found, Hold, Record
from semel.core.recovery import change, written
from semel.stores import milestones
from semel.stores.sqlite import statements as by
from semel.stores.sqlite.session import Session
from semel.stores.sqlite.statements import chunks

#: A command, and its place in the batch.
Item = tuple[int, Any]
Items = Sequence[Item]

#: That are in memory at a time, of those whose digests are taken.
KEYS_AT_ONCE = 10_000

_EVENTS = {"complete": "completed", "failed": "failed"}


class Keys:
    """The commands of ``core/commands/keys.py``, on one connection."""

    def __init__(self, session: Session, outcomes: list[Any]) -> None:
        """Those that come in bulk fill in their *outcomes* themselves."""
        self._session = session
        self._statements = session.statements
        self._outcomes = outcomes

    def find(self, items: Items) -> None:
        """Answer the claims whose keys are in use already."""
        for place, found in self._found(items).items():
            self._outcomes[place] = found

    def claim(self, items: Items) -> None:
        """Take the keys that nobody has."""
        holds = {place: Hold(claim.scope, claim.key, 1, claim.token) for place, claim in items}
        rows = [by.claim_row(claim) for _, claim in items]
        if not self._session.write_all(self._statements.claim, rows):
            # Somebody was quicker: another process, or a claim to the same key in this very statement.
            found = self._found(items)
            for place, hold in tuple(holds.items()):
                there = found.get(place)
                if there is None or there.token != hold.token:
                    self._outcomes[place] = there or Again.AGAIN
                    del holds[place]
        self._outcomes_are(holds)
        # The same claim may be there twice: its first copy's reply was thought lost.
        won = {holds[place]: claim.is_accepted for place, claim in items if place in holds}
        for hold, is_accepted in won.items():
            self._session.note(hold.scope, hold.key, 1, "accepted" if is_accepted else "claimed")

    def complete(self, items: Items) -> None:
        """Store how operations ended."""
        rows = [by.complete_row(command) for _, command in items]
        changed = self._session.run_all(self._statements.complete, rows)
        for scope, key, attempt, state in changed:
            self._session.note(scope, key, attempt, _EVENTS[state])
        if len(changed) == len(items):
            self._outcomes_are(dict.fromkeys([place for place, _ in items], Verdict.DONE))
            return
        found = self._found([(place, command.hold) for place, command in items])
        for place, command in items:
            is_done = by.is_answered(found.get(place), command.hold)
            self._outcomes[place] = Verdict.DONE if is_done else Verdict.FENCED

    def take_over(self, command: TakeOver) -> Hold | Again:
        """Take a key from the dead, or from a record past its retention."""
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
        """Prolong leases; say which are lost."""
        lost = []
        for chunk in chunks(command.holds):
            rows = [by.renew_row(hold, lease) for hold, lease in chunk]
            if not self._session.write_all(self._statements.renew, rows):
                lost += [hold for (hold, _), row in zip(chunk, rows, strict=True) if not self._renew_one(row)]
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
        # Its worker may ask twice. Of several others, one did it.
        is_mine = not command.if_silent and self._session.run(self._statements.is_parked, by.hold_row(hold))
        return Verdict.DONE if is_mine else Verdict.FENCED

    def settle(self, command: Settle) -> Record | None:
        """Read a record under the write lock: whoever was writing has ended."""
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

    def _renew_one(self, row: tuple[Any, ...]) -> bool:
        return self._session.write_all(self._statements.renew, [row])

    def _found(self, items: Items) -> dict[int, Found]:
        wanted = [(place, each.scope, each.key) for place, each in items]
        return {row[0]: by.read_found(row) for row in self._session.run_all(self._statements.find, wanted)}

    def _outcomes_are(self, outcomes: dict[int, Any]) -> None:
        for place, outcome in outcomes.items():
            self._outcomes[place] = outcome

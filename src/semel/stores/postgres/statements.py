"""Commands on one key as PostgreSQL statements: pure, and the same for every driver. It runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.core.commands import (
    Again,
    Browse,
    Claim,
    Command,
    Complete,
    FindStuck,
    Look,
    Mark,
    Note,
    Now,
    Park,
    Release,
    Renew,
    Save,
    Settle,
    Sweep,
    TakeOver,
    Verdict,
)
from semel.core.record import Found, Hold, Record
from semel.core.state import State, after
from semel.stores import milestones
from semel.stores.headers import written
from semel.stores.postgres import rows as read_rows
from semel.stores.postgres.builder import PACKAGE, Builder, hint, of_hold
from semel.stores.postgres.errors import lacking
from semel.stores.postgres.joined import key_lock, save
from semel.stores.postgres.rows import Row
from semel.stores.postgres.upkeep import UPKEEP
from semel.stores.requests import written as written_request
from semel.stores.statement import Statement

__all__ = ["OTHERS", "OWNED", "PACKAGE", "UPKEEP", "Statements"]

T = TypeVar("T")


class Statements(Builder):
    """Builds the store's own statements for one table."""

    def of(self, command: Command[T]) -> Statement[T]:
        """Build the statement of a command that goes out by itself."""
        return _BUILD[type(command)](self, command)

    def claim(self, claims: Sequence[Claim]) -> Statement[list[Hold | Found | Again]]:
        """Claim every key of *claims*, which may name a key more than once."""
        # One statement can't insert a key twice. Whoever asked second finds what the first one did.
        first = {(claim.scope, claim.key): claim for claim in reversed(claims)}
        distinct = list(first.values())

        def read(rows: Sequence[Row]) -> list[Hold | Found | Again]:
            outcomes: dict[tuple[str, str], Hold | Found | Again] = {}
            for row in rows:
                place = row[0], row[1]
                outcome = _claimed(row, first[place])
                # A record that was freed after the statement's view of the table is still read, though its key was won.
                if not isinstance(outcomes.get(place), Hold):
                    outcomes[place] = outcome
            found = [outcomes.get((claim.scope, claim.key), Again.AGAIN) for claim in claims]
            if len(distinct) == len(claims):
                return found
            return [
                _share(outcome, claim, first[claim.scope, claim.key])
                for outcome, claim in zip(found, claims, strict=True)
            ]

        return self.statement(
            "claim",
            read,
            scopes=[claim.scope for claim in distinct],
            keys=[claim.key for claim in distinct],
            tokens=[claim.token for claim in distinct],
            fingerprints=[claim.fingerprint for claim in distinct],
            leases=[claim.lease.total_seconds() for claim in distinct],
            retentions=[claim.retention.total_seconds() for claim in distinct],
            on_crashes=[claim.on_crash for claim in distinct],
            after_retentions=[claim.after_retention for claim in distinct],
            requests=[claim.request and written_request(claim.request) for claim in distinct],
            request_bodies=[claim.request and claim.request.body for claim in distinct],
            accepteds=[claim.is_accepted for claim in distinct],
            made_ats=[claim.made_at and claim.made_at.timestamp() for claim in distinct],
        )

    def take_over(self, command: TakeOver) -> Statement[Hold | Again]:
        """Take a record over from the hold that was seen."""
        claim, seen = command.claim, command.seen
        return self.statement(
            "take_over",
            lambda rows: Hold(claim.scope, claim.key, rows[0][0], claim.token) if rows else Again.AGAIN,
            scope=claim.scope,
            key=claim.key,
            token=claim.token,
            fingerprint=claim.fingerprint,
            lease=claim.lease.total_seconds(),
            retention=claim.retention.total_seconds(),
            on_crash=claim.on_crash,
            after_retention=claim.after_retention,
            request=claim.request and written_request(claim.request),
            request_body=claim.request and claim.request.body,
            accepted=claim.is_accepted,
            made_at=claim.made_at and claim.made_at.timestamp(),
            seen_attempt=seen.attempt,
            seen_token=seen.token,
            is_abandoned=command.is_abandoned,
        )

    def complete(self, commands: Sequence[Complete]) -> Statement[list[Verdict | None]]:
        """Store the answers of *commands*; None stands for one that was not stored now, and must be asked about."""

        def read(rows: Sequence[Row]) -> list[Verdict | None]:
            # By the whole hold: a zombie and its heir may end in one batch, and one of them is fenced.
            done = {Hold(*row) for row in rows}
            return [Verdict.DONE if command.hold in done else None for command in commands]

        return self.statement(
            "complete",
            read,
            scopes=[command.hold.scope for command in commands],
            keys=[command.hold.key for command in commands],
            attempts=[command.hold.attempt for command in commands],
            tokens=[command.hold.token for command in commands],
            states=[str(after(State.PROCESSING, command.event)) for command in commands],
            statuses=[command.answer.status for command in commands],
            headers=[written(command.answer.headers) for command in commands],
            bodies=[command.answer.body for command in commands],
            hints=[hint(command.hold, wakes=command.wakes) for command in commands],
        )

    def completed(self, hold: Hold) -> Statement[Verdict]:
        """Ask whether *hold* has stored its answer before."""
        return self.statement("completed", read_rows.verdict, **of_hold(hold))

    def release(self, command: Release) -> Statement[Verdict]:
        """Free a key."""
        return self.statement(
            "release",
            lambda rows: Verdict.FENCED if rows[0][0] else Verdict.DONE,
            hint=hint(command.hold, wakes=command.wakes),
            detail=command.reason,
            **of_hold(command.hold),
        )

    def renew(self, command: Renew) -> Statement[frozenset[Hold]]:
        """Prolong leases."""
        return self.statement(
            "renew",
            lambda rows: frozenset(Hold(*row) for row in rows),
            scopes=[hold.scope for hold, _ in command.holds],
            keys=[hold.key for hold, _ in command.holds],
            attempts=[hold.attempt for hold, _ in command.holds],
            tokens=[hold.token for hold, _ in command.holds],
            leases=[lease.total_seconds() for _, lease in command.holds],
        )

    def mark(self, command: Mark) -> Statement[Verdict]:
        """Store how far a handler says it is."""
        milestone = milestones.written(command.milestone)
        return self.statement("mark", read_rows.verdict, milestone=milestone, **of_hold(command.hold))

    def park(self, command: Park) -> Statement[Verdict]:
        """Stop an operation until an operator has spoken."""
        return self.statement(
            "park", read_rows.verdict, if_silent=command.if_silent, detail=command.reason, **of_hold(command.hold)
        )

    def wait(self, command: Settle) -> Statement[None]:
        """Wait out a transaction that has the key's lock. It comes before ``settle``, whose view must be younger."""
        hold = command.hold
        return self.statement("wait", lambda _rows: None, key_lock=key_lock(self.names, hold.scope, hold.key))

    def settle(self, command: Settle) -> Statement[Record | None]:
        """Wait out a transaction that is changing the record, and read it."""
        return self.statement("settle", read_rows.record_or_none, scope=command.hold.scope, key=command.hold.key)

    def look(self, command: Look) -> Statement[Record | None]:
        """Read one record."""
        return self.statement("look", read_rows.record_or_none, scope=command.scope, key=command.key)

    def browse(self, command: Browse) -> Statement[tuple[Record, ...]]:
        """Read the newest records."""
        return self.statement(
            "browse",
            lambda rows: tuple(read_rows.record(row) for row in rows),
            scope=command.scope,
            key=command.key,
            state=command.state and str(command.state),
            digest=command.digest,
            limit=command.limit,
        )

    def note(self, command: Note) -> Statement[None]:
        """Write a line of the audit trail."""
        return self.statement(
            "note", lambda _rows: None, event=command.event, detail=command.detail, **of_hold(command.hold)
        )

    def now(self, _command: Now) -> Statement[Any]:
        """Read the server's clock."""
        return self.statement("now", lambda rows: rows[0][0])

    def check(self) -> Statement[bool]:
        """Ask whether the server takes no writes; fails where there is no table."""
        return self.statement("check", lambda rows: bool(rows[0][0]))

    def check_privileges(self, where: str) -> Statement[None]:
        """Raise where the role may not do what a request needs; *where* it is connected to, for people."""

        def read(rows: Sequence[Sequence[Any]]) -> None:
            if rows:
                raise lacking(where, rows[0][0], [(table, privilege) for _, table, privilege in rows])

        return self.statement("privileges", read)


#: What requests wait for, one by one.
OTHERS: dict[type[Command[Any]], Callable[[Statements, Any], Statement[Any]]] = {
    TakeOver: Statements.take_over,
    Release: Statements.release,
    Save: save,
    Mark: Statements.mark,
    Park: Statements.park,
    Settle: Statements.settle,
    Look: Statements.look,
    Browse: Statements.browse,
    Note: Statements.note,
    Now: Statements.now,
}

#: What bears the number of the lock that shows that this process lives, or asks whether another does.
OWNED: frozenset[type[Command[Any]]] = frozenset({Claim, TakeOver, Park, FindStuck, Sweep})

_BUILD: dict[type[Command[Any]], Callable[[Statements, Any], Statement[Any]]] = {
    Renew: Statements.renew,
    **OTHERS,
    **UPKEEP,
}


def _claimed(row: Row, claim: Claim) -> Hold | Found:
    _, _, state, attempt, *_ = row
    return Hold(claim.scope, claim.key, attempt, claim.token) if state is None else read_rows.found(row[2:])


def _share(outcome: Hold | Found | Again, claim: Claim, first: Claim) -> Hold | Found | Again:
    """Give the outcome of the *first* claim on a key to another that went out with it."""
    if claim is first or not isinstance(outcome, Hold):
        return outcome
    return Found(
        State.PENDING if first.is_accepted else State.PROCESSING,
        outcome.attempt,
        first.token,
        first.fingerprint,
        None,
        lease_is_over=first.is_accepted,
        is_expired=False,
        is_accepted=first.is_accepted,
        retention_left=first.retention,
    )

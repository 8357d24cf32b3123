"""Commands as PostgreSQL statements, and rows as outcomes: pure, and the same for every driver. It runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from semel.core.commands import Again, Browse, Claim, Command, Complete, Look, Now, Release, Renew, TakeOver, Verdict
from semel.core.message import Answer
from semel.core.record import NOBODYS_TOKEN, Found, Hold, Record
from semel.core.state import State, after
from semel.stores.headers import read_back, written
from semel.stores.statement import Names, Query, Statement, load_queries

T = TypeVar("T")

PACKAGE = "semel.stores.postgres"

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of ``queries.sql``: a name that is in one and not in the other fails at start-up."""

    claim: Query
    take_over: Query
    complete: Query
    completed: Query
    release: Query
    renew: Query
    look: Query
    browse: Query
    now: Query
    check: Query


class Statements:
    """Builds the statements for one table."""

    def __init__(self, names: Names) -> None:
        """Load the queries with *names* put in."""
        queries = Queries(**load_queries(PACKAGE, names))
        self._sql = {each.name: getattr(queries, each.name).numbered for each in fields(Queries)}
        self._order = {each.name: getattr(queries, each.name).parameters for each in fields(Queries)}

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

        parameters = (
            [claim.scope for claim in distinct],
            [claim.key for claim in distinct],
            [claim.token for claim in distinct],
            [claim.fingerprint for claim in distinct],
            [claim.lease.total_seconds() for claim in distinct],
            [claim.retention.total_seconds() for claim in distinct],
        )
        return Statement(self._sql["claim"], parameters, read)

    def take_over(self, command: TakeOver) -> Statement[Hold | Again]:
        """Take a record over from the hold that was seen."""
        claim, seen = command.claim, command.seen
        return self._statement(
            "take_over",
            lambda rows: Hold(claim.scope, claim.key, rows[0][0], claim.token) if rows else Again.AGAIN,
            scope=claim.scope,
            key=claim.key,
            token=claim.token,
            fingerprint=claim.fingerprint,
            lease=claim.lease.total_seconds(),
            retention=claim.retention.total_seconds(),
            seen_attempt=seen.attempt,
            seen_token=seen.token,
        )

    def complete(self, commands: Sequence[Complete]) -> Statement[list[Verdict | None]]:
        """Store the answers of *commands*; None stands for one that was not stored now, and must be asked about."""

        def read(rows: Sequence[Row]) -> list[Verdict | None]:
            # By the whole hold: a zombie and its heir may end in one batch, and one of them is fenced.
            done = {Hold(*row) for row in rows}
            return [Verdict.DONE if command.hold in done else None for command in commands]

        parameters = (
            [command.hold.scope for command in commands],
            [command.hold.key for command in commands],
            [command.hold.attempt for command in commands],
            [command.hold.token for command in commands],
            [str(after(State.PROCESSING, command.event)) for command in commands],
            [command.answer.status for command in commands],
            [written(command.answer.headers) for command in commands],
            [command.answer.body for command in commands],
        )
        return Statement(self._sql["complete"], parameters, read)

    def completed(self, hold: Hold) -> Statement[Verdict]:
        """Ask whether *hold* has stored its answer before."""
        return self._statement("completed", lambda rows: Verdict.DONE if rows else Verdict.FENCED, **_hold(hold))

    def release(self, command: Release) -> Statement[Verdict]:
        """Free a key."""
        return self._statement(
            "release",
            lambda rows: Verdict.FENCED if rows[0][0] else Verdict.DONE,
            nobodys_token=NOBODYS_TOKEN,
            **_hold(command.hold),
        )

    def renew(self, command: Renew) -> Statement[frozenset[Hold]]:
        """Prolong leases."""
        return self._statement(
            "renew",
            lambda rows: frozenset(Hold(*row) for row in rows),
            scopes=[hold.scope for hold, _ in command.holds],
            keys=[hold.key for hold, _ in command.holds],
            attempts=[hold.attempt for hold, _ in command.holds],
            tokens=[hold.token for hold, _ in command.holds],
            leases=[lease.total_seconds() for _, lease in command.holds],
        )

    def look(self, command: Look) -> Statement[Record | None]:
        """Read one record."""
        return self._statement(
            "look", lambda rows: _record(rows[0]) if rows else None, scope=command.scope, key=command.key
        )

    def browse(self, command: Browse) -> Statement[tuple[Record, ...]]:
        """Read the newest records."""
        return self._statement(
            "browse",
            lambda rows: tuple(_record(row) for row in rows),
            scope=command.scope,
            key=command.key,
            state=command.state and str(command.state),
            limit=command.limit,
        )

    def now(self, _command: Now) -> Statement[Any]:
        """Read the server's clock."""
        return self._statement("now", lambda rows: rows[0][0])

    def check(self) -> Statement[bool]:
        """Ask whether the server takes no writes; fails where there is no table."""
        return self._statement("check", lambda rows: bool(rows[0][0]))

    def _statement(self, name: str, read: Any, **parameters: Any) -> Statement[Any]:
        return Statement(self._sql[name], [parameters[each] for each in self._order[name]], read)


_BUILD: dict[type[Command[Any]], Callable[[Statements, Any], Statement[Any]]] = {
    TakeOver: Statements.take_over,
    Release: Statements.release,
    Renew: Statements.renew,
    Look: Statements.look,
    Browse: Statements.browse,
    Now: Statements.now,
}


def _claimed(row: Row, claim: Claim) -> Hold | Found:
    _, _, state, attempt, token, fingerprint, status, headers, body, lease_is_over, is_expired = row
    if state is None:
        return Hold(claim.scope, claim.key, attempt, claim.token)
    answer = None if status is None else Answer(status, read_back(headers), body)
    return Found(State(state), attempt, token, fingerprint, answer, lease_is_over, is_expired)


def _share(outcome: Hold | Found | Again, claim: Claim, first: Claim) -> Hold | Found | Again:
    """Give the outcome of the *first* claim on a key to another that went out with it."""
    if claim is first or not isinstance(outcome, Hold):
        return outcome
    return Found(
        State.PROCESSING, outcome.attempt, first.token, first.fingerprint, None, lease_is_over=False, is_expired=False
    )


def _record(row: Row) -> Record:
    scope, key, state, attempt, token, fingerprint, point, status, headers, body, is_tombstone, *times = row
    created_at, lease_expires_at, completed_at, expires_at, now = times
    answer = None if status is None else Answer(status, read_back(headers), None if is_tombstone else body)
    left: timedelta | None = lease_expires_at and lease_expires_at - now
    return Record(
        scope=scope,
        key=key,
        state=State(state),
        attempt=attempt,
        token=token,
        fingerprint=fingerprint,
        recovery_point=point,
        answer=answer,
        created_at=created_at,
        lease_expires_at=lease_expires_at,
        completed_at=completed_at,
        expires_at=expires_at,
        lease_left=left,
        retention_left=expires_at - now,
    )


def _hold(hold: Hold) -> dict[str, Any]:
    return {"scope": hold.scope, "key": hold.key, "attempt": hold.attempt, "token": hold.token}

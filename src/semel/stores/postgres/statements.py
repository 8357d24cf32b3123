"""Commands on one key as PostgreSQL statements: pure, and the same for every driver. It runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
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
from semel.core.state import TERMINAL, State, after
from semel.stores import milestones
from semel.stores.headers import written
from semel.stores.postgres import rows as read_rows
from semel.stores.postgres.builder import PACKAGE, Builder, hint, of_answer, of_hold
from semel.stores.postgres.errors import lacking
from semel.stores.postgres.joined import key_lock, save
from semel.stores.postgres.rows import Row
from semel.stores.postgres.upkeep import UPKEEP
from semel.stores.requests import line_of
from semel.stores.requests import written as written_request
from semel.stores.statement import Statement

__all__ = ["MAX_BATCH", "OTHERS", "OWNED", "PACKAGE", "UPKEEP", "Statements", "terms_of_claim", "terms_of_complete"]

T = TypeVar("T")

#: Of claims, or of answers, in one statement. What a statement costs by itself is shared by so many, and hardly less by
#: more. Measured with 64 callers: in batches of 64 an operation costs the server half of what it does in 16.
MAX_BATCH = 64

TOKEN_BYTES = 16

# A column of a batch is made of these: a comprehension is a call for each.
_scope, _key, _token = attrgetter("scope"), attrgetter("key"), attrgetter("token")
_fingerprint, _status, _body = attrgetter("fingerprint"), attrgetter("status"), attrgetter("body")
_place = attrgetter("hold.scope", "hold.key")
_traceparent = attrgetter("traceparent")

#: Of the first row that a claim returns: the tokens that won.
_WON = 3


class Statements(Builder):
    """Builds the store's own statements for one table."""

    def of(self, command: Command[T]) -> Statement[T]:
        """Build the statement of a command that goes out by itself."""
        return _BUILD[type(command)](self, command)

    def claim(self, claims: Sequence[Claim]) -> Statement[list[Hold | Found | Again]]:
        """Claim every key of *claims*, which may name a key more than once. They share their ``terms_of_claim``."""
        if len(claims) == 1:
            asked = claims
            if not (self.tells_all or _is_kept(claims[0])):
                return self._claim_one(claims[0])
        else:
            # One statement can't insert a key twice. The second claim finds what the first one did.
            first = {(claim.scope, claim.key): claim for claim in reversed(claims)}
            # In an order that all processes share, so that no two wait for each other.
            asked = [first[place] for place in sorted(first)]
        terms, owner = asked[0], self._owner()
        lines = list(map(line_of, asked))
        request_lines = _unless_alike(lines)
        traces = list(map(_traceparent, asked))
        values: dict[str, Any] = {
            "scope": terms.scope,
            "scopes": _unless_alike(list(map(_scope, asked))),
            "keys": list(map(_key, asked)),
            "tokens": list(map(_token, asked)),
            "fingerprints": list(map(_fingerprint, asked)),
            "request_line": lines[0] if request_lines is None else None,
            "request_lines": request_lines,
            # Each has its own. Where nothing is traced, this is NULL, and no array.
            "traceparents": traces if any(traces) else None,
            "lease": terms.lease.total_seconds(),
            "retention": terms.retention.total_seconds(),
            "on_crash": terms.on_crash,
            "after_retention": terms.after_retention,
            "owner": owner,
            "tests_owner": owner is not None,
        }
        name = "claim"
        if _is_kept(terms):
            name = "claim_kept"
            values |= {
                "requests": [claim.request and written_request(claim.request) for claim in asked],
                "request_bodies": [claim.request and claim.request.body for claim in asked],
                "made_ats": [claim.made_at and claim.made_at.timestamp() for claim in asked],
                "accepted": terms.is_accepted,
                "channel": self._channel,
            }
        return self.batch(name, lambda rows: _claimed(rows, claims, asked), values)

    def _claim_one(self, claim: Claim) -> Statement[list[Hold | Found | Again]]:
        owner = self._owner()
        values = {
            "scope": claim.scope,
            "key": claim.key,
            "token": claim.token,
            "fingerprint": claim.fingerprint,
            "request_line": line_of(claim),
            "lease": claim.lease.total_seconds(),
            "retention": claim.retention.total_seconds(),
            "on_crash": claim.on_crash,
            "after_retention": claim.after_retention,
            "owner": owner,
            "tests_owner": owner is not None,
            "traceparent": claim.traceparent,
        }

        def read(rows: Sequence[Row]) -> list[Hold | Found | Again]:
            if not rows:
                return [Again.AGAIN]
            is_won = rows[0][0] == 0
            return [Hold(claim.scope, claim.key, 1, claim.token) if is_won else read_rows.found(rows[0][1:])]

        return self.batch("claim_one", read, values)

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
            request_line=line_of(claim),
            traceparent=claim.traceparent,
            accepted=claim.is_accepted,
            made_at=claim.made_at and claim.made_at.timestamp(),
            seen_attempt=seen.attempt,
            seen_token=seen.token,
            is_abandoned=command.is_abandoned,
        )

    def complete(self, commands: Sequence[Complete]) -> Statement[list[Verdict | None]]:
        """Store the answers of *commands*, which share their ``terms_of_complete``; None stands for one that was not
        stored now, and must be asked about.
        """
        if len(commands) == 1 and not (self.tells_all or commands[0].wakes):
            return self._complete_one(commands[0])
        # In the order of their keys, as claims are.
        order = sorted(range(len(commands)), key=lambda place: _place(commands[place])) if len(commands) > 1 else [0]
        holds = [commands[place].hold for place in order]
        answers = [commands[place].answer for place in order]
        terms = commands[0]
        statuses = list(map(_status, answers))
        headers = [written(answer.headers) for answer in answers]
        values: dict[str, Any] = {
            "state": str(after(State.PROCESSING, terms.event)),
            "attempt": terms.hold.attempt,
            "scope": holds[0].scope,
            "scopes": _unless_alike(list(map(_scope, holds))),
            "keys": list(map(_key, holds)),
            "tokens": list(map(_token, holds)),
            "status": statuses[0],
            "statuses": _unless_alike(statuses),
            "headers": headers[0],
            "headers_of_each": _unless_alike(headers),
            "bodies": list(map(_body, answers)),
        }
        name = "complete"
        if terms.wakes:
            name = "complete_told"
            values |= {"hints": [hint(hold, wakes=True) for hold in holds], "channel": self._channel}

        def read(rows: Sequence[Row]) -> list[Verdict | None]:
            stored = rows[0][0] or ()
            if len(stored) == len(commands):
                return [Verdict.DONE] * len(commands)
            verdicts: list[Verdict | None] = [None] * len(commands)
            for place in stored:
                verdicts[order[place - 1]] = Verdict.DONE
            return verdicts

        return self.batch(name, read, values)

    def _complete_one(self, command: Complete) -> Statement[list[Verdict | None]]:
        values = {
            "state": str(after(State.PROCESSING, command.event)),
            **of_hold(command.hold),
            **of_answer(command.answer),
        }
        return self.batch("complete_one", lambda rows: [Verdict.DONE if rows else None], values)

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
        """Wait out a transaction that has the key's lock. It comes before ``settle``, which needs a younger view."""
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
            "browse" if command.state is None or command.state in TERMINAL else "browse_unfinished",
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


def terms_of_claim(claim: Claim) -> tuple[object, ...]:
    """What the claims of one statement share."""
    is_kept = _is_kept(claim)
    return claim.lease, claim.retention, claim.on_crash, claim.after_retention, is_kept, is_kept and claim.is_accepted


def terms_of_complete(command: Complete) -> tuple[object, ...]:
    """What the answers of one statement share."""
    return command.event, command.hold.attempt, command.wakes


def _is_kept(claim: Claim) -> bool:
    """Whether it takes more than the usual columns."""
    return (
        claim.request is not None
        or claim.is_accepted
        or (claim.made_at is not None and claim.after_retention == "strip")
    )


def _unless_alike(values: list[T]) -> list[T] | None:
    """Return *values*, or None where one of them stands for all of them: an array costs drivers a look at each."""
    return None if values.count(values[0]) == len(values) else values


def _claimed(rows: Sequence[Row], claims: Sequence[Claim], asked: Sequence[Claim]) -> list[Hold | Found | Again]:
    """Read who won, and what the others came upon. *asked* are the claims that went out, one for each key."""
    won: bytes = rows[0][_WON] or b""
    if len(won) == TOKEN_BYTES * len(claims):
        return [Hold(claim.scope, claim.key, 1, claim.token) for claim in claims]
    outcomes: dict[tuple[str, str], Hold | Found] = {}
    for row in rows[1:]:
        claim = asked[row[0] - 1]
        outcomes[claim.scope, claim.key] = read_rows.found(row[1:])
    # A record that was freed after the statement's view of the table is still read, though its key was won.
    tokens = {bytes(won[start : start + TOKEN_BYTES]) for start in range(0, len(won), TOKEN_BYTES)}
    for claim in asked:
        if claim.token in tokens:
            outcomes[claim.scope, claim.key] = Hold(claim.scope, claim.key, 1, claim.token)
    found = [outcomes.get((claim.scope, claim.key), Again.AGAIN) for claim in claims]
    if len(asked) == len(claims):
        return found
    first = {(claim.scope, claim.key): claim for claim in asked}
    return [_share(outcome, claim, first[claim.scope, claim.key]) for outcome, claim in zip(found, claims, strict=True)]


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
        traceparent=first.traceparent,
    )

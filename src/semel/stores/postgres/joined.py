"""The statements that join a transaction of the application's, and the locks that they take. It runs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

from semel.core.canonical import pack
from semel.core.commands import Begin, Claim, Commit, Finish, Save, Verdict
from semel.core.fingerprint import RECIPE_BYTES, VERSION
from semel.core.record import NO_TOKEN, AfterRetention, Found, Hold, OnCrash
from semel.core.recovery import change, written
from semel.core.state import Event, State, after
from semel.stores.dialect import POSTGRESQL, Dialect
from semel.stores.headers import written as written_headers
from semel.stores.postgres import rows as read
from semel.stores.postgres.builder import Builder, hint, of_answer, of_hold
from semel.stores.postgres.errors import lacking, read_only
from semel.stores.postgres.version import version_questions
from semel.stores.requests import line_of
from semel.stores.statement import DEFAULT_AUDIT, DEFAULT_TABLE, Joined, Names, Query, Statement
from semel.stores.transaction import Begun

_LOCK_BYTES = 8
_RECIPE = len(VERSION) + RECIPE_BYTES

#: What a statement fails by that has found another record than it should: a text that is no number. COMMIT, sent with
#: it, is not carried out then. The server quotes it, in whatever language it speaks.
FENCED = "semel: fenced"
_WAS_WRITTEN = "\nSELECT 1"
_OR_FAIL = f"\nSELECT CAST(CASE WHEN {{moved}} WHEN count(*) = 1 THEN '1' ELSE '{FENCED}' END AS integer)"

#: What it fails by where the transaction does not bear the mark: a handler has ended the one that was begun, and begun
#: another. COMMIT AND CHAIN and ROLLBACK AND CHAIN keep the mark.
ENDED = "semel: ended"
_IS_MARKED = "current_setting('transaction_deferrable') = 'on'"
_OR_FAIL_UNMARKED = _OR_FAIL.replace("CASE", f"CASE WHEN NOT {_IS_MARKED} THEN '{ENDED}'")
_ATTEMPT = "CAST(:attempt AS integer)"

#: What it fails by where a handler has changed the search path, or made a temporary table, so that another table is
#: found by the name than the one that was looked at: the record would be written where no retry looks.
MOVED = "semel: moved"
_TABLE_NOW = "coalesce(CAST(CAST(to_regclass('semel_keys') AS oid) AS text), 'none')"
HAS_MOVED = f"current_setting('semel.table', true) NOT IN ('', {_TABLE_NOW})"
#: Notes which table is meant, in a transaction without a first look.
NOTE_TABLE = f"SELECT set_config('semel.table', {_TABLE_NOW}, true)"

#: How many ways to finish are kept as statements: as many as there are policies, and states.
_MAX_FINISHES = 64
#: How it ended, what its policy says, whether its key tells when it was made, and whether others are given a hint.
_Terms = tuple[Event, timedelta, OnCrash, AfterRetention, bool, bool]

#: What a role needs for a request in atomic mode and for all others.
_NEEDED = (
    (DEFAULT_TABLE, "SELECT"),
    (DEFAULT_TABLE, "INSERT"),
    (DEFAULT_TABLE, "UPDATE"),
    (DEFAULT_TABLE, "DELETE"),
    (DEFAULT_AUDIT, "INSERT"),
)


class JoinedStatements:
    """Builds them for one table."""

    def __init__(self, builder: Builder, where: str) -> None:
        """Build with *builder*; *where* is the server's name, for people."""
        self._builder = builder
        self._where = where
        self.dialect = Dialect(POSTGRESQL, builder.names, has_trail=builder.has_trail, where=where)
        self._table = _table(builder.names)
        query = builder.query
        self._lock, self._peek, self._begin, self._probe = map(query, ("lock", "peek", "begin", "probe"))
        self._noted = f"{query('note_finish').text}\n" if builder.tells_all else ""
        self._finishes: dict[_Terms, tuple[Query, Query]] = {}
        self._moved = f"{builder.names.put_into(HAS_MOVED)} THEN '{MOVED}'"
        self._replace, self._save = self._failing(query("replace")), self._failing(query("save"))
        self.has_questions = True

    def questions(self) -> Iterator[Joined[Any]]:
        """Ask, in the first transaction, whether this code is too old for the tables."""
        yield from version_questions(self._builder.names, self._where)
        self.has_questions = False

    def opening(self, command: Begin) -> Sequence[Joined[None]]:
        """Take the locks, and look whether the handler can be run: no row comes back if it can."""
        claim = command.claim
        scope, key = claim.scope, claim.key
        request_lock, key_lock = locks(self._table, scope, key, claim.fingerprint)
        return (
            Joined(self._lock, {"request_lock": request_lock, "key_lock": key_lock}, _nothing),
            Joined(self._peek, {"scope": scope, "key": key}, _nothing),
        )

    def begin(self, command: Begin) -> Joined[Begun]:
        """Take the key's lock, and read what is there."""
        claim = command.claim
        request_lock, key_lock = locks(self._table, claim.scope, claim.key, claim.fingerprint)
        values = {
            "scope": claim.scope,
            "key": claim.key,
            "request_lock": request_lock,
            "key_lock": key_lock,
            "tests_owner": self._builder.owner() is not None,
        }
        return Joined(self._begin, values, partial(self._begun, claim))

    def probe(self, command: Begin) -> Sequence[Joined[None]]:
        """Fail where a record was committed after the transaction's only snapshot."""
        claim = command.claim
        return (
            _SAVEPOINT,
            self._builder.joined(
                self._probe,
                _nothing,
                scope=claim.scope,
                key=claim.key,
                token=claim.token,
                fingerprint=claim.fingerprint,
            ),
            _BACK,
        )

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen."""
        if command.seen is not None:
            return self._replaced(command, command.seen)
        claim, hold, answer, wakes = command.claim, command.hold, command.answer, command.wakes
        is_dated = claim.made_at is not None
        terms = command.event, claim.retention, claim.on_crash, claim.after_retention, is_dated, wakes
        values = {
            "scope": hold.scope,
            "key": hold.key,
            "attempt": hold.attempt,
            "token": hold.token,
            "fingerprint": claim.fingerprint,
            "status": answer.status,
            "headers": written_headers(answer.headers),
            "body": answer.body,
            "request_line": line_of(claim),
            "traceparent": claim.traceparent,
        }
        query, marked = self._finishes.get(terms) or self._finish(terms)
        if is_dated or wakes or self._noted:
            made_at = claim.made_at and claim.made_at.timestamp()
            usual = self._builder.joined(query, _done, **values, made_at=made_at, hint=hint(hold, wakes=wakes))
            values = dict(usual.parameters)
        return Joined(query, values, _done, marked=marked)

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""
        query, marked = self._save
        values = _of_progress(command)
        values["audit"] = self._builder.has_trail
        values["actor"] = self._builder.actor() if self._builder.has_trail else None
        return Joined(query, values, _done, marked=marked)

    def _replaced(self, command: Finish, seen: Hold) -> Joined[Verdict]:
        """Write the finished record in the place of the one that was seen."""
        claim = command.claim
        query, marked = self._replace
        joined = self._builder.joined(
            query,
            _done,
            **of_hold(command.hold),
            **of_answer(command.answer),
            state=str(after(None, command.event)),
            fingerprint=claim.fingerprint,
            retention=claim.retention.total_seconds(),
            on_crash=claim.on_crash,
            after_retention=claim.after_retention,
            request_line=line_of(claim),
            traceparent=claim.traceparent,
            made_at=claim.made_at and claim.made_at.timestamp(),
            seen_attempt=seen.attempt,
            seen_token=seen.token,
            hint=hint(command.hold, wakes=command.wakes),
        )
        return Joined(query, joined.parameters, _done, marked=marked)

    def _finish(self, terms: _Terms) -> tuple[Query, Query]:
        """Make the statement that finishes under these terms, without and with a look at the mark."""
        event, retention, on_crash, after_retention, is_dated, wakes = terms
        name = f"finish{'_dated' if is_dated else ''}{'_told' if wakes else ''}"
        query = Query(self._noted + self._builder.query(name).text)
        query = query.with_words(
            state=str(after(None, event)),
            retention=f"{retention.total_seconds():f} seconds",
            on_crash=on_crash,
            after_retention=after_retention,
        )
        seen = f"CASE WHEN {self._moved}"
        made = (
            Query(query.text.replace(_ATTEMPT, f"{_ATTEMPT} * CAST({seen} ELSE '1' END AS integer)")),
            Query(
                query.text.replace(
                    _ATTEMPT, f"{_ATTEMPT} * CAST({seen} WHEN {_IS_MARKED} THEN '1' ELSE '{ENDED}' END AS integer)"
                )
            ),
        )
        if len(self._finishes) >= _MAX_FINISHES:
            self._finishes.clear()
        self._finishes[terms] = made
        return made

    def _failing(self, query: Query) -> tuple[Query, Query]:
        """Return *query*, which ends with a row if it has written, as one that fails if it has not; and as one that
        fails as well where the transaction does not bear the mark.
        """
        before, _, rest = query.text.rpartition(_WAS_WRITTEN)
        plain, marked = (each.format(moved=self._moved) for each in (_OR_FAIL, _OR_FAIL_UNMARKED))
        return Query(before + plain + rest), Query(before + marked + rest)

    def _begun(self, claim: Claim, rows: Sequence[Sequence[Any]]) -> Begun:
        holder, is_replica, is_read_only, powerless_role, keeps_snapshot, *record = rows[0]
        if is_replica:
            # Its record may be old: what it calls finished, the primary may have released since.
            raise read_only(self._where)
        found = None if record[0] is None else read.found(record)
        if found is not None and not found.may_be_taken:
            # What it says holds whichever transaction has the lock.
            return Begun(found, is_final=True)
        if is_read_only:
            raise read_only(self._where)
        if powerless_role is not None:
            put = self._builder.names.put_into
            raise lacking(self._where, powerless_role, [(put(table), privilege) for table, privilege in _NEEDED])
        if holder == "mine":
            seen = found or Hold(claim.scope, claim.key, 1, claim.token)
        else:
            seen = _in_progress(found, claim, is_same=holder == "same")
        return Begun(seen, keeps_snapshot=keeps_snapshot)


def save(builder: Builder, command: Save) -> Statement[Verdict]:
    """Build what a phase's commit says, in a transaction of the store's own."""
    return builder.statement("save", read.verdict, **_of_progress(command))


@lru_cache(maxsize=512)  # A look that brings something is followed by another.
def locks(table: bytes, scope: str, key: str, fingerprint: bytes) -> tuple[str, str]:
    """Return the numbers of two advisory locks: the one that only the same request under this key asks for, and the
    key's. The table counts: two of them in one database share the numbers.
    """
    of_key = pack((table, scope.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass")))
    return _number(of_key + pack((fingerprint,))), _number(of_key)


def key_lock(names: Names, scope: str, key: str) -> str:
    """Return the number of a key's advisory lock."""
    return _number(pack((_table(names), _bytes(scope), _bytes(key))))


def _in_progress(found: Found | None, claim: Claim, *, is_same: bool) -> Found:
    """Return what is known of a key that another transaction is at, over a record that may be taken or over none."""
    if found is not None and not found.is_expired:
        # It stays the same operation, whichever request has the lock for a moment.
        fingerprint = found.fingerprint
    else:
        fingerprint = claim.fingerprint if is_same else _unlike(claim.fingerprint)
    return Found(State.PROCESSING, 1, NO_TOKEN, fingerprint, None, lease_is_over=False, is_expired=False)


def _nothing(_rows: Sequence[Sequence[Any]]) -> None:
    """Read no row."""


def _done(_rows: Sequence[Sequence[Any]]) -> Verdict:
    """Read a write that was made: one that was not has failed."""
    return Verdict.DONE


_SAVEPOINT = Joined(Query("SAVEPOINT semel_probe"), {}, _nothing)
_BACK = Joined(Query("ROLLBACK TO SAVEPOINT semel_probe"), {}, _nothing)


def _unlike(fingerprint: bytes) -> bytes:
    """Return a fingerprint of the same recipe that is no request's, and was sent to no place there is."""
    return fingerprint[:_RECIPE] + bytes(byte ^ 0xFF for byte in fingerprint[_RECIPE:])


def _of_progress(command: Save | Commit) -> dict[str, object]:
    hold, progress = command.hold, command.progress
    return {
        "scope": hold.scope,
        "key": hold.key,
        "attempt": hold.attempt,
        "token": hold.token,
        "steps": written(progress),
        "before": written(command.before),
        "recovery_point": progress.recovery_point,
        "detail": change(command.before, progress),
    }


def _number(packed: bytes) -> str:
    digest = hashlib.sha256(packed).digest()
    return str(int.from_bytes(digest[:_LOCK_BYTES], "big", signed=True))


@lru_cache(maxsize=16)  # There are as many as there are stores.
def _table(names: Names) -> bytes:
    return names.put_into(DEFAULT_TABLE).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

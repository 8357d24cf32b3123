"""The statements that join a transaction of the application's, and the locks that they take. It runs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from semel.core.canonical import pack
from semel.core.commands import Begin, Claim, Commit, Finish, Save, Verdict
from semel.core.fingerprint import RECIPE_BYTES, VERSION
from semel.core.record import NOBODYS_TOKEN, Found, Hold
from semel.core.recovery import change, written
from semel.core.state import State, after
from semel.stores.postgres import rows as read
from semel.stores.postgres.builder import Builder, hint, of_answer, of_hold
from semel.stores.postgres.errors import lacking, read_only
from semel.stores.requests import line_of
from semel.stores.statement import DEFAULT_AUDIT, DEFAULT_TABLE, Joined, Names, Query, Statement
from semel.stores.transaction import Begun

_LOCK_BYTES = 8
_RECIPE = len(VERSION) + RECIPE_BYTES

#: What a statement fails by that has found another record than it should: a text that is no number. COMMIT, sent with
#: it, is not carried out then. The server quotes it, in whatever language it speaks.
FENCED = "semel: fenced"
_WAS_WRITTEN = "\nSELECT 1"
_OR_FAIL = f"\nSELECT CAST(CASE WHEN count(*) = 1 THEN '1' ELSE '{FENCED}' END AS integer)"

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
        query = builder.query
        self._lock, self._peek, self._begin, self._probe = map(query, ("lock", "peek", "begin", "probe"))
        noted = f"{query('note_finish').text}\n" if builder.tells_all else ""
        self._finish = Query(noted + query("finish").text)
        self._replace, self._save = _failing(query("replace")), _failing(query("save"))

    def opening(self, command: Begin) -> Sequence[Joined[None]]:
        """Take the locks, and look whether the handler can be run: no row comes back if it can."""
        claim, names = command.claim, self._builder.names
        locks = {
            "request_lock": request_lock(names, claim),
            "key_lock": key_lock(names, claim.scope, claim.key),
        }
        place = {"scope": claim.scope, "key": claim.key}
        return Joined(self._lock, locks, _nothing), Joined(self._peek, place, _nothing)

    def begin(self, command: Begin) -> Joined[Begun]:
        """Take the key's lock, and read what is there."""
        claim, names = command.claim, self._builder.names
        return self._builder.joined(
            self._begin,
            lambda rows: self._begun(rows[0], claim),
            scope=claim.scope,
            key=claim.key,
            key_lock=key_lock(names, claim.scope, claim.key),
            request_lock=request_lock(names, claim),
        )

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
        claim, seen = command.claim, command.seen
        return self._builder.joined(
            self._finish if seen is None else self._replace,
            _done,
            **of_hold(command.hold),
            **of_answer(command.answer),
            state=str(after(None, command.event)),
            fingerprint=claim.fingerprint,
            retention=claim.retention.total_seconds(),
            on_crash=claim.on_crash,
            after_retention=claim.after_retention,
            request_line=line_of(claim),
            made_at=claim.made_at and claim.made_at.timestamp(),
            seen_attempt=seen and seen.attempt,
            seen_token=seen and seen.token,
            hint=hint(command.hold, wakes=command.wakes),
        )

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""
        return self._builder.joined(self._save, _done, **_of_progress(command))

    def _begun(self, row: Sequence[Any], claim: Claim) -> Begun:
        holder, is_read_only, powerless_role, keeps_snapshot, *record = row
        found = None if record[0] is None else read.found(record)
        if found is not None and not found.may_be_taken:
            # What it says holds whichever transaction has the lock.
            return Begun(found, keeps_snapshot=keeps_snapshot)
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


def key_lock(names: Names, scope: str, key: str) -> str:
    """Return the number of a key's advisory lock. The table counts: two of them in one database share the numbers."""
    return _number(_table(names), _bytes(scope), _bytes(key))


def request_lock(names: Names, claim: Claim) -> str:
    """Return the number of the advisory lock that only the same request under this key asks for."""
    return _number(_table(names), _bytes(claim.scope), _bytes(claim.key), claim.fingerprint)


def _in_progress(found: Found | None, claim: Claim, *, is_same: bool) -> Found:
    """Return what is known of a key that another transaction is at, over a record that may be taken or over none."""
    if found is not None and not found.is_expired:
        # It stays the same operation, whichever request has the lock for a moment.
        fingerprint = found.fingerprint
    else:
        fingerprint = claim.fingerprint if is_same else _unlike(claim.fingerprint)
    return Found(State.PROCESSING, 1, NOBODYS_TOKEN, fingerprint, None, lease_is_over=False, is_expired=False)


def _nothing(_rows: Sequence[Sequence[Any]]) -> None:
    """Read no row."""


def _done(_rows: Sequence[Sequence[Any]]) -> Verdict:
    """Read a write that was made: one that was not has failed."""
    return Verdict.DONE


def _failing(query: Query) -> Query:
    """Return *query*, which ends with a row if it has written, as one that fails if it has not."""
    before, _, rest = query.text.rpartition(_WAS_WRITTEN)
    return Query(before + _OR_FAIL + rest)


_SAVEPOINT = Joined(Query("SAVEPOINT semel_probe"), {}, _nothing)
_BACK = Joined(Query("ROLLBACK TO SAVEPOINT semel_probe"), {}, _nothing)


def _unlike(fingerprint: bytes) -> bytes:
    """Return a fingerprint of the same recipe that is no request's, and was sent to no place there is."""
    return fingerprint[:_RECIPE] + bytes(byte ^ 0xFF for byte in fingerprint[_RECIPE:])


def _of_progress(command: Save | Commit) -> dict[str, object]:
    progress = command.progress
    return of_hold(command.hold) | {
        "steps": written(progress),
        "before": written(command.before),
        "recovery_point": progress.recovery_point,
        "detail": change(command.before, progress),
    }


def _number(*parts: bytes) -> str:
    digest = hashlib.sha256(pack(parts)).digest()
    return str(int.from_bytes(digest[:_LOCK_BYTES], "big", signed=True))


@lru_cache(maxsize=16)  # There are as many as there are stores.
def _table(names: Names) -> bytes:
    return names.put_into(DEFAULT_TABLE).encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

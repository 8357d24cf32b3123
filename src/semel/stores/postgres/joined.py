"""The statements that join a transaction of the application's, and the locks that they take. It runs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from semel.core.canonical import pack
from semel.core.commands import Begin, Claim, Commit, Finish, Save, Verdict
from semel.core.fingerprint import RECIPE_BYTES, VERSION
from semel.core.record import NOBODYS_TOKEN, Found, Hold
from semel.core.recovery import change, written
from semel.core.state import State, after
from semel.stores.postgres import rows as read
from semel.stores.postgres.builder import Builder, hint, of_answer, of_hold
from semel.stores.statement import DEFAULT_TABLE, Joined, Names, Statement

_LOCK_BYTES = 8
_RECIPE = len(VERSION) + RECIPE_BYTES


class JoinedStatements:
    """Builds them for one table."""

    def __init__(self, builder: Builder) -> None:
        """Build with *builder*."""
        self._builder = builder

    def begin(self, command: Begin) -> Joined[Hold | Found]:
        """Take the key's lock and read what is there."""
        claim, names = command.claim, self._builder.names
        return self._builder.joined(
            "begin",
            lambda rows: _begun(rows[0], claim),
            scope=claim.scope,
            key=claim.key,
            key_lock=key_lock(names, claim.scope, claim.key),
            request_lock=request_lock(names, claim),
        )

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen."""
        claim, seen = command.claim, command.seen
        return self._builder.joined(
            "finish",
            read.verdict,
            **of_hold(command.hold),
            **of_answer(command.answer),
            state=str(after(None, command.event)),
            fingerprint=claim.fingerprint,
            retention=claim.retention.total_seconds(),
            on_crash=claim.on_crash,
            after_retention=claim.after_retention,
            seen_attempt=seen and seen.attempt,
            seen_token=seen and seen.token,
            hint=hint(command.hold, wakes=command.wakes),
        )

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""
        return self._builder.joined("save", read.verdict, **_of_progress(command))


def save(builder: Builder, command: Save) -> Statement[Verdict]:
    """Build what a phase's commit says, in a transaction of the store's own."""
    return builder.statement("save", read.verdict, **_of_progress(command))


def key_lock(names: Names, scope: str, key: str) -> str:
    """Return the number of a key's advisory lock. The table counts: two of them in one database share the numbers."""
    return _number(_table(names), _bytes(scope), _bytes(key))


def request_lock(names: Names, claim: Claim) -> str:
    """Return the number of the advisory lock that only the same request under this key asks for."""
    return _number(_table(names), _bytes(claim.scope), _bytes(claim.key), claim.fingerprint)


def _begun(row: Sequence[object], claim: Claim) -> Hold | Found:
    holder, state, *_ = row
    if holder == "mine":
        return Hold(claim.scope, claim.key, 1, claim.token) if state is None else read.found(row[1:])
    fingerprint = claim.fingerprint if holder == "same" else _unlike(claim.fingerprint)
    return Found(State.PROCESSING, 1, NOBODYS_TOKEN, fingerprint, None, lease_is_over=False, is_expired=False)


def _unlike(fingerprint: bytes) -> bytes:
    """Return a fingerprint of the same recipe that is no request's: one of a strange recipe would match any."""
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

"""The statements that join a transaction of the application's. Who begins and ends it is in ``units.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.core import recovery
from semel.core.commands import Begin, Commit, Finish, Verdict
from semel.core.record import Hold
from semel.core.state import Event
from semel.stores.headers import written
from semel.stores.sqlite.statements import ENDINGS, Statements, milliseconds, read_found, written_time
from semel.stores.statement import Joined
from semel.stores.transaction import Begun

_EVENTS = {Event.COMPLETE: "completed", Event.FAIL: "failed"}


class SQLiteJoins:
    """The statements of the SQLite store that join."""

    def __init__(self, statements: Statements, actor: str | None) -> None:
        """Without an *actor* there is no audit trail."""
        self._statements = statements
        self._actor = actor

    def opening(self, command: Begin) -> None:  # noqa: ARG002 - PostgreSQL's concern
        """Nothing: the write lock of the whole file is the key's lock, and a transaction begins with it."""
        return

    def probe(self, command: Begin) -> tuple[()]:  # noqa: ARG002 - PostgreSQL's concern
        """Nothing: the snapshot is taken with the write lock."""
        return ()

    def begin(self, command: Begin) -> Joined[Begun]:
        """Read what is there."""
        claim = command.claim

        def read(rows: Sequence[Sequence[Any]]) -> Begun:
            return Begun(read_found(rows[0]) if rows else Hold(claim.scope, claim.key, 1, claim.token))

        return Joined(self._statements.begin, {"scope": claim.scope, "key": claim.key}, read)

    def finish(self, command: Finish) -> Joined[Verdict]:
        """Write the finished record, if it is still what was seen."""
        claim, answer, seen = command.claim, command.answer, command.seen
        parameters = _mine(command.hold) | {
            "state": ENDINGS[command.event],
            "fingerprint": claim.fingerprint,
            "on_crash": claim.on_crash,
            "after_retention": claim.after_retention,
            "made_at": claim.made_at and written_time(claim.made_at),
            "retention": milliseconds(claim.retention),
            "status": answer.status,
            "headers": written(answer.headers),
            "body": answer.body,
            # NULL equals nothing: where nothing was seen, nothing may be there.
            "seen_attempt": None if seen is None else seen.attempt,
            "seen_token": None if seen is None else seen.token,
        }
        line = self._line(command.hold, _EVENTS[command.event], None)
        return Joined(self._statements.finish, parameters, _verdict, line)

    def commit(self, command: Commit) -> Joined[Verdict]:
        """Write how far the operation has come, if its hold is live."""
        hold, progress = command.hold, command.progress
        steps = {
            "steps": recovery.written(progress),
            "recovery_point": progress.recovery_point,
            "before": recovery.written(command.before),
        }
        line = self._line(hold, "saved", recovery.change(command.before, progress))
        return Joined(self._statements.save_inside, _mine(hold) | steps, _verdict, line)

    def _line(self, hold: Hold, event: str, detail: str | None) -> Joined[None] | None:
        if self._actor is None:
            return None
        parameters = {
            "scope": hold.scope,
            "key": hold.key,
            "attempt": hold.attempt,
            "event": event,
            "actor": self._actor,
            "detail": detail,
        }
        return Joined(self._statements.write_down_inside, parameters, lambda _: None)


def _mine(hold: Hold) -> dict[str, Any]:
    return {"scope": hold.scope, "key": hold.key, "attempt": hold.attempt, "token": hold.token}


def _verdict(rows: Sequence[Sequence[Any]]) -> Verdict:
    return Verdict.DONE if rows else Verdict.FENCED

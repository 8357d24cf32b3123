"""The commands of ``core/commands/upkeep.py``, for services and operators. Those of requests are in ``keys.py``."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from semel.core.commands import (
    AddCounts,
    Discard,
    Erase,
    Erased,
    EraseTrail,
    FindStuck,
    Minutes,
    Note,
    Page,
    ReadCounts,
    ReadRequest,
    ReadTrail,
    Reap,
    Reaped,
    ReapTrail,
    Resolution,
    Search,
    Survey,
    Surveyed,
    Sweep,
    Unpark,
    Verdict,
)
from semel.core.message import Answer, Request
from semel.core.record import NO_TOKEN, Entry, Hold, Record, Stuck
from semel.core.recovery import written
from semel.core.search import page, surveyed
from semel.core.state import TERMINAL, Event, State, after
from semel.core.trail import LINES, NO_KEY, erased
from semel.core.upkeep import in_turn, is_due
from semel.stores import erasing
from semel.stores.memory.table import Moment, Row, Table, must

#: How long counts are kept.
_KEPT = timedelta(hours=2)


class Upkeep(Table):
    """Sweeping, reaping, resolving, and the trail."""

    def _find_stuck(self, command: FindStuck, moment: Moment) -> tuple[Stuck, ...]:
        stuck = [
            Stuck(
                hold=Hold(scope, key, row.attempt, row.token),
                on_crash=row.on_crash,
                steps=row.steps,
                has_request=row.request is not None,
                silent_for=moment.now - (row.lease_expires_at or row.created_at),
                tries=row.tries,
                is_accepted=row.is_accepted,
            )
            for (scope, key), row in self._rows.items()
            if (row.state is State.PROCESSING or (row.state is State.PENDING and command.with_pending))
            and row.lease_is_over(moment.now)
            and not row.is_expired(moment.now)
            and (row.request is not None or not command.with_request)
            and (row.token != NO_TOKEN or command.with_no_token)
        ]
        if command.only_due:
            stuck = [each for each in stuck if is_due(each)]
        return in_turn(stuck, command.limit)

    def _read_request(self, command: ReadRequest, _moment: Moment) -> Request | None:
        row = self._mine(command.hold, *State)
        return None if row is None else row.request

    def _sweep(self, command: Sweep, moment: Moment) -> Verdict:
        row = self._mine(command.hold, State.PROCESSING)
        if row is None or not row.lease_is_over(moment.now):
            return Verdict.FENCED
        self._update(command.hold, state=after(row.state, Event.SWEEP), token=NO_TOKEN)
        self._write_down(command.hold, "swept", moment)
        return Verdict.DONE

    def _reap(self, command: Reap, moment: Moment) -> Reaped:
        due = sorted(
            ((row.expires_at, place, row) for place, row in self._rows.items() if _is_due(row, moment.now)),
            key=lambda each: each[0],
        )
        deleted = stripped = failed = 0
        for _, (scope, key), row in due[: command.limit]:
            hold = Hold(scope, key, row.attempt, row.token)
            if row.state not in TERMINAL:
                self._abandon(hold, row, command.abandoned, moment)
                failed += 1
            elif row.after_retention == "strip":
                tombstone = Answer(must(row.answer).status, (), None)
                self._update(hold, answer=tombstone, steps=None, recovery_point=None, after_retention="keep")
                self._write_down(hold, "stripped", moment)
                stripped += 1
            else:
                del self._rows[scope, key]
                self._write_down(hold, "reaped", moment)
                deleted += 1
        self._sum_up(deleted, stripped, moment)
        return Reaped(deleted=deleted, stripped=stripped, failed=failed)

    def _abandon(self, hold: Hold, row: Row, answer: Answer, moment: Moment) -> None:
        state = after(row.state, Event.ABANDON)
        # Without a holder: its worker, if it is alive, must not believe that its own answer is the one that is kept.
        self._update(
            hold,
            state=state,
            token=NO_TOKEN,
            answer=answer,
            completed_at=moment.now,
            lease_expires_at=None,
            request=None,
        )
        self._write_down(hold, "abandoned", moment)

    def _erase(self, command: Erase, moment: Moment) -> Erased:
        scope, key, _, end = erasing.span(command)
        walked = []
        for place in sorted(each for each in self._rows if (scope, key) < each < (end,))[: command.limit]:
            row = self._rows[place]
            bare = row.bare()
            has_data = bare != row
            walked.append(erasing.Walked(*place, row.state, has_data, has_data and not command.is_preview))
            if not command.is_preview:
                self._rows[place] = bare
        done = erasing.records(command, walked)
        self._note_erasure(command, erased(done.count, command.reason), moment)
        return done

    def _erase_trail(self, command: EraseTrail, moment: Moment) -> Erased:
        scope, key, number, end = erasing.span(command)
        # A line has no number of its own, and those of one key are deleted together or not at all.
        keys = sorted(
            {(line.scope, line.key) for line in self._trail if (scope, key) < (line.scope, line.key) < (end,)}
        )
        keys = keys[: command.limit]
        gone = {each for each in keys if each not in self._rows or self._rows[each].state in TERMINAL}
        rest = [line for line in self._trail if (line.scope, line.key) not in gone]
        count = len(self._trail) - len(rest)
        if not command.is_preview:
            self._trail = rest
        self._note_erasure(command, erased(count, command.reason, LINES), moment)
        return erasing.lines(command, count, [(*each, number) for each in keys])

    def _note_erasure(self, command: Erase | EraseTrail, summary: str | None, moment: Moment) -> None:
        if summary is not None and not command.is_preview:
            self._write_down(Hold(NO_KEY, NO_KEY, 0, NO_TOKEN), "erased", moment, summary)

    def _discard(self, command: Discard, moment: Moment) -> Verdict:
        row = self._mine(command.hold, State.PENDING, State.PROCESSING, State.UNKNOWN)
        if row is None:
            return Verdict.FENCED
        del self._rows[command.hold.scope, command.hold.key]
        self._write_down(command.hold, "discarded", moment)
        return Verdict.DONE

    def _unpark(self, command: Unpark, moment: Moment) -> Verdict:
        hold, progress = command.hold, command.progress
        row = self._mine(hold, State.UNKNOWN)
        if row is None:
            return Verdict.FENCED
        self._update(
            hold,
            state=after(row.state, Event.RESOLVE),
            attempt=row.attempt + 1,
            token=NO_TOKEN,
            lease_expires_at=moment.now,
            expires_at=_anew(row, moment.now),
            tries=0,
            steps=written(progress),
            recovery_point=progress.recovery_point,
        )
        self._write_down(replace(hold, attempt=row.attempt + 1), "resolved", moment)
        return Verdict.DONE

    def _resolve(self, command: Resolution, moment: Moment) -> Verdict:
        row = self._mine(command.hold, State.UNKNOWN)
        if row is None:
            return Verdict.FENCED
        state = after(row.state, Event.COMPLETE)
        self._update(
            command.hold,
            state=state,
            token=NO_TOKEN,
            answer=command.answer,
            completed_at=moment.now,
            expires_at=_anew(row, moment.now),
            request=None,
        )
        self._write_down(command.hold, "resolved", moment)
        return Verdict.DONE

    def _note(self, command: Note, moment: Moment) -> None:
        self._write_down(command.hold, command.event, moment, command.detail)

    def _read_trail(self, command: ReadTrail, _moment: Moment) -> tuple[Entry, ...]:
        lines = [line for line in self._trail if (line.scope, line.key) == (command.scope, command.key)]
        return tuple(lines[: command.limit])

    def _search(self, command: Search, moment: Moment) -> Page:
        return page(command, self._all(moment), lambda record: self._details(record.scope, record.key))

    def _survey(self, command: Survey, moment: Moment) -> Surveyed:
        expired = sum(_is_due(row, moment.now) for row in self._rows.values())
        return surveyed(command, self._all(moment), moment.now, expired)

    def _add_counts(self, command: AddCounts, moment: Moment) -> None:
        minute = moment.now.replace(second=0, microsecond=0)
        for outcome, number in command.counts.items():
            self._counts[minute, outcome] += number
        for old in [each for each in self._counts if each[0] < minute - _KEPT]:
            del self._counts[old]

    def _read_counts(self, command: ReadCounts, moment: Moment) -> Minutes:
        since = moment.now - timedelta(minutes=command.minutes)
        counts = ((minute, outcome, n) for (minute, outcome), n in self._counts.items() if minute > since)
        return Minutes(moment.now, tuple(counts))

    def _all(self, moment: Moment) -> list[Record]:
        return [row.without_body().record(scope, key, moment.now) for (scope, key), row in self._rows.items()]

    def _details(self, scope: str, key: str) -> list[str | None]:
        return [line.detail for line in self._trail if (line.scope, line.key) == (scope, key)]

    def _reap_trail(self, command: ReapTrail, moment: Moment) -> int:
        old = [line for line in self._trail if line.at <= moment.now - command.older_than][: command.limit]
        # Lines are in the order of their time, so the old ones are the first ones.
        del self._trail[: len(old)]
        return len(old)


def _anew(row: Row, now: datetime) -> datetime:
    """Return when a record expires after its retention has started again."""
    return now + (row.expires_at - row.created_at)


def _is_due(row: Row, now: datetime) -> bool:
    """Whether the reaper may touch it: not if it is in progress or parked, or a tombstone that has to stay."""
    if not row.is_expired(now):
        return False
    return row.after_retention != "keep" if row.state in TERMINAL else row.lease_is_over(now)

"""Commands on one key: claims, endings, steps. Those on many keys, and those of operators, are in ``upkeep.py``."""

from __future__ import annotations

from dataclasses import replace

from semel.core.commands import (
    Again,
    Begin,
    Browse,
    Claim,
    Commit,
    Complete,
    Finish,
    Look,
    Mark,
    Park,
    Release,
    Renew,
    Save,
    Settle,
    TakeOver,
    Verdict,
)
from semel.core.key import digest_of
from semel.core.record import NO_TOKEN, Found, Hold, Record
from semel.core.recovery import change, written
from semel.core.state import TERMINAL, Event, State, after
from semel.stores.memory.table import Moment, Table, must, new_row


class Keys(Table):
    """The commands of ``core/commands/keys.py``, and the ends of transactions."""

    def _claim(self, claim: Claim, moment: Moment) -> Hold | Found:
        row = self._rows.get((claim.scope, claim.key))
        if row is not None:
            return row.found(moment.now)
        hold = Hold(claim.scope, claim.key, 1, claim.token)
        event = Event.ACCEPT if claim.is_accepted else Event.CLAIM
        self._rows[claim.scope, claim.key] = new_row(claim, must(after(None, event)), 1, moment.now)
        self._write_down(hold, _CLAIMED[event], moment)
        return hold

    def _take_over(self, command: TakeOver, moment: Moment) -> Hold | Again:
        claim, seen = command.claim, command.seen
        row = self._mine(seen, *State)
        if row is None:
            return Again.AGAIN
        is_begun = row.state is State.PENDING and command.is_abandoned
        is_expired = row.is_expired(moment.now)
        is_refused = is_expired and (command.is_abandoned or claim.token == seen.token)
        if not (is_begun or row.may_be_taken(moment.now)) or is_refused:
            return Again.AGAIN
        if is_expired:
            event = Event.ACCEPT if claim.is_accepted else Event.TAKE_OVER
            new = new_row(claim, must(after(row.state, event)), 1, moment.now)
        else:
            # It is still the same operation: it keeps its creation time, its fingerprint and its steps.
            event = Event.CLAIM if is_begun else Event.TAKE_OVER
            new = replace(
                row,
                state=must(after(row.state, event)),
                attempt=row.attempt if is_begun else row.attempt + 1,
                token=claim.token,
                lease_expires_at=moment.now + claim.lease,
                tries=row.tries + command.is_abandoned,
                traceparent=claim.traceparent or row.traceparent,
            )
        hold = Hold(claim.scope, claim.key, new.attempt, claim.token)
        self._rows[claim.scope, claim.key] = new
        self._write_down(hold, _CLAIMED[event], moment)
        return hold

    def _complete(self, command: Complete, moment: Moment) -> Verdict:
        hold = command.hold
        if self._mine(hold, *TERMINAL):
            return Verdict.DONE
        row = self._mine(hold, State.PROCESSING)
        if row is None:
            return Verdict.FENCED
        self._update(
            hold,
            state=after(row.state, command.event),
            answer=command.answer,
            completed_at=moment.now,
            lease_expires_at=None,
            request=None,
        )
        self._write_down(hold, _ENDED[command.event], moment)
        return Verdict.DONE

    def _release(self, command: Release, moment: Moment) -> Verdict:
        hold = command.hold
        row = self._rows.get((hold.scope, hold.key))
        if row is None:
            return Verdict.DONE
        is_its = row.token == hold.token and hold.attempt in {0, row.attempt}
        if not is_its or row.state not in {State.PROCESSING, State.PENDING}:
            return Verdict.FENCED
        hold = replace(hold, attempt=row.attempt)
        if row.state is State.PROCESSING and (row.attempt > 1 or row.steps is not None or row.is_accepted):
            state = after(row.state, Event.GIVE_UP)
            self._update(hold, state=state, token=NO_TOKEN, lease_expires_at=moment.now)
            self._write_down(hold, "given up", moment, command.reason)
        elif after(row.state, Event.RELEASE) is None:
            del self._rows[hold.scope, hold.key]
            self._write_down(hold, "released", moment, command.reason)
        return Verdict.DONE

    def _renew(self, command: Renew, moment: Moment) -> frozenset[Hold]:
        lost = set()
        for hold, lease in command.holds:
            row = self._mine(hold, State.PROCESSING)
            if row is None:
                lost.add(hold)
            else:
                self._update(hold, state=after(row.state, Event.RENEW), lease_expires_at=moment.now + lease)
        return frozenset(lost)

    def _save(self, command: Save | Commit, moment: Moment) -> Verdict:
        hold, progress = command.hold, command.progress
        row = self._mine(hold, State.PROCESSING)
        if row is None or row.steps not in {written(command.before), written(progress)}:
            return Verdict.FENCED
        state = after(row.state, Event.SAVE)
        self._update(hold, state=state, steps=written(progress), recovery_point=progress.recovery_point)
        self._write_down(hold, "saved", moment, change(command.before, progress))
        return Verdict.DONE

    def _mark(self, command: Mark, _moment: Moment) -> Verdict:
        row = self._mine(command.hold, State.PROCESSING)
        if row is None:
            return Verdict.FENCED
        self._update(command.hold, milestone=command.milestone)
        return Verdict.DONE

    def _park(self, command: Park, moment: Moment) -> Verdict:
        hold = command.hold
        if not command.if_silent and self._mine(hold, State.UNKNOWN):
            return Verdict.DONE
        row = self._mine(hold, State.PROCESSING, State.PENDING)
        if row is None or (command.if_silent and not row.lease_is_over(moment.now)):
            return Verdict.FENCED
        self._update(hold, state=after(row.state, Event.PARK), lease_expires_at=None)
        self._write_down(hold, "parked", moment, command.reason)
        return Verdict.DONE

    def _look(self, command: Look, moment: Moment) -> Record | None:
        row = self._rows.get((command.scope, command.key))
        return None if row is None else row.record(command.scope, command.key, moment.now)

    def _settle(self, command: Settle, moment: Moment) -> Record | None:
        # A transaction ends under the lock, all at once: there is nothing to wait for.
        return self._look(Look(command.hold.scope, command.hold.key), moment)

    def _browse(self, command: Browse, moment: Moment) -> tuple[Record, ...]:
        found = [
            row.without_body().record(scope, key, moment.now)
            for (scope, key), row in reversed(self._rows.items())
            if command.key in {None, key}
            and command.scope in {None, scope}
            and command.state in {None, row.state}
            and (command.digest is None or digest_of(key).startswith(command.digest))
        ]
        found.sort(key=lambda record: record.created_at, reverse=True)
        return tuple(found[: command.limit])

    def _begin(self, command: Begin, moment: Moment) -> Hold | Found:
        claim = command.claim
        row = self._rows.get((claim.scope, claim.key))
        return Hold(claim.scope, claim.key, 1, claim.token) if row is None else row.found(moment.now)

    def _finish(self, command: Finish, moment: Moment) -> Verdict:
        claim, hold = command.claim, command.hold
        row = self._rows.get((hold.scope, hold.key))
        if row is not None:
            seen = command.seen and self._mine(command.seen, *State)
            if not seen or not row.may_be_taken(moment.now):
                return Verdict.FENCED
        if row is None or row.is_expired(moment.now):
            row = new_row(claim, State.PROCESSING, hold.attempt, moment.now)
        self._rows[hold.scope, hold.key] = replace(
            row,
            state=must(after(State.PROCESSING, command.event)),
            attempt=hold.attempt,
            token=hold.token,
            answer=command.answer,
            completed_at=moment.now,
            lease_expires_at=None,
            request=None,
            traceparent=claim.traceparent or row.traceparent,
        )
        if self._audit == "on" and hold.attempt > 1:
            # The attempt before this one did not end, which the record does not tell.
            self._write_down(hold, "taken over", moment)
        self._write_down(hold, _ENDED[command.event], moment)
        return Verdict.DONE


_CLAIMED = {Event.ACCEPT: "accepted", Event.CLAIM: "claimed", Event.TAKE_OVER: "taken over"}
_ENDED = {Event.COMPLETE: "completed", Event.FAIL: "failed"}

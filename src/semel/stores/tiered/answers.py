"""Which answers may be kept, as seen from what passes between the flows and the durable store. It asks no store and no
cache.

An answer is kept when the durable store has said that it is finished: it was found so, or it was completed here under a
hold of which it is known when the record expires. Where that is not known, it is kept when it is found.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

from semel.core.commands import Again, Claim, Complete, Finish, Save, TakeOver, Verdict
from semel.core.commands.steps import Commit
from semel.core.record import Found, Hold
from semel.core.recovery import written
from semel.core.state import Event, State, after
from semel.core.value import value
from semel.stores.forks import start_afresh_in_children
from semel.stores.tiered.entry import Entry
from semel.stores.tiered.expiry import deadline
from semel.stores.tiered.memory import LocalAnswers

#: Operations of one process that are under way. Of more, the answers of the oldest are not kept until they are found.
MOST_IN_FLIGHT = 4096


@value
class UnderWay:
    """What is known of a record that this process holds."""

    fingerprint: bytes
    deadline: float
    steps: str | None = None


class Answers:
    """The answers that this process keeps, and the operations whose answers it will keep."""

    _under_way: OrderedDict[bytes, UnderWay]
    _mutex: threading.Lock

    def __init__(self, memory: int) -> None:
        """Keep at most *memory* bytes of them."""
        self.local = LocalAnswers(memory)
        self.start_afresh()
        start_afresh_in_children(self)

    def start_afresh(self) -> None:
        """Have nothing under way."""
        self._mutex = threading.Lock()
        self._under_way = OrderedDict()

    def keep(self, entry: Entry) -> Entry:
        """Keep *entry* in this process."""
        self.local.put(entry)
        return entry

    def claimed(self, claim: Claim, got: Hold | Found | Again, asked_at: float) -> Entry | None:
        """Note what came of a claim; return the answer where it has found one."""
        if isinstance(got, Found):
            return self.found(claim, got, asked_at)
        if isinstance(got, Hold) and not claim.is_accepted:
            self._begin(claim, got, asked_at)
        return None

    def found(self, claim: Claim, got: Found, asked_at: float) -> Entry | None:
        """Keep what was found of a key, if it has ended."""
        entry = Entry.of(claim.scope, claim.key, got, asked_at)
        return entry and self.keep(entry)

    def taken_over(self, command: TakeOver, got: Hold | Again, asked_at: float) -> None:
        """Note what came of a take-over. Of one that goes on with what another began, only that one's claim knows when
        the record expires; the first attempt of a client is a new record, in place of one that had expired.
        """
        claim = command.claim
        if isinstance(got, Hold) and got.attempt == 1 and not (command.is_abandoned or claim.is_accepted):
            self._begin(claim, got, asked_at)

    def saved(self, command: Save | Commit, verdict: Verdict | None) -> None:
        """Note what came of a step that was to be stored; None: nobody knows."""
        with self._mutex:
            known = self._under_way.pop(command.hold.token, None)
            if known is not None and verdict is Verdict.DONE:
                self._under_way[command.hold.token] = replace(known, steps=written(command.progress))

    def ending(self, hold: Hold) -> UnderWay | None:
        """Return what is known of an operation that is about to end. It is known once: of two answers that are sent for
        one hold, the durable store keeps the first, and says the same of both.
        """
        with self._mutex:
            return self._under_way.pop(hold.token, None)

    def completed(self, command: Complete, known: UnderWay, verdict: Verdict) -> Entry | None:
        """Keep an answer that the durable store has."""
        return self._ended(command, known) if verdict is Verdict.DONE else None

    def finished(self, command: Finish, verdict: Verdict, begun_at: float) -> Entry | None:
        """Keep an answer that was committed in the application's own transaction, begun at *begun_at*."""
        if verdict is not Verdict.DONE or command.seen is not None:
            # What took another record's place may have kept its time and its fingerprint.
            return None
        claim = command.claim
        known = UnderWay(claim.fingerprint, deadline(begun_at, claim.retention.total_seconds()))
        return self._ended(command, known)

    def _begin(self, claim: Claim, hold: Hold, asked_at: float) -> None:
        known = UnderWay(claim.fingerprint, deadline(asked_at, claim.retention.total_seconds()))
        with self._mutex:
            self._under_way[hold.token] = known
            if len(self._under_way) > MOST_IN_FLIGHT:
                self._under_way.popitem(last=False)

    def _ended(self, command: Complete | Finish, known: UnderWay) -> Entry:
        hold = command.hold
        return self.keep(
            Entry(
                hold.scope,
                hold.key,
                _ENDED[command.event],
                hold.attempt,
                hold.token,
                known.fingerprint,
                command.answer,
                known.steps,
                is_accepted=False,
                deadline=known.deadline,
            )
        )


#: As the state machine has it, which says None of what can't be.
_ENDED = {
    event: state for event in (Event.COMPLETE, Event.FAIL) if (state := after(State.PROCESSING, event)) is not None
}

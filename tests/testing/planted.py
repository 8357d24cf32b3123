"""Stores that are broken on purpose, each in one of the ways stores are broken in the wild. See test_planted.py."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from semel.core.commands import (
    Again,
    Claim,
    Command,
    Commit,
    Complete,
    FindStuck,
    Finish,
    Mark,
    Note,
    Reap,
    Release,
    Renew,
    Save,
    Sweep,
    TakeOver,
    Verdict,
)
from semel.core.message import Answer
from semel.core.record import Found, Hold
from semel.core.state import TERMINAL, State
from semel.stores.memory import MemoryStore
from semel.testing.conformance import Candidate, StoreConformance


class Broken(MemoryStore):
    def row(self, hold: Hold | Claim) -> Any:
        return self._rows.get((hold.scope, hold.key))

    def perform(self, command: Command[Any]) -> Any:
        return super().perform(self.spoil(command))

    def act(self, command: Command[Any], actor: str | None) -> Any:
        # What a transaction writes comes this way, and not by perform().
        is_inside = isinstance(command, (Commit, Finish))
        return super().act(self.spoil(command) if is_inside else command, actor)

    def spoil(self, command: Command[Any]) -> Command[Any]:
        return command


class NoFence(Broken):
    """Whoever completes, completes."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Complete) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, attempt=row.attempt, token=row.token))
        return command


class NoToken(Broken):
    """The attempt number alone is compared."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, (Complete, Release)) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, token=row.token))
        return command


class NoAttempt(Broken):
    """The token alone is compared."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Complete) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, attempt=row.attempt))
        return command


class ReadThenWrite(Broken):
    """The claim looks first and takes the key afterwards."""

    def perform(self, command: Command[Any]) -> Any:
        if isinstance(command, Claim):
            known = self.row(command)
            if known is None:
                time.sleep(0.002)  # whoever is broken may sleep
                self._rows.pop((command.scope, command.key), None)
        return super().perform(command)


class TakesTheLiving(Broken):
    """A take-over does not look at the lease."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, TakeOver) and (row := self.row(command.claim)) and row.lease_expires_at:
            self._rows[command.claim.scope, command.claim.key] = replace(row, lease_expires_at=row.created_at)
        return command


class ExpiryEndsLeases(Broken):
    """Past its retention a record is free for all, though its worker renews."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, TakeOver) and (row := self.row(command.claim)) and row.expires_at <= self._clock():
            self._rows[command.claim.scope, command.claim.key] = replace(row, lease_expires_at=row.created_at)
        return command


class NewFingerprint(Broken):
    """A take-over from the dead replaces the fingerprint."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(command, TakeOver) and isinstance(got, Hold):
            self._update(got, fingerprint=command.claim.fingerprint)
        return got


class LastAnswerWins(Broken):
    """A second completion replaces the first."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(command, Complete) and got is Verdict.DONE:
            self._update(command.hold, answer=command.answer)
        return got


class FreesTheEnded(Broken):
    """A release deletes an answer."""

    def perform(self, command: Command[Any]) -> Any:
        row = self.row(command.hold) if isinstance(command, Release) else None
        if row and isinstance(command, Release) and row.state in TERMINAL and row.token == command.hold.token:
            del self._rows[command.hold.scope, command.hold.key]
            return Verdict.DONE
        return super().perform(command)


class AnswersAsText(Broken):
    """Bodies are kept as text."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Complete) and command.answer.body is not None:
            body = command.answer.body.decode("utf-8", "replace").encode()
            return replace(command, answer=replace(command.answer, body=body))
        return command


class HeadersAsDictionary(Broken):
    """Of repeated headers the last is kept."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Complete):
            headers = tuple(dict(command.answer.headers).items())
            return replace(command, answer=replace(command.answer, headers=headers))
        return command


class EmptyIsNothing(Broken):
    """An empty body is taken for none."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Complete):
            return replace(
                command, answer=Answer(command.answer.status, command.answer.headers, command.answer.body or None)
            )
        return command


class ScopelessKeys(Broken):
    """Two principals meet."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        return replace(command, scope="everybody") if isinstance(command, Claim) else command


class RenewsForZombies(Broken):
    """A renewal compares nothing."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        return frozenset() if isinstance(command, Renew) else got


class SaysBusyOfTheDead(Broken):
    """A claim does not look at the lease, so that a dead worker's key is stuck for ever."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(got, Found) and got.state is State.PROCESSING:
            return replace(got, lease_is_over=False)
        return got


class StuckForEver(Broken):
    """Nothing is ever taken over."""

    def perform(self, command: Command[Any]) -> Any:
        return Again.AGAIN if isinstance(command, TakeOver) else super().perform(command)


class ForgetsSteps(Broken):
    """A take-over begins from the beginning."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(command, TakeOver) and isinstance(got, Hold):
            self._update(got, steps=None, recovery_point=None)
        return got


class FreesWhatHasSteps(Broken):
    """A release deletes what has begun."""

    def perform(self, command: Command[Any]) -> Any:
        if isinstance(command, Release) and (row := self.row(command.hold)) and row.token == command.hold.token:
            self._update(command.hold, steps=None, recovery_point=None)
        return super().perform(command)


class SavesForZombies(Broken):
    """A save compares nothing, by itself or in a phase."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, (Save, Commit)) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, attempt=row.attempt, token=row.token))
        return command


class SavesInPhasesForZombies(Broken):
    """The end of a phase compares nothing."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Commit) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, attempt=row.attempt, token=row.token))
        return command


class FinishesBlindly(Broken):
    """The end of a transaction takes the place of whatever is there."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Finish) and (row := self.row(command.hold)):
            return replace(command, seen=replace(command.hold, attempt=row.attempt, token=row.token))
        return command


class BeginsTwice(Broken):
    """Two transactions are at one key at the same time."""

    def lock(self, claim: Claim) -> bytes | None:
        super().lock(claim)
        return None


class ParkedIsFree(Broken):
    """What is parked is taken over like what is stuck."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        row = self.row(command.claim) if isinstance(command, TakeOver) else None
        if isinstance(command, TakeOver) and row and row.state is State.UNKNOWN:
            self._update(command.seen, state=State.PROCESSING, lease_expires_at=row.created_at)
        return command


class SweepsTheLiving(Broken):
    """The sweeper does not look at the lease once more."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Sweep) and (row := self.row(command.hold)) and row.state is State.PROCESSING:
            self._update(command.hold, lease_expires_at=row.created_at)
        return command


class ReapsInFlight(Broken):
    """The reaper looks at the retention alone."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Reap):
            for place, row in self._rows.items():
                if row.state is State.PROCESSING and row.expires_at <= self._clock():
                    self._rows[place] = replace(row, lease_expires_at=row.created_at)
        return command


class ReapsTheParked(Broken):
    """The reaper deletes what waits for an operator."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Reap):
            for place, row in tuple(self._rows.items()):
                if row.state is State.UNKNOWN and row.expires_at <= self._clock():
                    del self._rows[place]
        return command


class ReapsTooMuch(Broken):
    """A round of reaping has no end."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        return replace(command, limit=10**9) if isinstance(command, Reap) else command


class KeepsNoTrail(Broken):
    """Nothing is written down."""

    def _write_down(self, *_line: Any, **_more: Any) -> None:
        pass


class TellsOfReplays(Broken):
    """A replay writes."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(got, Found) and isinstance(command, Claim) and got.state in TERMINAL:
            super().perform(Note(Hold(command.scope, command.key, got.attempt, got.token), "replayed"))
        return got


class KeepsCredentials(Broken):
    """A kept request has its client's password in it."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(command, Claim) and isinstance(got, Hold):
            self._update(got, request=command.request)
        return got


class ClientsBeginTheAccepted(Broken):
    """Whoever comes back for it begins what was left to a worker."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        row = self.row(command.claim) if isinstance(command, TakeOver) else None
        if isinstance(command, TakeOver) and row and row.state is State.PENDING:
            return replace(command, is_abandoned=row.expires_at > self._clock())
        return command


class BegunIsASecondAttempt(Broken):
    """A worker that begins an accepted one counts it as taken over."""

    def perform(self, command: Command[Any]) -> Any:
        row = self.row(command.claim) if isinstance(command, TakeOver) else None
        got = super().perform(command)
        if row and row.state is State.PENDING and isinstance(got, Hold) and got.attempt == row.attempt:
            self._update(got, attempt=2)
            return replace(got, attempt=2)
        return got


class ForgetsTheAccepted(Broken):
    """A worker that gives an accepted one up deletes it, though its client was told that it would be run."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        row = self.row(command.hold) if isinstance(command, Release) else None
        if isinstance(command, Release) and row and row.token == command.hold.token and row.is_accepted:
            self._update(command.hold, is_accepted=False)
        return command


class ForgetsThatItWasAccepted(Broken):
    """Of what has begun it is not known any more that it was accepted: a client would be told to take it over."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        is_begun = isinstance(got, Found) and got.state is State.PROCESSING
        return replace(got, is_accepted=False) if is_begun else got


class KeepsThePending(Broken):
    """Freed before anybody has begun it, an accepted one stays."""

    def perform(self, command: Command[Any]) -> Any:
        row = self.row(command.hold) if isinstance(command, Release) else None
        return Verdict.FENCED if row and row.state is State.PENDING else super().perform(command)


class PendingForEver(Broken):
    """What nobody has begun is never reaped."""

    def perform(self, command: Command[Any]) -> Any:
        if not isinstance(command, Reap):
            return super().perform(command)
        pending = {place: row for place, row in self._rows.items() if row.state is State.PENDING}
        self._rows = {place: row for place, row in self._rows.items() if place not in pending}
        got = super().perform(command)
        self._rows |= pending
        return got


class PendingComesLast(Broken):
    """What is pending is found after all that is stuck, however long it waits."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        if isinstance(command, FindStuck):
            states = {each.hold: self._rows[each.hold.scope, each.hold.key].state for each in got}
            return tuple(sorted(got, key=lambda each: states[each.hold] is State.PENDING))
        return got


class AcceptedHasALease(Broken):
    """What is only accepted is under way, as far as anybody can tell."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        return replace(command, is_accepted=False) if isinstance(command, Claim) else command


class MarksForZombies(Broken):
    """Whoever says how far it is, is believed."""

    def spoil(self, command: Command[Any]) -> Command[Any]:
        if isinstance(command, Mark) and (row := self.row(command.hold)):
            return replace(command, hold=replace(command.hold, attempt=row.attempt, token=row.token))
        return command


class SaysNotHowLong(Broken):
    """How long an answer is kept is what it was when it was new."""

    def perform(self, command: Command[Any]) -> Any:
        got = super().perform(command)
        return replace(got, retention_left=timedelta(hours=24)) if isinstance(got, Found) else got


class Planted(StoreConformance):
    broken: type[Broken]

    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        ahead = [timedelta(0)]
        store = cls.broken(clock=lambda: datetime.now(UTC) + ahead[0])  # noqa: TID251 - the memory store has no other

        def age(duration: timedelta) -> None:
            ahead[0] += duration

        return Candidate(open=lambda: store, age=age)

    @pytest.fixture(scope="class")
    @classmethod
    def failed_before(cls, request: pytest.FixtureRequest) -> int:
        return request.session.testsfailed

    @pytest.fixture(autouse=True)
    def found_once(self, request: pytest.FixtureRequest, failed_before: int) -> None:
        """What is found need not be found again."""
        if request.session.testsfailed > failed_before:
            pytest.skip("It is found.")


KINDS: list[type[Broken]] = [Broken, *Broken.__subclasses__()]
for bug in KINDS:
    globals()[f"Test{bug.__name__}"] = type(f"Test{bug.__name__}", (Planted,), {"broken": bug})
